"""Compute the numbers that backends are compared with: every sequence on its own, in
float64, without packing, micro-batches or ranks.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from coupler.batch import Batch
from coupler.batch.columns import TOP_IDS
from coupler.interfaces import Loss
from coupler.metrics import Metrics, merge, read
from coupler.testing import toy
from coupler.testing.models import read_tensors

Arrays = dict[str, np.ndarray]
# The limit of max |dg| / max |g| of each tensor, in float32, however small its gradient
# is beside the others.
TOLERANCE = 2e-5
# The logit of a token that a sampling mask leaves out.
CUT = -1e30
_PLAIN = {"attn_implementation": "eager", "experts_implementation": "eager"}


@dataclass(frozen=True, slots=True)
class Gradient:
    """The closed form of one step."""

    grads: Arrays  # float64, by checkpoint name
    metrics: Metrics
    tolerance: float = TOLERANCE  # up to which another gradient is equal

    @property
    def norm(self) -> float:
        return float(np.sqrt(sum(float((g * g).sum()) for g in self.grads.values())))


class Reference(ABC):
    """Compute a model folder in the plainest way there is."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors = read_tensors(folder)  # the checkpoint's own names and shapes
        self.tolerance = TOLERANCE  # of its gradients

    @abstractmethod
    def outputs(self, batch: Batch) -> Arrays:
        """Return [T] float64 ``logprobs`` and ``entropy`` at the temperature of each
        sequence. Both are 0 outside ``loss_mask``.

        Where the batch has ``top_ids``, ``top_logprobs`` are those of these ids.
        """

    @abstractmethod
    def distributions(self, one: Batch) -> np.ndarray:
        """Return the [T, V] float64 log-probs of every token that could follow, of one
        sequence. Row t is of token t.
        """

    @property
    def padding(self) -> int | None:
        """Return the token whose input embedding gets no gradient, if there is one."""
        return None

    @abstractmethod
    def gradient(self, batch: Batch, loss: Loss) -> Gradient:
        """Differentiate ``sum(token_loss * loss_weight)`` over the tokens of
        ``loss_mask``.
        """

    @abstractmethod
    def carried(self, tensor: np.ndarray) -> Any:
        """Return the tensor as an engine would yield it."""

    def logprobs_of(
        self, prompt: tuple[int, ...], completion: tuple[int, ...], temperature: float
    ) -> np.ndarray:
        """Return the [len(completion)] log-probs of a completion under the sampling
        distribution.
        """
        batch = as_batch(prompt, completion, temperature)
        return self.outputs(batch)["logprobs"][len(prompt) :]


def as_batch(prompt: tuple[int, ...], completion: tuple[int, ...], temperature: float) -> Batch:
    """Make a batch of one sequence with its completion under ``loss_mask``."""
    tokens = np.array([*prompt, *completion], np.int32)
    mask = np.arange(len(tokens)) >= len(prompt)
    return Batch(
        np.array([len(tokens)]),
        {"tokens": tokens, "loss_mask": mask},
        {"temperature": np.array([temperature], np.float32)},
    )


