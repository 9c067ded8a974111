"""Engines with one fault each: outputs, gradients, steps, weights, saves, memory."""

from __future__ import annotations

import os
import pickle
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tests.faults.faulty import fault

from coupler.batch import Batch
from coupler.engine_kit.adamw import multiplier
from coupler.interfaces import Head, Loss, Named, Output, Part, Parts, Pending, StepInfo, StepResult
from coupler.metrics import Metrics, merge
from coupler.testing.models import EOS
from coupler.testing.toy import ToyEngine, backward, columns_of, outputs, run, slopes

OUT = ("logprobs", "entropy")


class Hooked(ToyEngine):
    """The toy engine, with a method for each thing that may go wrong in it."""

    training = False

    def altered(self, batch: Batch, out: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the outputs of a pass over a micro-batch."""
        return out

    def _outputs(self, batch: Batch, top_k: int = 0) -> dict[str, np.ndarray]:
        return self.altered(batch, super()._outputs(batch, top_k))

    def columns(self, part: Batch) -> dict[str, Any]:
        return columns_of(part)

    def added(self, name: str, grad: np.ndarray, part: Batch, index: int) -> np.ndarray:
        """Return what a micro-batch adds to the gradient of a tensor."""
        return grad

    def ready(self, batch: Batch) -> None:
        """Meddle with the gradient of a whole step."""

    def forward_backward(
        self, batch: Batch, want: tuple[Output, ...], loss: Loss, step: StepInfo
    ) -> Metrics:
        self.grads = {k: np.zeros_like(v) for k, v in self.params.items()}
        self.info, self.training = step, True
        found: list[Metrics] = []
        for index, rows in enumerate(self.parts(batch)):
            part = batch.take(rows)
            everything = self._outputs(part)
            out = {o.name: everything[o.name] for o in want}
            columns = self.columns(part)
            found.append(loss(out, columns)[1])
            for name, grad in self._backward(part, slopes(loss, out, columns)).items():
                self.grads[name] += self.added(name, grad, part, index)
        self.ready(batch)
        self.training = False
        return self.merged(found)

    def merged(self, found: list[Metrics]) -> Metrics:
        return merge(found)


@fault("engine")
def honest() -> type:
    return type("Honest", (Hooked,), {})


def positions(batch: Batch) -> np.ndarray:
    return np.concatenate([np.arange(n) for n in batch.lengths] or [np.arange(0)])


def altering(where: Any, names: tuple[str, ...] = OUT, by: float = 0.05) -> type:
    """Make an engine whose outputs are off where ``where(self, batch)`` [T] is true."""

    def altered(self: Hooked, batch: Batch, out: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        hit = batch["loss_mask"] & where(self, batch)
        return {n: np.where(hit, c * (1 + by), c) if n in names else c for n, c in out.items()}

    return type("Altering", (Hooked,), {"altered": altered})


# --- masks


MASKS = {
    "ignored": lambda b, m: np.full_like(m, -1),
    "first_id_only": lambda b, m: m[:, :1],
    "last_id_left_out": lambda b, m: m[:, :-1],
    "of_the_token_before": lambda b, m: np.where(
        (m < 0).all(1, keepdims=True), m, np.roll(m, 1, 0)
    ),
    "whole_rows_are_the_token": lambda b, m: np.where(
        (m < 0).all(1, keepdims=True), b["tokens"][:, None], m
    ),
}


@fault("engine", how=tuple(MASKS), training=(False, True))
def masks(how: str, training: bool) -> type:
    def masked(batch: Batch) -> Batch:
        if not batch.has("sampling_mask"):
            return batch
        return batch.with_tokens(sampling_mask=MASKS[how](batch, batch["sampling_mask"]))

    class Masks(Hooked):
        def _outputs(self, batch: Batch, top_k: int = 0) -> dict[str, np.ndarray]:
            given = batch if self.training is not training else masked(batch)
            return super()._outputs(given, top_k)

        def _backward(self, batch: Batch, d_out: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            return super()._backward(masked(batch) if training else batch, d_out)

    return Masks


# --- outputs


@fault("engine", past=(8, 16, 32, 64, 128, 256, 300, 512, 600))
def outputs_past_a_position_of(past: int) -> type:
    return altering(lambda s, b: positions(b) > past)


@fault("engine", past=(64, 128, 256, 512, 768, 1000))
def outputs_past_a_packed_row_of(past: int) -> type:
    return altering(lambda s, b: np.arange(b.num_tokens) > past)


@fault("engine", size=(16, 64, 128, 256, 512))
def outputs_at_the_edge_of_a_tile_of(size: int) -> type:
    return altering(lambda s, b: np.arange(b.num_tokens) % size == size - 1)


@fault("engine", more=(2, 6, 8, 16, 32))
def outputs_of_sequences_above(more: int) -> type:
    return altering(lambda s, b: b.spread(np.arange(len(b))) >= more)


@fault("engine", token=(0, 1, EOS, 3))
def outputs_of_a_special_token(token: int) -> type:
    return altering(lambda s, b: b["tokens"] == token)


@fault("engine", token=(0, 1, EOS, 3))
def outputs_after_a_special_token(token: int) -> type:
    return altering(lambda s, b: np.concatenate([[-1], b["tokens"][:-1]])[: b.num_tokens] == token)


@fault("engine", token=(EOS, 3))
def gradients_of_a_special_token_are_masked(token: int) -> type:
    def columns(self: Hooked, part: Batch) -> dict[str, Any]:
        found = columns_of(part)
        weight = np.where(part["tokens"] == token, 0, found["loss_weight"])
        return {**found, "loss_weight": weight.astype(np.float32)}

    return type("Masked", (Hooked,), {"columns": columns})


@fault("engine", below=(0.5, 0.3), above=(2.0,))
def temperatures_are_clipped(below: float, above: float) -> type:
    def altered(self: Hooked, batch: Batch, out: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if not batch.has("temperature"):
            return out
        clipped = np.clip(batch["temperature"], below, above)
        return outputs(batch, run(self.params, batch.with_seqs(temperature=clipped)))

    return type("Clipped", (Hooked,), {"altered": altered})


@fault("engine", which=("logprobs", "entropy"), how=("raw", "last", "first", "mean"))
def a_temperature_that_is(which: str, how: str) -> type:
    def altered(self: Hooked, batch: Batch, out: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if not batch.has("temperature") or not len(batch) or "values" in out:
            return out
        own = batch["temperature"]
        one = {"raw": 1.0, "last": own[-1], "first": own[0], "mean": own.mean()}[how]
        alone = batch.with_seqs(temperature=np.full(len(batch), one, np.float32))
        return {**out, which: outputs(alone, run(self.params, alone))[which]}

    return type("Temperature", (Hooked,), {"altered": altered})


CHANGED = {
    "float16": lambda c, m: c.astype(np.float16).astype(np.float64),
    "shifted": lambda c, m: np.where(m, np.roll(c, 1), 0.0),
    "under_the_mask": lambda c, m: np.where(m, c, -1.0),
    "log2": lambda c, m: c / np.log(2),
    "clamped": lambda c, m: np.clip(c, -3.0, 3.0),
    "off_by_a_little": lambda c, m: np.where(m, c + 5e-4, 0.0),
    "zero": lambda c, m: np.zeros_like(c),
}


@fault("engine", name=OUT, how=tuple(CHANGED))
def an_output_changed(name: str, how: str) -> type:
    def altered(self: Hooked, batch: Batch, out: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if name not in out:
            return out
        return {**out, name: CHANGED[how](out[name], batch["loss_mask"])}

    return type("Changed", (Hooked,), {"altered": altered})


@fault("engine", when=("forward", "training", "both"), rate=(0.02, 0.3))
def dropout_stays_on(when: str, rate: float) -> type:
    def altered(self: Hooked, batch: Batch, out: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if when != "both" and (when == "training") != self.training:
            return out
        draw = self.__dict__.setdefault("draw", np.random.default_rng(0))
        keep = draw.random(batch.num_tokens) >= rate
        return {n: c * np.where(keep, 1.0, 1.1) for n, c in out.items()}

    return type("Dropout", (Hooked,), {"altered": altered})


@fault("engine")
def rows_leak_across_sequences() -> type:
    """A sequence of one sees the last token of the one before it."""

    def altered(self: Hooked, batch: Batch, out: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        leak = np.zeros(batch.num_tokens)
        for start in batch.starts[1:-1]:
            leak[start : start + 2] = 0.03
        return {n: c * (1 + leak * batch["loss_mask"]) for n, c in out.items()}

    return type("Leaks", (Hooked,), {"altered": altered})


@fault("engine", what=("equal_sequences", "equal_prompts"))
def shared_rows(what: str) -> type:
    """Sequences that are equal, or begin alike, are computed once."""

    def columns(self: Hooked, part: Batch) -> dict[str, Any]:
        found = columns_of(part)
        seen: set[bytes] = set()
        weight = found["loss_weight"].copy()
        for i in range(len(part)):
            rows = slice(part.starts[i], part.starts[i + 1])
            valid = part["loss_mask"][rows]
            first = int(valid.argmax()) if valid.any() else 0
            size = len(valid) if what == "equal_sequences" else first
            key = part["tokens"][rows][:size].tobytes()
            if key in seen and what == "equal_sequences":
                weight[rows] = 0
            elif key in seen and valid.any():
                weight[rows][first] = 0
            seen.add(key)
        return {**found, "loss_weight": weight}

    return type("Shared", (Hooked,), {"columns": columns})


@fault("engine", above=(8, 16, 64))
def the_order_of_batches_above(above: int) -> type:
    class Reorders(Hooked):
        def forward(self, batch: Batch, want: tuple[Output, ...]) -> Batch:
            done = super().forward(batch, want)
            if len(batch) <= above:
                return done
            return done.take(np.argsort(batch.lengths, kind="stable"))

    return Reorders


# --- the gradient


def adding(added: Any) -> type:
    return type("Adding", (Hooked,), {"added": added})


GRADIENTS = {
    "averaged": lambda s, n, g, p, i: g / max(1, s.count),
    "last_dropped": lambda s, n, g, p, i: g * (i < s.count - 1 or s.count == 1),
    "first_only": lambda s, n, g, p, i: g * (i == 0),
    "without_the_third": lambda s, n, g, p, i: g * (i != 2),
    "scaled": lambda s, n, g, p, i: g * 1.001,
    "scaled_by_tokens": lambda s, n, g, p, i: g * p.num_tokens / 50,
    "float16": lambda s, n, g, p, i: g.astype(np.float16).astype(np.float64),
    "bias_lost": lambda s, n, g, p, i: g * (n != "head.bias"),
    "embed_lost": lambda s, n, g, p, i: g * (n != "embed.weight"),
    "embed_doubled": lambda s, n, g, p, i: g * (1 + (n == "embed.weight")),
    "clipped_by_value": lambda s, n, g, p, i: np.clip(g, -0.01, 0.01),
    "clipped_each": lambda s, n, g, p, i: g * min(1, 0.5 / (np.sqrt((g * g).sum()) + 1e-9)),
    "row_lost": lambda s, n, g, p, i: np.where(
        np.arange(len(g)).reshape(-1, *[1] * (g.ndim - 1)) == 77, 0, g
    ),
    "special_rows_lost": lambda s, n, g, p, i: np.where(
        np.arange(len(g)).reshape(-1, *[1] * (g.ndim - 1)) < 4, 0, g
    ),
    "tiny_lost": lambda s, n, g, p, i: np.where(abs(g) < 1e-5, 0, g),
}


@fault("engine", how=tuple(GRADIENTS))
def a_gradient(how: str) -> type:
    cls = adding(GRADIENTS[how])

    def parts(self: Hooked, batch: Batch) -> list[Any]:
        found = Hooked.parts(self, batch)
        self.count = len(found)
        return found

    cls.parts = parts  # type: ignore[attr-defined]
    return cls


COLUMNS = {
    "weights_ignored": lambda c: {
        **c,
        "loss_weight": c["loss_mask"] / max(1, c["loss_mask"].sum()),
    },
    "weights_averaged": lambda c: {
        **c,
        "loss_weight": np.where(c["loss_mask"], c["loss_weight"].mean(), 0),
    },
    "last_token_lost": lambda c: {**c, "loss_weight": c["loss_weight"] * ~_lasts(c)},
    "first_token_lost": lambda c: {**c, "loss_weight": c["loss_weight"] * ~_firsts(c)},
    "after_a_gap_lost": lambda c: {**c, "loss_weight": c["loss_weight"] * ~_after_gaps(c)},
    "mask_ignored": lambda c: {
        **c,
        "advantages": c["advantages"] + 0.1 * np.roll(c["loss_mask"], 1),
    },
    "negative_lost": lambda c: {**c, "advantages": np.maximum(c["advantages"], 0)},
}


def _firsts(columns: Any) -> np.ndarray:
    mask = columns["loss_mask"]
    return mask & ~np.concatenate([[False], mask[:-1]])[: len(mask)]


def _lasts(columns: Any) -> np.ndarray:
    mask = columns["loss_mask"]
    return mask & ~np.concatenate([mask[1:], [False]])[: len(mask)]


def _after_gaps(columns: Any) -> np.ndarray:
    starts = np.zeros(len(columns["loss_mask"]), bool)
    found = _firsts(columns)
    first: set[int] = set()
    for row in np.flatnonzero(found):
        seq = int(columns["seq"][row])
        starts[row] = seq in first
        first.add(seq)
    return starts


@fault("engine", how=tuple(COLUMNS))
def a_column(how: str) -> type:
    def columns(self: Hooked, part: Batch) -> dict[str, Any]:
        found = columns_of(part)
        return COLUMNS[how](found) if "advantages" in found or "adv" not in how else found

    return type("Column", (Hooked,), {"columns": columns})


@fault("engine", above=(8, 16, 64))
def sequences_are_lost_above(above: int) -> type:
    def parts(self: Hooked, batch: Batch) -> list[Any]:
        rows = np.arange(min(above, len(batch)))
        return Hooked.parts(self, batch.take(rows))

    return type("Lost", (Hooked,), {"parts": parts})


@fault("engine", above=(4, 8, 16, 32))
def micro_batches_are_lost_above(above: int) -> type:
    def parts(self: Hooked, batch: Batch) -> list[Any]:
        return Hooked.parts(self, batch)[:above]

    return type("Lost", (Hooked,), {"parts": parts})


@fault("engine", above=(64, 256, 512, 600))
def sequences_are_cut_at(above: int) -> type:
    def columns(self: Hooked, part: Batch) -> dict[str, Any]:
        found = columns_of(part)
        return {**found, "loss_weight": found["loss_weight"] * (positions(part) < above)}

    return type("Cut", (Hooked,), {"columns": columns})


@fault("engine")
def an_entropy_without_a_gradient() -> type:
    class Detached(Hooked):
        def _backward(self, batch: Batch, d_out: dict[str, np.ndarray]) -> Any:
            if "entropy" in d_out:
                d_out = {**d_out, "entropy": np.zeros(batch.num_tokens)}
            return super()._backward(batch, d_out)

    return Detached


@fault("engine")
def a_gradient_at_temperature_one() -> type:
    class Plain(Hooked):
        def _backward(self, batch: Batch, d_out: dict[str, np.ndarray]) -> Any:
            if self.model.head is Head.VALUE:
                return super()._backward(batch, d_out)
            return backward(
                self.params,
                batch,
                run(self.params, batch.with_seqs(temperature=np.ones(len(batch), np.float32))),
                d_out,
            )

    return Plain


@fault("engine", how=("last", "mean_of_means", "first"))
def merged_metrics(how: str) -> type:
    def merged(self: Hooked, found: list[Metrics]) -> Metrics:
        if how == "last":
            return found[-1]
        if how == "first":
            return found[0]
        return merge(
            [{n: replace(m, total=m.value, weight=1.0) for n, m in f.items()} for f in found]
        )

    return type("Merged", (Hooked,), {"merged": merged})


# --- the optimizer


class Stepped(Hooked):
    """Take the steps of the toy engine, with its formula open to change."""

    decays, bias_correction, clips = "matrices", True, True
    betas_swapped = eps_inside = coupled = False
    frozen: tuple[str, ...] = ()
    reports = "norm"

    def rate(self) -> float:
        return self.config.lr * multiplier(self.config)(self.steps)

    def step(self) -> StepResult:
        c, lr = self.config, self.rate()
        norm = float(np.sqrt(sum((g * g).sum() for g in self.grads.values())))
        if not np.isfinite(norm):
            return self.skipped(norm, lr)
        self.steps += 1
        scale = min(1.0, c.max_grad_norm / (norm + 1e-6)) if c.max_grad_norm and self.clips else 1.0
        beta1, beta2 = (c.beta2, c.beta1) if self.betas_swapped else (c.beta1, c.beta2)
        for name, param in self.params.items():
            grad = self.grads[name] * scale
            self.grads[name] = np.zeros_like(param)
            if name in self.frozen:
                continue
            matrix = param.ndim > 1
            decay = (
                c.weight_decay
                * {"matrices": matrix, "all": True, "none": False, "biases": not matrix}[
                    self.decays
                ]
            )
            if self.coupled:
                grad = grad + decay * param
                decay = 0.0
            self.first[name] = beta1 * self.first[name] + (1 - beta1) * grad
            self.second[name] = beta2 * self.second[name] + (1 - beta2) * grad * grad
            mean, square = self.first[name], self.second[name]
            if self.bias_correction:
                mean, square = mean / (1 - beta1**self.steps), square / (1 - beta2**self.steps)
            root = np.sqrt(square + c.eps) if self.eps_inside else np.sqrt(square) + c.eps
            param -= lr * (mean / root + decay * param)
            self.params[name][...] = self.kept(param)
        return StepResult(True, norm * scale if self.reports == "clipped" else norm, lr)

    def skipped(self, norm: float, lr: float) -> StepResult:
        self.grads = {k: np.zeros_like(v) for k, v in self.params.items()}
        return StepResult(applied=False, grad_norm=norm, lr=lr)

    def kept(self, param: np.ndarray) -> np.ndarray:
        """Return the weights as the optimizer holds them."""
        return param


STEPS: dict[str, dict[str, Any]] = {
    "decays_all": {"decays": "all"},
    "decays_nothing": {"decays": "none"},
    "decays_biases": {"decays": "biases"},
    "couples_decay": {"coupled": True},
    "no_bias_correction": {"bias_correction": False},
    "no_clipping": {"clips": False},
    "swaps_betas": {"betas_swapped": True},
    "eps_inside": {"eps_inside": True},
    "freezes_bias": {"frozen": ("head.bias",)},
    "freezes_embed": {"frozen": ("embed.weight",)},
    "reports_clipped": {"reports": "clipped"},
    "keeps_float16": {"kept": lambda s, p: p.astype(np.float16)},
    "keeps_bfloat16": {
        "kept": lambda s, p: (p.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)
    },
    "late_rate": {"rate": lambda s: s.config.lr * multiplier(s.config)(max(0, s.steps - 1))},
    "early_rate": {"rate": lambda s: s.config.lr * multiplier(s.config)(s.steps + 1)},
    "constant_rate": {"rate": lambda s: s.config.lr},
    "tells_another_rate": {"step": lambda s: replace(Stepped.step(s), lr=s.config.lr / 2)},
    "ten_steps_alone": {"rate": lambda s: s.config.lr * (s.steps < 8)},
    "counts_skipped": {
        "skipped": lambda s, n, lr: (setattr(s, "steps", s.steps + 1), Stepped.skipped(s, n, lr))[1]
    },
    "says_applied": {"skipped": lambda s, n, lr: replace(Stepped.skipped(s, n, lr), applied=True)},
    "says_skipped": {"step": lambda s: replace(Stepped.step(s), applied=False)},
    "decays_when_skipped": {
        "skipped": lambda s, n, lr: (
            [p.__imul__(0.99) for p in s.params.values()],
            Stepped.skipped(s, n, lr),
        )[1]
    },
}


@fault("engine", how=tuple(STEPS))
def a_step(how: str) -> type:
    return type("Steps", (Stepped,), STEPS[how])


@fault("engine", after=(1, 2, 5, 8))
def steps_do_nothing_after(after: int) -> type:
    def kept(self: Stepped, param: np.ndarray) -> np.ndarray:
        return param

    class Stops(Stepped):
        def rate(self) -> float:
            return super().rate()

        def step(self) -> StepResult:
            before = {n: p.copy() for n, p in self.params.items()}
            result = super().step()
            if self.steps > after:
                self.params = before
            return result

    return Stops


@fault("engine", how=("state", "noise", "time"))
def not_deterministic(how: str) -> type:
    """Equal calls differ by the order of sums, or by what came before."""

    def ready(self: Hooked, batch: Batch) -> None:
        seed = {"state": id(self), "noise": os.urandom(4)[0], "time": time.time_ns()}[how]
        draw = np.random.default_rng(seed)
        self.grads = {n: g * (1 + 1e-7 * draw.random()) for n, g in self.grads.items()}

    return type("Differs", (Hooked,), {"ready": ready})


# --- weights


SENT = {
    "float16": lambda s, n, w: w.astype(np.float16).astype(np.float32),
    "bfloat16": lambda s, n, w: (w.view(np.uint32) & 0xFFFF0000).view(np.float32),
    "transposed": lambda s, n, w: w.T.reshape(w.shape) if n == "head.weight" else w,
    "zero_bias": lambda s, n, w: w * (n != "head.bias"),
    "last_rows": lambda s, n, w: np.where(
        np.arange(len(w)).reshape(-1, *[1] * (w.ndim - 1)) > 315, 0, w
    ).astype(np.float32),
    "scaled": lambda s, n, w: w * np.float32(1.01),
}


@fault("engine", how=tuple(SENT))
def sent_weights(how: str) -> type:
    class Sends(Hooked):
        def weights(self) -> Iterator[Named]:
            for name, w in super().weights():
                yield name, SENT[how](self, name, w)

    return Sends


@fault("engine", how=("cached", "one_step_old", "dropped", "twice", "renamed", "extra", "stale"))
def a_stream_of_weights(how: str) -> type:
    class Streams(Hooked):
        def weights(self) -> Iterator[Named]:
            now = [(n, w.copy()) for n, w in super().weights()]
            last = self.__dict__.setdefault("last", now)
            if how == "cached":
                now = last
            elif how == "one_step_old":
                now, self.last = last, now
            elif how == "dropped":
                now = [(n, w) for n, w in now if n != "head.bias"]
            elif how == "twice":
                now += now[:1]
            elif how == "renamed":
                now = [(n.replace("embed", "embedding"), w) for n, w in now]
            elif how == "extra":
                now.append(("optimizer.step", np.zeros(1, np.float32)))
            elif how == "stale" and self.steps % 2:
                now = last
            yield from now

    return Streams


# --- saves


class Later:
    """A save whose work is done when it is waited for."""

    def __init__(self, work: Any) -> None:
        self.work = work

    def wait(self, seconds: float) -> None:
        """Do the work."""
        self.work()


@fault("engine", how=("when_waited_for", "never", "pickles", "objects", "elsewhere", "doubles"))
def a_save(how: str) -> type:
    class Saves(Hooked):
        def save(self, path: Path, what: Parts) -> Pending:
            if how == "when_waited_for":
                return Later(lambda: ToyEngine.save(self, path, what))
            if how == "never":
                done = super().save(path, what - {Part.OPTIMIZER})
                self.__dict__.setdefault("kept", {})[path] = (self.steps, self.first, self.second)
                return done
            done = super().save(path, what)
            if how == "pickles":
                (path / "extra.pkl").write_bytes(pickle.dumps({"steps": self.steps}))
            elif how == "objects":
                np.save(path / "state.npy", np.array([{"a": 1}], object), allow_pickle=True)
            elif how == "elsewhere":
                (path / "params.npz").rename(path.parent / f"params-{path.name}.npz")
                (path / "where").write_text(str(path.parent / f"params-{path.name}.npz"))
            return done

        def load(self, path: Path, what: Parts) -> None:
            if how == "elsewhere":
                there = Path((path / "where").read_text())
                (path / "params.npz").write_bytes(there.read_bytes())
            if how == "never":
                what -= {Part.OPTIMIZER}
            super().load(path, what)
            if how == "doubles":
                self.steps += 1

    return Saves


LOST = ("first", "second", "steps", "bias", "precision", "moments")


@fault("engine", lost=LOST)
def a_load_that_loses(lost: str) -> type:
    class Loads(Hooked):
        def load(self, path: Path, what: Parts) -> None:
            before = {n: w.copy() for n, w in self.params.items()}
            super().load(path, what)
            if lost in ("first", "second"):
                setattr(self, lost, {n: np.zeros_like(w) for n, w in self.params.items()})
            elif lost == "steps":
                self.steps = 0
            elif lost == "bias":
                self.params["head.bias"] = before["head.bias"]
            elif lost == "precision":
                self.params = {
                    n: w.astype(np.float16).astype(np.float64) for n, w in self.params.items()
                }
            elif lost == "moments":
                self.first = {
                    n: w.astype(np.float16).astype(np.float64) for n, w in self.first.items()
                }

    return Loads


@fault("engine", what=("params", "optimizer"), how=("missing", "damaged"))
def a_load_that_ignores(what: str, how: str) -> type:
    class Ignores(Hooked):
        def load(self, path: Path, parts: Parts) -> None:
            part = Part(what)
            missing = not (path / f"{what}.npz").exists()
            try:
                super().load(path, parts & {part})
            except Exception:
                if missing != (how == "missing"):
                    raise
            super().load(path, parts - {part})

    return Ignores


@fault("engine")
def a_load_of_weights_that_takes_moments_too() -> type:
    class Takes(Hooked):
        def load(self, path: Path, what: Parts) -> None:
            super().load(path, what)
            if what == {Part.PARAMS}:
                self.first = {n: np.ones_like(w) for n, w in self.params.items()}

    return Takes


@fault("engine", what=("params", "optimizer"))
def offloading_loses(what: str) -> type:
    class Moves(Hooked):
        def offload(self, parts: Parts) -> None:
            if Part(what) not in parts:
                return
            if what == "params":
                self.params = {
                    n: w.astype(np.float16).astype(np.float64) for n, w in self.params.items()
                }
            elif what == "optimizer":
                self.second = {
                    n: w.astype(np.float16).astype(np.float64) for n, w in self.second.items()
                }

    return Moves


# --- what calls must leave alone


@fault("engine", where=("random", "numpy"), call=("forward", "forward_backward", "weights", "step"))
def a_global_generator_is_consumed(where: str, call: str) -> type:
    return _beside(call, lambda s: random.random() if where == "random" else np.random.random())


@fault("engine", where=("random", "numpy"), call=("load", "save"))
def a_global_generator_is_seeded(where: str, call: str) -> type:
    return _beside(call, lambda s: random.seed(0) if where == "random" else np.random.seed(0))


def _beside(call: str, what: Any) -> type:
    def method(self: Hooked, *args: Any) -> Any:
        what(self)
        return getattr(Hooked, call)(self, *args)

    return type("Beside", (Hooked,), {call: method})


@fault("engine", mib=(1, 2, 8), call=("forward", "forward_backward", "weights", "step"))
def memory_leaks(mib: int, call: str) -> type:
    return _beside(call, lambda s: s.__dict__.setdefault("kept", []).append(np.ones(mib << 17)))


@fault("engine", call=("forward", "forward_backward"), how=("writes", "adds", "masks"))
def the_batch_is_changed(call: str, how: str) -> type:
    def method(self: Hooked, batch: Batch, *args: Any) -> Any:
        if how == "adds":
            batch.tokens["seen"] = batch["tokens"]  # type: ignore[index]
        else:
            column = batch["tokens" if how == "writes" else "loss_mask"]
            column.flags.writeable = True
            if how == "writes":
                column[-1:] = 5
            else:
                column[-1:] = False
        return getattr(Hooked, call)(self, batch, *args)

    return type("Changes", (Hooked,), {call: method})


@fault("engine", call=("forward", "weights"))
def a_call_between_steps_moves(call: str) -> type:
    def move(self: Hooked) -> None:
        self.steps += self.steps > 0

    return _beside(call, move)
