"""Algorithms, transports, sharding managers and trackers with one fault each."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from tests.faults.faulty import fault

from coupler.batch import Batch
from coupler.builtin.trackers.jsonl import JsonlTracker
from coupler.builtin.transports.inproc import InprocTransport
from coupler.interfaces import Columns, Named, Rank, SendReceipt, Shapes, WeightUpdate
from coupler.loop.weight_sync import StreamShardingManager
from coupler.metrics import Metric, Metrics
from coupler.testing.toy import ToyAlgorithm

# --- algorithms


@fault("algorithm")
def honest() -> type:
    return type("Honest", (ToyAlgorithm,), {})


LOSSES = {
    "scalar": lambda s, l, o, b: l.mean(),
    "summed": lambda s, l, o, b: np.full(len(l), l.sum()),
    "divided_by_tokens": lambda s, l, o, b: l / max(1, b["loss_mask"].sum()),
    "divided_by_sequences": lambda s, l, o, b: l / max(1, b["num_seqs"]),
    "divided_by_the_length": lambda s, l, o, b: (
        l / np.maximum(1, _lengths(b))[b["seq"]] if len(l) else l
    ),
    "centred": lambda s, l, o, b: l - l.mean() * b["loss_mask"] if len(l) else l,
    "leaks_under_the_mask": lambda s, l, o, b: l + 0 * b["advantages"].sum(),
    "counts_calls": lambda s, l, o, b: l * (1 + 0.01 * _count(s)),
    "random": lambda s, l, o, b: l * (1 + 0.01 * np.random.default_rng().random()),
    "global_random": lambda s, l, o, b: l + 0 * np.random.random(),
    "by_position": lambda s, l, o, b: (
        l * (1 + 0.1 * (np.arange(len(l)) == b["loss_mask"].argmax())) if len(l) else l
    ),
    "by_sequence": lambda s, l, o, b: l * (1 + 0.1 * (b["seq"] == 0)),
    "shorter": lambda s, l, o, b: l[:-1],
    "column": lambda s, l, o, b: l[:, None],
    "outside_the_mask": lambda s, l, o, b: np.where(b["loss_mask"], l, o["logprobs"]),
    "detached": lambda s, l, o, b: l * 0,
    "undeclared": lambda s, l, o, b: l + 0.1 * b["ref_logprobs"],
    "nan_if_empty": lambda s, l, o, b: l - 0 * o["logprobs"].max(),
    "nan_if_all_masked": lambda s, l, o, b: l * (b["loss_mask"].sum() / b["loss_mask"].sum()),
}


def _lengths(batch: Columns) -> np.ndarray:
    return np.bincount(batch["seq"], weights=batch["loss_mask"], minlength=batch["num_seqs"])


def _count(algorithm: Any) -> int:
    algorithm.calls = algorithm.__dict__.get("calls", 0) + 1
    return algorithm.calls


@fault("algorithm", how=tuple(LOSSES))
def a_loss(how: str) -> type:
    class Loses(ToyAlgorithm):
        def loss(self, out: Columns, batch: Columns) -> tuple[Any, Metrics]:
            loss, metrics = super().loss(out, batch)
            with np.errstate(all="ignore"):
                return LOSSES[how](self, loss, out, batch), metrics

    return Loses


METRICS = {
    "nan": lambda m, o, b: Metric(float("nan")),
    "unweighted": lambda m, o, b: Metric(m.total / max(1, m.weight)),
    "nan_if_empty": lambda m, o, b: Metric(np.float64(m.total) / np.float64(m.weight)),
    "masked_too": lambda m, o, b: Metric(o["logprobs"].sum(), len(o["logprobs"])),
    "by_sequence": lambda m, o, b: Metric(m.total, b["num_seqs"] + 1),
}


@fault("algorithm", how=tuple(METRICS))
def a_metric(how: str) -> type:
    class Measures(ToyAlgorithm):
        def loss(self, out: Columns, batch: Columns) -> tuple[Any, Metrics]:
            loss, metrics = super().loss(out, batch)
            with np.errstate(all="ignore"):
                changed = METRICS[how](metrics["toy/logprob"], out, batch)
            return loss, {"toy/logprob": changed}

    return Measures


def _groups(batch: Batch) -> np.ndarray:
    return np.unique(batch["group"], return_inverse=True)[1]


def _by(batch: Batch, values: np.ndarray) -> Batch:
    return batch.with_tokens(advantages=batch.spread(values).astype(np.float32))


def _std(batch: Batch, ddof: int) -> np.ndarray:
    group, reward = _groups(batch), batch["reward"].astype(np.float64)
    found = np.zeros(len(batch))
    with np.errstate(all="ignore"):
        for g in set(group):
            r = reward[group == g]
            found[group == g] = (r - r.mean()) / (r.std(ddof=ddof) + (1e-6 if ddof else 0))
    return found


ADVANTAGES = {
    "by_position": lambda s, b, d: ToyAlgorithm.advantages(
        s, b.with_seqs(group=np.arange(len(b)) // 4)
    ).with_seqs(group=b["group"]),
    "by_prompt": lambda s, b, d: ToyAlgorithm.advantages(
        s, b.with_seqs(group=b["tokens"][b.starts[:-1]])
    ).with_seqs(group=b["group"]),
    "of_the_next_group": lambda s, b, d: _by(
        b,
        b["reward"]
        - np.roll(np.bincount(_groups(b), weights=b["reward"]) / np.bincount(_groups(b)), 1)[
            _groups(b)
        ],
    ),
    "divided_by_zero": lambda s, b, d: _by(b, _std(b, 0)),
    "nan_of_one": lambda s, b, d: _by(b, _std(b, 1)),
    "by_length_of_groups": lambda s, b, d: ToyAlgorithm.advantages(
        s, b.with_seqs(group=np.arange(len(b)) // max(1, len(b) // len(set(_groups(b)))))
    ).with_seqs(group=b["group"]),
    "float64": lambda s, b, d: replace(
        b, tokens={**b.tokens, "advantages": d["advantages"].astype(np.float64)}
    ),
    "running_mean": lambda s, b, d: _by(b, b["reward"] - _running(s, b)),
    "counts_calls": lambda s, b, d: b.with_tokens(
        advantages=(d["advantages"] * (1 + 0.01 * _count(s))).astype(np.float32)
    ),
    "random": lambda s, b, d: b.with_tokens(
        advantages=d["advantages"]
        + np.random.default_rng().normal(0, 1e-3, b.num_tokens).astype(np.float32)
    ),
    "reorders": lambda s, b, d: d.take(np.argsort(b.lengths, kind="stable")),
    "writes_rewards": lambda s, b, d: _write(b, d, "reward"),
    "writes_tokens": lambda s, b, d: _write(b, d, "tokens"),
    "writes_logprobs": lambda s, b, d: _write(b, d, "rollout_logprobs"),
    "drops_a_column": lambda s, b, d: d.without("rollout_logprobs"),
    "changes_the_mask": lambda s, b, d: d.with_tokens(loss_mask=np.ones(b.num_tokens, bool)),
    "leaks_under_the_mask": lambda s, b, d: b.with_tokens(
        advantages=d["advantages"] + 0 * b["rollout_logprobs"].sum()
    ),
    "overflows": lambda s, b, d: b.with_tokens(
        advantages=(d["advantages"].astype(np.float16) ** 3).astype(np.float32)
    ),
    "bincount_of_the_number": lambda s, b, d: _by(
        b,
        b["reward"]
        - (np.bincount(b["group"], weights=b["reward"]) / np.maximum(1, np.bincount(b["group"])))[
            b["group"]
        ],
    ),
    "small_groups": lambda s, b, d: ToyAlgorithm.advantages(
        s, b.with_seqs(group=b["group"].astype(np.int8))
    ).with_seqs(group=b["group"]),
}


def _running(algorithm: Any, batch: Batch) -> float:
    algorithm.mean = 0.9 * algorithm.__dict__.get("mean", 0.0) + 0.1 * batch["reward"].mean()
    return algorithm.mean


def _write(batch: Batch, done: Batch, name: str) -> Batch:
    column = batch[name]
    column.flags.writeable = True
    column[:1] = column[:1] + 1
    return done


@fault("algorithm", how=tuple(ADVANTAGES))
def advantages(how: str) -> type:
    class Judges(ToyAlgorithm):
        def advantages(self, batch: Batch) -> Batch:
            return ADVANTAGES[how](self, batch, super().advantages(batch))

    return Judges


@fault("algorithm", how=("numpy", "state", "writes", "none", "raises_if_equal"))
def keep(how: str) -> type:
    class Keeps(ToyAlgorithm):
        def keep(self, group: Batch) -> bool:
            if how == "numpy":
                return np.bool_(True)  # type: ignore[return-value]
            if how == "state":
                return _count(self) % 3 > 0
            if how == "writes":
                _write(group, group, "reward")
            if how == "none":
                return None  # type: ignore[return-value]
            if how == "raises_if_equal":
                return bool(1 / float(np.ptp(group["reward"])))
            return True

    return Keeps


# --- transports


class Carried(InprocTransport):
    """The transport of one process, with methods for what may go wrong in it."""

    def sent(self, named: list[Named]) -> list[Named]:
        """Return what travels."""
        return named

    def came(self, name: str, tensor: Any, worker: Rank) -> Iterator[Named]:
        """Yield what arrives of a tensor."""
        yield name, tensor

    def send(self, weights: Iterable[Named], update: WeightUpdate, rank: Rank) -> SendReceipt:
        """Send what travels, and tell what was given."""
        given = [(name, _new(tensor)) for name, tensor in weights]
        receipt = super().send(self.sent(given), update, rank)
        size = sum(tensor.nbytes for _, tensor in given)
        return replace(receipt, num_tensors=len(given), num_bytes=size)

    def receive(self, update: WeightUpdate, worker: Rank, shapes: Shapes) -> Iterator[Named]:
        for name, tensor in super().receive(update, worker, shapes):
            yield from self.came(name, tensor, worker)


@fault("transport", **{})
def honest_transport() -> type:
    return type("Honest", (Carried,), {})


def _new(tensor: Any) -> Any:
    return tensor.copy() if isinstance(tensor, np.ndarray) else tensor.clone()


def _half(tensor: Any) -> Any:
    if isinstance(tensor, np.ndarray):
        return tensor.astype(np.float16).astype(tensor.dtype)
    import torch

    return tensor.to(torch.float16).to(tensor.dtype) if tensor.is_floating_point() else tensor


def _zero_past(tensor: Any, num_bytes: int) -> Any:
    flat = _new(tensor).reshape(-1)
    flat[num_bytes // max(1, tensor.dtype.itemsize) :] = 0
    return flat.reshape(tensor.shape)


CARRIES = {
    "drops_the_last": lambda named: named[:-1],
    "reorders": lambda named: named[::-1],
    "doubles": lambda named: named + named[-1:],
    "renames": lambda named: [(n.replace("model.", ""), t) for n, t in named],
    "rounds": lambda named: [(n, _half(t)) for n, t in named],
    "flattens": lambda named: [(n, t.reshape(-1)) for n, t in named],
    "scalars_get_an_axis": lambda named: [
        (n, t.reshape(1) if t.shape == () else t) for n, t in named
    ],
    "drops_empty": lambda named: [
        (n, t) for n, t in named if t.size != 0 or not isinstance(t, np.ndarray)
    ],
    "swaps_two": lambda named: [
        (
            n,
            named[i ^ 1][1]
            if i ^ 1 < len(named)
            and named[i ^ 1][1].shape == t.shape
            and named[i ^ 1][1].dtype == t.dtype
            else t,
        )
        for i, (n, t) in enumerate(named)
    ],
    "widens": lambda named: [
        (n, t.astype(np.float64) if isinstance(t, np.ndarray) else t.double()) for n, t in named
    ],
}


@fault("transport", how=tuple(CARRIES))
def carries(how: str) -> type:
    return type("Carries", (Carried,), {"sent": lambda self, named: CARRIES[how](named)})


@fault("transport", past=(1 << 16, 1 << 20, 1 << 24, 1 << 25))
def tensors_are_cut_past(past: int) -> type:
    return type(
        "Cuts", (Carried,), {"sent": lambda s, named: [(n, _zero_past(t, past)) for n, t in named]}
    )


@fault("transport", most=(16, 64, 256, 1024))
def tensors_are_dropped_above_a_number_of(most: int) -> type:
    return type("Drops", (Carried,), {"sent": lambda s, named: named[:most]})


@fault("transport", past=(1 << 20, 1 << 24))
def tensors_are_dropped_past_a_total_of(past: int) -> type:
    def sent(self: Carried, named: list[Named]) -> list[Named]:
        total, kept = 0, []
        for name, tensor in named:
            total += tensor.nbytes
            if total <= past:
                kept.append((name, tensor))
        return kept

    return type("Drops", (Carried,), {"sent": sent})


@fault("transport", every=(7, 100))
def one_of_many_tensors_is_stale(every: int) -> type:
    def sent(self: Carried, named: list[Named]) -> list[Named]:
        last = self.__dict__.get("last", {})
        self.last = dict(named)
        return [
            (n, last.get(n, t) if i % every == every - 1 else t) for i, (n, t) in enumerate(named)
        ]

    return type("Stale", (Carried,), {"sent": sent})


@fault("transport", how=("aliases", "borrows"))
def memory_is_not_copied(how: str) -> type:
    class Aliases(Carried):
        def send(self, weights: Iterable[Named], update: WeightUpdate, rank: Rank) -> SendReceipt:
            self.mailbox.clear()
            named = list(weights) if how == "aliases" else [(n, t[...]) for n, t in weights]
            self.unread, self.mailbox[update.key] = update.num_receivers, named
            size = sum(t.nbytes for _, t in named)
            return SendReceipt(update.version, len(named), size, 1e-6)

    return Aliases


@fault("transport")
def a_buffer_is_reused_too_early() -> type:
    """Each tensor is overwritten by the next one before that one is asked for."""

    class Early(Carried):
        def receive(self, update: WeightUpdate, worker: Rank, shapes: Shapes) -> Iterator[Named]:
            held: list[Named] = []
            for name, tensor in super().receive(update, worker, shapes):
                held.append((name, _new(tensor)))
                if len(held) == 2:
                    first = held.pop(0)
                    flat = first[1].reshape(-1)
                    if flat.shape[0]:
                        flat[:1] = 0
                    yield first[0], first[1]
            yield from held

    return Early


@fault("transport", how=("permuted", "attempt"))
def the_key_ignores(how: str) -> type:
    class Ignores(Carried):
        def receive(self, update: WeightUpdate, worker: Rank, shapes: Shapes) -> Iterator[Named]:
            if self.__dict__.get("before"):
                self.mailbox[update.key] = self.before
                self.unread += 1
            yield from super().receive(update, worker, shapes)

        def send(self, weights: Iterable[Named], update: WeightUpdate, rank: Rank) -> SendReceipt:
            receipt = super().send(weights, update, rank)
            if (how == "permuted" and update.permuted) or (how == "attempt" and not update.attempt):
                self.__dict__.setdefault("before", self.mailbox[update.key])
            return receipt

    return Ignores


SENDS = {
    "tensors": lambda r: replace(r, num_tensors=r.num_tensors + 1),
    "bytes": lambda r: replace(r, num_bytes=r.num_bytes // 2),
    "version": lambda r: replace(r, version=0),
    "seconds": lambda r: replace(r, seconds=0.0),
    "nothing": lambda r: None,
}


@fault("transport", how=tuple(SENDS))
def a_receipt_that_lies_about(how: str) -> type:
    class Lies(Carried):
        def send(self, weights: Iterable[Named], update: WeightUpdate, rank: Rank) -> SendReceipt:
            return SENDS[how](super().send(weights, update, rank))

    return Lies


@fault("transport", receivers=(1, 2))
def later_receivers_get_less(receivers: int) -> type:
    def came(self: Carried, name: str, tensor: Any, worker: Rank) -> Iterator[Named]:
        if worker.index >= receivers:
            tensor = tensor * 0
        yield name, tensor

    return type("Less", (Carried,), {"came": came})


@fault("transport")
def other_ranks_do_not_exhaust_their_weights() -> type:
    class Leaves(Carried):
        def send(self, weights: Iterable[Named], update: WeightUpdate, rank: Rank) -> SendReceipt:
            if rank.index:
                first = list(zip(range(1), weights, strict=False))
                return SendReceipt(update.version, len(first), 0, 1e-6)
            return super().send(weights, update, rank)

    return Leaves


@fault("transport", how=("not_checked", "checked_after_all", "breaks_the_next"))
def shapes_are(how: str) -> type:
    class Shapeless(Carried):
        def receive(self, update: WeightUpdate, worker: Rank, shapes: Shapes) -> Iterator[Named]:
            if how == "not_checked":
                yield from super().receive(update, worker, {})
                return
            if how == "breaks_the_next":
                if self.__dict__.get("broken"):
                    raise RuntimeError("an earlier update was not read to its end")
                self.broken = True
                yield from super().receive(update, worker, shapes)
                self.broken = False
                return
            held = list(super().receive(update, worker, {}))
            yield from held
            from coupler.builtin.transports.shape_check import check_fits

            for name, tensor in held:
                check_fits(name, tensor.shape, shapes)

    return Shapeless


@fault("transport", how=("waits_longer", "gives_nothing"))
def the_deadline(how: str) -> type:
    class Waits(Carried):
        def receive(self, update: WeightUpdate, worker: Rank, shapes: Shapes) -> Iterator[Named]:
            if how == "gives_nothing" and update.key not in self.mailbox:
                time.sleep(min(update.deadline_s, 0.5))
                if update.key not in self.mailbox:
                    return
            if how == "waits_longer":
                update = replace(update, deadline_s=max(20.0, update.deadline_s))
            yield from super().receive(update, worker, shapes)

    return Waits


@fault("transport", mib=(1, 4))
def memory_leaks_per_update(mib: int) -> type:
    def sent(self: Carried, named: list[Named]) -> list[Named]:
        self.__dict__.setdefault("kept", []).append(np.ones(8 * mib << 17))
        return named

    return type("Leaks", (Carried,), {"sent": sent})


@fault("transport")
def every_update_is_kept() -> type:
    def sent(self: Carried, named: list[Named]) -> list[Named]:
        self.__dict__.setdefault("kept", []).append(named)
        return named

    return type("Keeps", (Carried,), {"sent": sent})


@fault("transport", how=("hides", "sends_half"))
def an_error_of_the_sender(how: str) -> type:
    """It is swallowed, and receivers get what came before it, or nothing."""

    class Swallows(Carried):
        def send(self, weights: Iterable[Named], update: WeightUpdate, rank: Rank) -> SendReceipt:
            def whole() -> Iterator[Named]:
                try:
                    yield from weights
                except Exception:
                    if how == "hides":
                        return

            if how == "hides":
                return super().send(whole(), update, rank)
            kept: list[Named] = []
            try:
                for name, tensor in weights:
                    kept.append((name, _new(tensor)))
            finally:
                receipt = super().send(kept, update, rank)
            return receipt

    return Swallows


# --- sharding managers


@fault("sharding", **{})
def honest_manager() -> type:
    return type("Honest", (StreamShardingManager,), {})


@fault("sharding", every=(2, 3))
def a_sync_is_skipped_every(every: int) -> type:
    class Skips(StreamShardingManager):
        calls = 0

        async def sync(self, version: int) -> Metrics:
            self.calls += 1
            if self.calls % every == 0:
                self.version = version
                return {}
            return await super().sync(version)

    return Skips


@fault("sharding", by=(1, -1, 5))
def a_version_off_by(by: int) -> type:
    class Lies(StreamShardingManager):
        async def sync(self, version: int) -> Metrics:
            metrics = await super().sync(version)
            self.version = version + by
            return metrics

    return Lies


@fault("sharding", by=(1, -1))
def updates_of_a_version_off_by(by: int) -> type:
    class Sends(StreamShardingManager):
        def weight_update(self, version: int, **more: Any) -> WeightUpdate:
            return super().weight_update(max(0, version + by), **more)

    return Sends


@fault("sharding", how=("nothing", "permuted", "background", "twice_paused"))
def a_sync(how: str) -> type:
    class Syncs(StreamShardingManager):
        def weight_update(self, version: int, **more: Any) -> WeightUpdate:
            if how == "permuted" and version > 3:
                more["permuted"] = True
            return super().weight_update(version, **more)

        async def sync(self, version: int) -> Metrics:
            import asyncio

            if how == "nothing":
                self.version = version
                return {}
            if how == "background":
                self.task = asyncio.create_task(super().sync(version))
                self.version = version
                return {}
            metrics = await super().sync(version)
            if how == "twice_paused":
                await self.rollouts.pause(self.in_flight)
            return metrics

    return Syncs


@fault("sharding", how=("nan", "none", "text"))
def metrics_that_are(how: str) -> type:
    class Measures(StreamShardingManager):
        async def sync(self, version: int) -> Metrics:
            metrics = await super().sync(version)
            if how == "none":
                return None  # type: ignore[return-value]
            wrong: Any = float("nan") if how == "nan" else "slow"
            return {**metrics, "sync/speed": Metric(wrong)}

    return Measures


@fault("sharding", how=("first_replica", "last_replica"))
def weights_go_to_the(how: str) -> type:
    class One(StreamShardingManager):
        async def _transfer(self, update: WeightUpdate) -> Any:
            from coupler.loop.transfer import both_sides

            group = self.rollouts
            index = 0 if how == "first_replica" else len(group.replicas) - 1
            update = replace(update, num_receivers=1)
            sent, receipt = await both_sides(self.engine.push(update), group._update(index, update))
            return sent[0], [receipt]

    return One


@fault("sharding", how=("check_true", "never_probes"))
def nothing_is_judged(how: str) -> type:
    class Trusts(StreamShardingManager):
        async def sync(self, version: int) -> Metrics:
            metrics = await super().sync(version)
            if version % 2:
                for replica in self.rollouts.replicas:
                    replica.of.weights = {n: w * 1.01 for n, w in replica.of.weights.items()}
            return metrics

        def check(self, metrics: Metrics) -> bool:
            return True

    return Trusts


# --- trackers


class Kept(JsonlTracker):
    """The tracker of lines of JSON."""


@fault("tracker", **{})
def honest_tracker() -> type:
    return type("Honest", (Kept,), {})


@fault("tracker", every=(2, 10, 50))
def a_step_is_dropped_every(every: int) -> type:
    class Drops(Kept):
        calls = 0

        def log(self, step: int, values: Mapping[str, float]) -> None:
            self.calls += 1
            if self.calls % every:
                super().log(step, values)

    return Drops


@fault("tracker", how=("pops", "adds", "rounds"))
def values_are_changed(how: str) -> type:
    class Changes(Kept):
        def log(self, step: int, values: Any) -> None:
            super().log(step, values)
            if how == "pops" and values:
                values.pop(next(iter(values)))
            elif how == "adds":
                values["step"] = step
            elif how == "rounds":
                for name in values:
                    values[name] = round(values[name], 3) if abs(values[name]) < 1e300 else 0.0

    return Changes


@fault("tracker", how=("last", "all", "buffer"))
def closing_loses(how: str) -> type:
    class Loses(Kept):
        def __init__(self, config: Any, run_dir: Any) -> None:
            super().__init__(config, run_dir)
            self.held: list[tuple[int, dict[str, float]]] = []

        def log(self, step: int, values: Mapping[str, float]) -> None:
            self.held.append((step, dict(values)))
            if how == "buffer" and len(self.held) >= 3:
                self._write(self.held)
                self.held = []

        def _write(self, held: list[tuple[int, dict[str, float]]]) -> None:
            for step, values in held:
                Kept.log(self, step, values)

        def close(self) -> None:
            if how == "last":
                self._write(self.held[:-1])
            super().close()

    return Loses


VALUES = {
    "float16": lambda v: float(np.float16(v)) if abs(v) < 6e4 else v,
    "integers": lambda v: float(int(v)) if abs(v) < 1e9 else v,
    "two_digits": lambda v: float(f"{v:.2g}"),
    "absolute": abs,
}


@fault("tracker", how=tuple(VALUES))
def values_are_kept_as(how: str) -> type:
    class Rounds(Kept):
        def log(self, step: int, values: Mapping[str, float]) -> None:
            super().log(step, {n: VALUES[how](v) for n, v in values.items()})

    return Rounds


@fault("tracker", by=(-1, 1))
def a_rewind_off_by(by: int) -> type:
    class Rewinds(Kept):
        def rewind(self, step: int) -> None:
            super().rewind(step + by)

    return Rewinds


@fault("tracker", how=("empties", "wrong_step", "first_names", "slow"))
def it(how: str) -> type:
    class Wrong(Kept):
        def __init__(self, config: Any, run_dir: Any) -> None:
            if how == "empties":
                (run_dir / "metrics.jsonl").write_text("")
            super().__init__(config, run_dir)

        def log(self, step: int, values: Mapping[str, float]) -> None:
            if how == "first_names":
                self.names = self.__dict__.get("names") or list(values)
                values = {n: values[n] for n in self.names if n in values}
            if how == "slow":
                time.sleep(1.2)
            super().log(step + (how == "wrong_step"), values)

    return Wrong
