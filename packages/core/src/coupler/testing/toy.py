"""Implement backends in plain NumPy, whole and small. They run the loop in milliseconds
and show what an interface asks for.

The policy is a bigram: ``logits[t] = embed[tokens[t - 1]] @ head.T + bias``. Its
gradient is written out below, which makes it the closed form that other things are
compared with. Shapes: T packed tokens, V vocabulary, H hidden.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from coupler.batch import Batch
from coupler.batch.columns import SAMPLING_MASK, TOP_IDS, loss_columns
from coupler.engine_kit.adamw import multiplier
from coupler.engine_kit.micro_batches import agreed_split, split
from coupler.errors import CouplerError
from coupler.interfaces import (
    Algorithm,
    Columns,
    Completion,
    Engine,
    Head,
    InFlight,
    Layout,
    Loss,
    Named,
    Output,
    Part,
    Parts,
    Pending,
    Rank,
    Request,
    Rollout,
    StepInfo,
    StepResult,
    SyncReceipt,
    WeightUpdate,
)
from coupler.metrics import Metric, Metrics, merge
from coupler.system.files import reading
from coupler.system.seeding import stream
from coupler.testing.models import read_toy
from coupler.testing.toy_topk import LOW, TOP_LOGPROBS, top_outputs

Weights = dict[
    str, np.ndarray
]  # embed.weight [V, H], head.weight [V, H], head.bias [V], all float64


def log_softmax(
    weights: Weights, previous: np.ndarray, temperature: np.ndarray | float
) -> np.ndarray:
    """Turn [n] tokens into the [n, V] log-probs of the next one."""
    logits = weights["embed.weight"][previous] @ weights["head.weight"].T + weights["head.bias"]
    logits /= np.asarray(temperature).reshape(-1, 1)
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def nucleus(log_p: np.ndarray, top_p: float) -> np.ndarray:
    """Return [V] log-probs among the fewest tokens that have ``top_p`` together (arXiv
    1904.09751, section 3.1), else -inf.
    """
    order = np.argsort(-log_p)
    mass = np.exp(log_p[order]).cumsum()
    left = order[: np.searchsorted(mass, top_p) + 1]
    cut = np.full_like(log_p, -np.inf)
    cut[left] = log_p[left] - np.log(mass[len(left) - 1])
    return cut


def most_likely(log_p: np.ndarray, number: int) -> np.ndarray:
    """Return [V] log-probs among the ``number`` most likely tokens, else -inf."""
    cut = np.full_like(log_p, -np.inf)
    left = np.argsort(-log_p)[:number]
    total = np.logaddexp.reduce(log_p[left])
    cut[left] = log_p[left] - total
    return cut


def kept_ids(log_p: np.ndarray, width: int) -> np.ndarray:
    """Return the ids of finite log-probs, ``width`` at most, and -1 behind them."""
    kept = np.full(min(width, len(log_p)), -1, np.int32)
    if width:
        ids = np.flatnonzero(np.isfinite(log_p))
        kept[: len(ids)] = ids
    return kept


def among(log_p: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Return [n, V] log-probs among the ids of each row of ``kept`` [n, k].

    The others get a number so low that their probability is 0. A row of -1 keeps all.
    """
    cut = np.where((kept < 0).all(1, keepdims=True), log_p, LOW)
    row, place = np.nonzero(kept >= 0)
    ids = kept[row, place]
    cut[row, ids] = log_p[row, ids]
    total = np.logaddexp.reduce(cut, 1, keepdims=True)
    return cut - total


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward pass over the predicted tokens of a batch."""

    rows: np.ndarray  # [n] rows of the batch under loss_mask
    previous: np.ndarray  # [n] token before each
    temperature: np.ndarray  # [n]
    log_p: np.ndarray  # [n, V]


def run(weights: Weights, batch: Batch) -> Pass:
    """Compute the distribution of every token under ``loss_mask``."""
    rows = np.flatnonzero(batch["loss_mask"])
    temperature = batch["temperature"] if batch.has("temperature") else np.ones(len(batch))
    spread = batch.spread(temperature).astype(np.float64)[rows]
    previous = batch["tokens"][rows - 1]
    log_p = log_softmax(weights, previous, spread)
    if batch.has(SAMPLING_MASK):
        log_p = among(log_p, batch[SAMPLING_MASK][rows])
    return Pass(rows, previous, spread, log_p)


def outputs(batch: Batch, done: Pass) -> dict[str, np.ndarray]:
    """Return [T] float64 log-probs and entropies, which are 0 outside ``loss_mask``."""
    logprobs, entropy = np.zeros(batch.num_tokens), np.zeros(batch.num_tokens)
    logprobs[done.rows] = done.log_p[np.arange(len(done.rows)), batch["tokens"][done.rows]]
    entropy[done.rows] = -(np.exp(done.log_p) * done.log_p).sum(-1)
    return {"logprobs": logprobs, "entropy": entropy}


def backward(weights: Weights, batch: Batch, done: Pass, d_out: dict[str, np.ndarray]) -> Weights:
    """Return the gradient of a loss whose derivatives by ``logprobs`` and ``entropy``
    are ``d_out``, each [T], and by ``top_logprobs`` [T, k].

    With z the logits over the temperature: d logprob / dz = onehot - p, and d entropy /
    dz = -p (log p + entropy).
    """
    p = np.exp(done.log_p)
    onehot = np.zeros_like(p)
    onehot[np.arange(len(p)), batch["tokens"][done.rows]] = 1
    d_logits = d_out["logprobs"][done.rows, None] * (onehot - p)

    if "entropy" in d_out:
        entropy = -(p * done.log_p).sum(-1, keepdims=True)
        d_logits -= d_out["entropy"][done.rows, None] * p * (done.log_p + entropy)
    if TOP_LOGPROBS in d_out:
        ids = batch[TOP_IDS][done.rows]
        slopes = np.where(ids < 0, 0, d_out[TOP_LOGPROBS][done.rows])
        np.add.at(d_logits, (np.arange(len(p))[:, None], ids.clip(0)), slopes)
        d_logits -= p * slopes.sum(1, keepdims=True)
    d_logits /= done.temperature[:, None]
    hidden = weights["embed.weight"][done.previous]
    d_embed = np.zeros_like(weights["embed.weight"])
    np.add.at(d_embed, done.previous, d_logits @ weights["head.weight"])
    return {
        "embed.weight": d_embed,
        "head.weight": d_logits.T @ hidden,
        "head.bias": d_logits.sum(0),
    }


def value_outputs(weights: Weights, batch: Batch) -> dict[str, np.ndarray]:
    """Return [T] float64 values ``embed[tokens[t - 1]] @ score + bias``, which are 0
    outside ``loss_mask``. A score without a bias has 0 in its place.
    """
    rows = np.flatnonzero(batch["loss_mask"])
    values = np.zeros(batch.num_tokens)
    hidden = weights["embed.weight"][batch["tokens"][rows - 1]]
    values[rows] = (hidden @ weights["score.weight"].T + weights.get("score.bias", 0))[:, 0]
    return {"values": values}


def value_backward(weights: Weights, batch: Batch, d_out: dict[str, np.ndarray]) -> Weights:
    """Return the gradient of a loss with the derivative ``d_out`` [T] by ``values``."""
    rows = np.flatnonzero(batch["loss_mask"])
    previous, slope = batch["tokens"][rows - 1], d_out["values"][rows, None]
    d_embed = np.zeros_like(weights["embed.weight"])
    np.add.at(d_embed, previous, slope * weights["score.weight"])
    hidden = weights["embed.weight"][previous]
    found = {"embed.weight": d_embed, "score.weight": slope.T @ hidden, "score.bias": slope.sum(0)}
    return {name: grad for name, grad in found.items() if name in weights}


def slopes(loss: Loss, out: Columns, columns: Columns) -> dict[str, np.ndarray]:
    """Return the derivative of each weighted token loss by each output of that token,
    by central differences. It has the shape of the output, [T] or [T, k].

    The loss of a token must depend on the outputs of that token alone.
    """
    step = 1e-6
    found = {}

    for name, value in out.items():
        found[name] = np.zeros(value.shape)
        for place in np.ndindex(value.shape[1:]):
            moved = np.zeros(value.shape)
            moved[:, *place] = step
            up, _ = loss({**out, name: value + moved}, columns)
            down, _ = loss({**out, name: value - moved}, columns)
            slope = (up - down) / (2 * step) * columns["loss_weight"]
            found[name][:, *place] = np.where(columns["loss_mask"], slope, 0)
    return found


def columns_of(batch: Batch) -> dict[str, Any]:
    """Return what a loss reads: every column, and the places of the sequences."""
    return {**loss_columns(batch), "num_seqs": len(batch)}


class Done(Pending):
    def wait(self, seconds: float) -> None:
        """Return at once: the work was done before it was asked for."""


class ToyEngine(Engine):
    """Train a bigram policy under AdamW (Loshchilov & Hutter 2019), on one rank."""

    def setup(self, rank: Rank) -> Layout:
        if rank.world != 1:
            raise CouplerError("engine=toy runs on one rank.\n  try:  engine=fsdp")
        self.params = {k: v.astype(np.float64) for k, v in read_toy(Path(self.model.path)).items()}

        if self.model.head is not Head.LM:
            width = self.params["embed.weight"].shape[1]
            score = {"score.weight": np.zeros((1, width)), "score.bias": np.zeros(1), **self.params}
            dropped = "score.bias" if self.model.head is Head.SCORE else "head."
            self.params = {k: v for k, v in score.items() if not k.startswith(("head.", dropped))}

        self.first = {k: np.zeros_like(v) for k, v in self.params.items()}
        self.second = {k: np.zeros_like(v) for k, v in self.params.items()}
        self.grads = {k: np.zeros_like(v) for k, v in self.params.items()}
        self.steps = 0
        return Layout((0,), (True,))

    def forward(self, batch: Batch, want: tuple[Output, ...]) -> Batch:
        out = self._outputs(batch, max((o.k for o in want if o.name == TOP_IDS), default=0))
        kinds = {o.name: np.int32 if o.name == TOP_IDS else np.float32 for o in want}
        return batch.with_tokens(**{name: out[name].astype(kind) for name, kind in kinds.items()})

    def forward_backward(
        self, batch: Batch, want: tuple[Output, ...], loss: Loss, step: StepInfo
    ) -> Metrics:
        self.grads = {k: np.zeros_like(v) for k, v in self.params.items()}
        metrics = []

        for rows in self.parts(batch):
            part = batch.take(rows)
            everything = self._outputs(part)
            out = {o.name: everything[o.name] for o in want}
            columns = columns_of(part)
            _, found = loss(out, columns)
            metrics.append(found)
            for name, grad in self._backward(part, slopes(loss, out, columns)).items():
                self.grads[name] += grad

        return merge(metrics)

    def parts(self, batch: Batch) -> list[np.ndarray]:
        """Return the rows of each micro-batch."""
        room = self.config.max_tokens_per_gpu
        return agreed_split(partial(split, batch, room), room, None, ())

    def _outputs(self, batch: Batch, top_k: int = 0) -> dict[str, np.ndarray]:
        if self.model.head is not Head.LM:
            return value_outputs(self.params, batch)
        done = run(self.params, batch)
        return outputs(batch, done) | top_outputs(batch, done.rows, done.log_p, top_k)

    def _backward(self, batch: Batch, d_out: dict[str, np.ndarray]) -> Weights:
        if self.model.head is not Head.LM:
            return value_backward(self.params, batch, d_out)
        return backward(self.params, batch, run(self.params, batch), d_out)

    def step(self) -> StepResult:
        c = self.config
        lr = c.lr * multiplier(c)(self.steps)
        norm = float(np.sqrt(sum((g * g).sum() for g in self.grads.values())))

        if not np.isfinite(norm):
            self.grads = {k: np.zeros_like(v) for k, v in self.params.items()}
            return StepResult(applied=False, grad_norm=norm, lr=lr)
        self.steps += 1
        scale = min(1.0, c.max_grad_norm / (norm + 1e-6)) if c.max_grad_norm else 1.0

        for name, param in self.params.items():
            grad = self.grads[name] * scale
            self.first[name] = c.beta1 * self.first[name] + (1 - c.beta1) * grad
            self.second[name] = c.beta2 * self.second[name] + (1 - c.beta2) * grad * grad
            mean = self.first[name] / (1 - c.beta1**self.steps)
            square = self.second[name] / (1 - c.beta2**self.steps)
            decay = c.weight_decay if param.ndim > 1 else 0.0  # never on biases
            param -= lr * (mean / (np.sqrt(square) + c.eps) + decay * param)
            self.grads[name] = np.zeros_like(param)

        return StepResult(applied=True, grad_norm=norm, lr=lr)

    def weights(self) -> Iterator[Named]:
        for name, param in self.params.items():
            yield name, param.astype(np.float32)

    def gradients(self) -> Iterator[Named]:
        yield from self.grads.items()

    def save(self, path: Path, what: Parts) -> Pending:
        state = {Part.PARAMS: self.params, Part.GRADS: self.grads}
        for part in what & state.keys():
            np.savez(path / f"{part}.npz", allow_pickle=False, **state[part])
        if Part.OPTIMIZER in what:
            moments = {
                f"{name}/{k}": v
                for name in ("first", "second")
                for k, v in getattr(self, name).items()
            }
            np.savez(
                path / "optimizer.npz", allow_pickle=False, steps=np.array(self.steps), **moments
            )

        return Done()

    def load(self, path: Path, what: Parts) -> None:
        if Part.PARAMS in what:
            self.params = _read(path / "params.npz")
        if Part.GRADS in what:
            self.grads = _read(path / "grads.npz")
        if Part.OPTIMIZER in what:
            state = _read(path / "optimizer.npz")
            with reading(path / "optimizer.npz"):
                self.steps = int(state.pop("steps"))
                self.first = {k: state[f"first/{k}"] for k in self.params}
                self.second = {k: state[f"second/{k}"] for k in self.params}


def _read(path: Path) -> Weights:
    with reading(path), np.load(path, allow_pickle=False) as file:
        return dict(file)


class ToyRollout(Rollout):
    """Sample one token per request and turn of the event loop."""

    async def setup(self, rank: Rank) -> int:
        stored = read_toy(Path(self.model.path))
        own = self.model.own_weights
        self.weights: Weights = {k: v if own else np.zeros_like(v) for k, v in stored.items()}
        self.version = 0 if own else -1
        self.admits = asyncio.Event()  # new requests are let in
        self.samples = asyncio.Event()  # tokens of admitted requests are sampled
        self.admits.set()
        self.samples.set()
        self.aborting = False
        self.active = 0

        return 1

    async def generate(self, request: Request) -> Completion:
        await self.admits.wait()
        self.active += 1
        try:
            return await self._sample(request)
        finally:
            self.active -= 1

    async def _sample(self, request: Request) -> Completion:
        random = stream(request.seed, "toy")
        tokens, logprobs, versions, masks = [], [], [], []
        finish = "length"

        while len(tokens) < request.max_tokens:
            await asyncio.sleep(0)
            await self.samples.wait()
            if self.aborting:
                finish = "abort"
                break
            previous = np.array([(*request.prompt, *tokens)[-1]])
            log_p = log_softmax(self.weights, previous, request.temperature or 1.0)[0]
            if request.top_k:
                log_p = most_likely(log_p, request.top_k)
            if request.top_p < 1:
                log_p = nucleus(log_p, request.top_p)
            token = int(
                log_p.argmax()
                if request.temperature == 0
                else random.choice(len(log_p), p=np.exp(log_p))
            )
            tokens.append(token)
            logprobs.append(float(log_p[token]))
            versions.append(self.version)
            masks.append(kept_ids(log_p, request.top_k))
            if token in request.stop:
                finish = "stop"
                break

        mask = np.stack(masks) if request.top_k and masks else None
        return Completion(
            tuple(tokens), tuple(logprobs), tuple(versions), finish, sampling_mask=mask
        )

    async def update(self, update: WeightUpdate) -> SyncReceipt:
        missing, unexpected, num_received, num_bytes = set(self.weights), [], 0, 0
        shapes = {name: tensor.shape for name, tensor in self.weights.items()}
        weights = dict(self.weights)  # An update that is refused changes none of them.

        for name, tensor in update.receive(Rank(), shapes):
            num_received += 1
            num_bytes += tensor.nbytes
            if name in self.weights:
                weights[name] = np.array(tensor, np.float64)
                missing.discard(name)
            else:
                unexpected.append(name)

        self.weights, self.version = weights, update.version
        loaded = num_received - len(unexpected)
        return SyncReceipt(
            update.version,
            num_received,
            loaded,
            num_bytes,
            tuple(sorted(missing)),
            tuple(sorted(unexpected)),
        )

    async def pause(self, in_flight: InFlight) -> None:
        self.admits.clear()
        # A bigram has no cache, so that these two are the same.
        if in_flight in (InFlight.RECOMPUTE, InFlight.STALE_KV):
            self.samples.clear()
            return

        self.aborting = in_flight is InFlight.ABORT
        while self.active:
            await asyncio.sleep(0)
        self.aborting = False

    async def resume(self) -> None:
        self.samples.set()
        self.admits.set()


class ToyAlgorithm(Algorithm):
    """REINFORCE (Williams 1992) with the mean reward of the prompt's group as baseline:
    ``-A log p``.
    """

    want = (Output("logprobs"), Output("entropy"))

    def advantages(self, batch: Batch) -> Batch:
        _, group = np.unique(batch["group"], return_inverse=True)
        mean = np.bincount(group, weights=batch["reward"]) / np.bincount(group)
        return batch.with_tokens(
            advantages=batch.spread(batch["reward"] - mean[group]).astype(np.float32)
        )

    def loss(self, out: Columns, batch: Columns) -> tuple[Any, Metrics]:
        mask = batch["loss_mask"]
        loss = -np.where(mask, batch["advantages"], 0) * np.where(mask, out["logprobs"], 0)
        return loss, {"toy/logprob": Metric(np.where(mask, out["logprobs"], 0).sum(), mask.sum())}