class ToyReference(Reference):
    """Compute the bigram one token at a time."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.weights = {k: v.astype(np.float64) for k, v in self.tensors.items()}

    def _logits(self, previous: int) -> np.ndarray:
        return (
            self.weights["head.weight"] @ self.weights["embed.weight"][previous]
            + self.weights["head.bias"]
        )

    def _sampled(self, batch: Batch, t: np.intp, temperature: float) -> np.ndarray:
        """Return the [V] logits of the distribution that token t was sampled from."""
        z = self._logits(batch["tokens"][t - 1]) / temperature
        kept = batch["sampling_mask"][t] if batch.has("sampling_mask") else np.array([-1])
        if kept.max() < 0:
            return z
        return np.where(np.isin(np.arange(len(z)), kept), z, CUT)

    def outputs(self, batch: Batch) -> Arrays:
        zeros = np.zeros(batch.num_tokens)
        out: Arrays = {"logprobs": zeros, "entropy": zeros.copy()}
        ids = batch[TOP_IDS] if batch.has(TOP_IDS) else None
        if ids is not None:
            out["top_logprobs"] = np.zeros(ids.shape)
        temperature = batch.spread(batch["temperature"]).astype(np.float64)
        for t in np.flatnonzero(batch["loss_mask"]):
            z = self._sampled(batch, t, temperature[t])
            log_p = z - np.logaddexp.reduce(z)
            out["logprobs"][t] = log_p[batch["tokens"][t]]
            out["entropy"][t] = -np.exp(log_p) @ log_p
            if ids is not None:
                out["top_logprobs"][t] = log_p[ids[t]]
        return out

    def distributions(self, one: Batch) -> np.ndarray:
        before = np.concatenate([one["tokens"][:1], one["tokens"][:-1]])
        return toy.log_softmax(self.weights, before, float(one["temperature"][0]))

    def gradient(self, batch: Batch, loss: Loss) -> Gradient:
        out, columns = self.outputs(batch), toy.columns_of(batch)
        slopes = toy.slopes(loss, out, columns)
        temperature = batch.spread(batch["temperature"]).astype(np.float64)
        grads = {k: np.zeros_like(v) for k, v in self.weights.items()}

        for t in np.flatnonzero(batch["loss_mask"]):
            previous = batch["tokens"][t - 1]
            z = self._sampled(batch, t, temperature[t])
            log_p = z - np.logaddexp.reduce(z)
            p = np.exp(log_p)
            d_z = -slopes["logprobs"][t] * p
            d_z[batch["tokens"][t]] += slopes["logprobs"][t]
            d_z -= slopes["entropy"][t] * p * (log_p + out["entropy"][t])
            for i, slope in enumerate(slopes["top_logprobs"][t] if batch.has(TOP_IDS) else ()):
                d_z -= slope * p
                d_z[batch[TOP_IDS][t, i]] += slope
            d_z /= temperature[t]
            grads["head.bias"] += d_z
            grads["head.weight"] += np.outer(d_z, self.weights["embed.weight"][previous])
            grads["embed.weight"][previous] += d_z @ self.weights["head.weight"]

        return Gradient(grads, read(loss(out, columns)[1]), self.tolerance)

    def carried(self, tensor: np.ndarray) -> Any:
        return tensor


def _digest(batch: Batch) -> bytes:
    columns = {**batch.tokens, **batch.seqs, "lengths": batch.lengths}
    digest = hashlib.sha256()
    for name, column in sorted(columns.items()):
        digest.update(f"{name} {column.dtype} {column.shape}".encode())
        digest.update(np.ascontiguousarray(column).tobytes())
    return digest.digest()


class TransformersReference(Reference):
    """Compute ``AutoModelForCausalLM`` with eager attention, one sequence per call.

    A gradient is computed once: many layouts of an engine are compared with it.
    """

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        super().__init__(folder)
        self.gradients: dict[tuple[bytes, Loss], Gradient] = {}
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, trust_remote_code=False, **_PLAIN
        )

    @property
    def _routers(self) -> list[Any]:
        return [m for name, m in self.model.named_modules() if name.endswith("mlp.gate")]

    def routes(self, batch: Batch) -> np.ndarray:
        """Return the [T, layers, topk] experts that every token goes to."""
        import torch

        found: list[list[Any]] = [[] for _ in self._routers]
        hooks = [
            router.register_forward_hook(lambda _module, _args, out, to=to: to.append(out[2]))
            for router, to in zip(self._routers, found, strict=True)
        ]
        self.outputs(batch.without("routed_experts"))
        for hook in hooks:
            hook.remove()
        return torch.stack([torch.cat(layer) for layer in found], 1).cpu().numpy()

    @contextmanager
    def _replaying(self, one: Batch) -> Iterator[None]:
        """Send the tokens of one sequence to the experts of its column
        ``routed_experts``, where it has that.
        """
        import torch

        sigmoid = self.model.config.model_type == "deepseek_v3"

        def replay(router: Any, target: Any, out: Any) -> Any:
            scores = out[0].sigmoid() if sigmoid else out[0].softmax(-1)
            chosen = torch.where(target[:, :1] >= 0, target, out[2])
            weights = scores.gather(1, chosen)
            if router.norm_topk_prob:
                weights = weights / weights.sum(1, keepdim=True)
            return (
                out[0],
                (weights * (router.routed_scaling_factor if sigmoid else 1)).to(out[1].dtype),
                chosen,
            )

        column = (
            torch.from_numpy(one["routed_experts"]).long() if one.has("routed_experts") else None
        )
        column = column if column is None else column.to(self.model.device)
        hooks = [
            router.register_forward_hook(
                lambda module, _args, out, target=column[:, i]: replay(module, target, out)
            )
            for i, router in enumerate(self._routers)
            if column is not None
        ]
        yield
        for hook in hooks:
            hook.remove()

    def _logits(self, tokens: Any, temperature: float) -> Any:
        """Turn [t] ids into [t, V] logits. Row t predicts token t. Row 0 is all zeros,
        since nothing predicts it.
        """
        import torch

        logits = self.model(input_ids=tokens[None].long(), use_cache=False).logits[0] / temperature
        return torch.cat([torch.zeros_like(logits[:1]), logits[:-1]])

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """Return the ``count`` ids that follow a prompt, each the most likely one."""
        import torch

        ids = torch.tensor([[*prompt]])
        with torch.no_grad():
            for _ in range(count):
                logits = self.model(input_ids=ids, use_cache=False).logits
                ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
        return ids[0, len(prompt) :].tolist()

    def _out(self, one: Batch) -> dict[str, Any]:
        import torch

        tokens, mask = torch.from_numpy(one["tokens"]), torch.from_numpy(one["loss_mask"])
        with self._replaying(one):
            logits = self._logits(tokens, float(one["temperature"][0]))
        if one.has("sampling_mask"):
            ids = torch.from_numpy(one["sampling_mask"])
            each = ids[:, :, None] == torch.arange(logits.shape[-1])
            whole = (ids < 0).all(1, keepdim=True)
            left = each.any(1) | whole
            logits = logits.where(left.to(logits.device), CUT)
        log_p = logits.log_softmax(-1)
        logprobs = log_p.gather(-1, tokens[:, None].long())[:, 0]
        entropy = -(log_p.exp() * log_p).sum(-1)
        squares = (2 * log_p).exp().sum(-1)
        at_ids = {}
        if one.has(TOP_IDS):
            ids = torch.from_numpy(one[TOP_IDS]).long()
            at_ids["top_logprobs"] = log_p.gather(-1, ids) * mask[:, None]
        return {
            **at_ids,
            "logprobs": logprobs * mask,
            "entropy": entropy * mask,
            "sum_pi_squared": squares * mask,
        }

    @property
    def padding(self) -> int | None:
        return self.model.config.pad_token_id

    def outputs(self, batch: Batch) -> Arrays:
        import torch

        with torch.no_grad():
            parts = [self._out(batch.take([i])) for i in range(len(batch))]
        return {name: torch.cat([part[name] for part in parts]).numpy() for name in parts[0]}

    def distributions(self, one: Batch) -> np.ndarray:
        import torch

        with torch.no_grad():
            logits = self._logits(torch.from_numpy(one["tokens"]), float(one["temperature"][0]))
        return logits.log_softmax(-1).numpy()

    def gradient(self, batch: Batch, loss: Loss) -> Gradient:
        key = (_digest(batch), loss)
        if key not in self.gradients:
            self.gradients[key] = self._gradient(batch, loss)
        return self.gradients[key]

    def _gradient(self, batch: Batch, loss: Loss) -> Gradient:
        self.model.zero_grad()
        metrics = []
        for i in range(len(batch)):
            one = batch.take([i])
            columns = torch_columns(one)
            token_loss, found = loss(self._out(one), columns)
            valid = columns["loss_mask"]
            if valid.any():
                (token_loss * columns["loss_weight"])[valid].sum().backward()
            metrics.append(found)

        grads: Arrays = {}
        for name, p in self.model.named_parameters():
            grads |= as_saved(
                name, np.zeros(tuple(p.shape)) if p.grad is None else _float64(p.grad)
            )
        buffers = {name: np.zeros(tuple(b.shape)) for name, b in self.model.named_buffers()}
        grads |= {name: zeros for name, zeros in buffers.items() if name in self.tensors}
        for grad in grads.values():
            grad.flags.writeable = False
        return Gradient(grads, read(merge(metrics)), self.tolerance)

    def hidden(self, one: Batch) -> np.ndarray:
        """Return the [t, H] states that ``lm_head`` reads to predict token t of one
        sequence, with zeros for token 0.
        """
        import torch

        with torch.no_grad():
            found = self.model.model(
                input_ids=torch.from_numpy(one["tokens"])[None].long()
            ).last_hidden_state[0]
        return np.concatenate([np.zeros((1, found.shape[1])), found[:-1].numpy()])

    def carried(self, tensor: np.ndarray) -> Any:
        import torch

        return torch.from_numpy(tensor.copy())


def _float64(tensor: Any) -> np.ndarray:
    return tensor.cpu().double().numpy().copy()


def as_saved(name: str, tensor: np.ndarray) -> Arrays:
    """Name a parameter as the checkpoint does: transformers joins the experts of a
    layer when it loads them.
    """
    stem, joined, what = name.partition(".experts.")
    if not joined:
        return {name: tensor}
    parts = ("gate_proj", "up_proj") if what == "gate_up_proj" else (what,)
    each = [np.split(expert, len(parts)) for expert in tensor]
    return {
        f"{stem}.experts.{e}.{part}.weight": x
        for e, xs in enumerate(each)
        for part, x in zip(parts, xs, strict=True)
    }


class ToyValueReference(ToyReference):
    """Compute one number per token from the token before it."""

    def outputs(self, batch: Batch) -> Arrays:
        values = np.zeros(batch.num_tokens)
        for t in np.flatnonzero(batch["loss_mask"]):
            hidden = self.weights["embed.weight"][batch["tokens"][t - 1]]
            values[t] = self.weights["score.weight"][0] @ hidden + self.weights["score.bias"][0]
        return {"values": values}

    def gradient(self, batch: Batch, loss: Loss) -> Gradient:
        out, columns = self.outputs(batch), toy.columns_of(batch)
        slopes = toy.slopes(loss, out, columns)["values"]
        grads = {k: np.zeros_like(v) for k, v in self.weights.items() if not k.startswith("head.")}
        for t in np.flatnonzero(batch["loss_mask"]):
            previous = batch["tokens"][t - 1]
            grads["score.weight"][0] += slopes[t] * self.weights["embed.weight"][previous]
            grads["score.bias"][0] += slopes[t]
            grads["embed.weight"][previous] += slopes[t] * self.weights["score.weight"][0]
        return Gradient(grads, read(loss(out, columns)[1]), self.tolerance)


class TransformersValueReference(TransformersReference):
    """Compute ``AutoModelForTokenClassification`` with one label and eager attention,
    one sequence per call.
    """

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForTokenClassification

        Reference.__init__(self, folder)
        self.gradients = {}
        self.model: Any = AutoModelForTokenClassification.from_pretrained(
            folder, num_labels=1, dtype=torch.float64, trust_remote_code=False, **_PLAIN
        ).eval()

    def _out(self, one: Batch) -> dict[str, Any]:
        import torch

        values = self.model(
            input_ids=torch.from_numpy(one["tokens"])[None].long(), use_cache=False
        ).logits[0, :, 0]
        before = torch.cat([torch.zeros_like(values[:1]), values[:-1]])
        return {"values": before * torch.from_numpy(one["loss_mask"])}


def torch_columns(batch: Batch) -> Mapping[str, Any]:
    """Return the columns that a torch loss reads, with floating columns in float64."""
    import torch

    columns = {}
    for name, value in toy.columns_of(batch).items():
        tensor = torch.from_numpy(np.array(value)) if isinstance(value, np.ndarray) else value
        columns[name] = (
            tensor.double() if isinstance(value, np.ndarray) and value.dtype.kind == "f" else tensor
        )
    return columns
