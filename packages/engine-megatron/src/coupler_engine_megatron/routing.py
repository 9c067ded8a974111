"""Record and replay the experts of tokens, and balance them by losses.

Every token weighs equally in these losses. The engine tells each layer about the
micro-batch with the arguments of its call. A layer which is computed again in the
backward pass, or whose micro-batches overlap in a pipeline, then knows which one it
has.

Shapes: n tokens of the packed row on this rank, m of them of the batch, L layers with a
router, E experts, K chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from coupler.batch import Batch
from coupler.batch.columns import ROUTED_EXPERTS
from coupler.metrics import Metric, Metrics
from coupler_engine_megatron import groups
from coupler_engine_megatron.distributed import exchange

_FACTS = ("balance", "z", "replayed", "moved")
"""The sums that a router keeps behind the tokens of its experts."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of one micro-batch that this rank routes."""

    places: Tensor
    """[m] int64: their places in the n"""
    rows: Tensor
    """[m] int64: the rows of ``record`` that take their experts"""
    sequence: Tensor
    """[m] int64: their sequences"""
    lengths: Tensor
    """[sequences] fp32: whole lengths"""
    targets: Tensor | None
    """[n, L, K], -1 for tokens that the router decides; None if it decides all"""
    share: float
    """The weight of one token in the losses: 1 / tokens of the mini-batch."""
    record: Tensor | None
    """[tokens of all micro-batches, L, K] where experts are noted, plus one"""


@dataclass
class Params(PackedSeqParams):
    """The packing that every layer gets, with the tokens of its router."""

    routed: Tokens | None = None


class Choice:
    """Stand in where Megatron's router asks for the experts of each token."""

    def __init__(self) -> None:
        # The number of this layer among those with a router.
        self.index = 0
        self.now: Tokens | None = None
        # The replayed tokens of the last call, and how many went to other experts.
        self.moved: tuple[Tensor, Tensor] | None = None

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        choose: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Choose the experts of tokens whose scores are [n, E].

        Returns:
            Scores [n, K] of the chosen experts, with their gradient, and their numbers.
        """
        values, chosen = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        now = self.now

        if now is not None and now.targets is not None:
            target = now.targets[:, self.index].long()
            known = (target >= 0).all(1)
            same = (target[:, :, None] == chosen[:, None]).any(2).all(1)
            self.moved = known.sum(), (known & ~same).sum()
            chosen = torch.where(known[:, None], target, chosen)
            values = scores.gather(1, chosen)

        if now is not None and now.record is not None:
            now.record[now.rows, self.index] = (chosen[now.places] + 1).to(now.record.dtype)
        return values, chosen


class Router(TopKRouter):
    """Megatron's router with a :class:`Choice`, and with losses of its own.

    No micro-batch and no split of ranks changes these losses.

    Balance, of each sequence s of T_s tokens (DeepSeek-V3, arXiv 2412.19437, equations
    17 to 20), weighed by tokens: ``sum_s T_s / T * sum_i f_si P_si``, where ``f_si = E
    / (K T_s) * (its tokens that go to expert i)`` and ``P_si`` is the mean of its
    normalised scores. And z (ST-MoE, arXiv 2202.08906, equation 5): ``1 / T sum_t
    logsumexp(x_t)^2``.
    """

    coefficients: tuple[float, float] = (0.0, 0.0)
    """The weights of both in the loss."""
    num_experts: int

    def __init__(self, config: Any, pg_collection: Any = None) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.choice = self.router_replay = Choice()
        # A parameter that is not trained, so that its weights are read and sent as
        # others are.
        if self.enable_expert_bias:
            bias = self.expert_bias
            del self.expert_bias
            self.expert_bias = nn.Parameter(bias, requires_grad=False)
        self.totals = torch.zeros(self.num_experts + len(_FACTS), dtype=torch.float64)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Map [n, 1, E] logits to probabilities and choices [n, E]."""
        now, learns = self.choice.now, torch.is_grad_enabled()
        if now is None or not learns:
            return super().routing(logits, padding_mask)

        flat, (balance, z) = logits.view(-1, self.num_experts), self.coefficients
        facts = dict.fromkeys(_FACTS, logits.new_zeros(()))

        if z:
            facts["z"] = flat[now.places].float().logsumexp(1).square().sum() * now.share
            logits = MoEAuxLossAutoScaler.apply(logits, facts["z"] * z)

        probs, chosen = super().routing(logits, padding_mask)
        if balance:
            facts["balance"] = self._imbalance(flat, chosen, now) * now.share
            probs = MoEAuxLossAutoScaler.apply(probs, facts["balance"] * balance)

        if self.choice.moved is not None:
            facts["replayed"], facts["moved"] = self.choice.moved
        counts = chosen[now.places].sum(0).double()
        sums = torch.stack([fact.detach().double() for fact in facts.values()])
        self.totals += torch.cat([counts, sums])
        return probs, chosen

    def _imbalance(self, logits: Tensor, chosen: Tensor, now: Tokens) -> Tensor:
        """Return this rank's part of ``sum_s T_s sum_i f_si P_si``.

        It is collective over the ranks that share the sequences.
        """
        scores = logits[now.places].float()
        if self.score_function == "sigmoid":
            scores = scores.sigmoid()
            scores = scores / (scores.sum(1, keepdim=True) + 1e-20)
        else:
            scores = scores.softmax(1)

        empty = scores.new_zeros(len(now.lengths), self.num_experts)
        counts = empty.index_add(0, now.sequence, chosen[now.places].to(scores.dtype))
        if self.tp_cp_group.size() > 1:
            dist.all_reduce(counts, group=self.tp_cp_group)

        sums = empty.index_add(0, now.sequence, scores)
        return (sums * counts / now.lengths[:, None]).sum() * (self.num_experts / self.topk)


def _tell(layer: Any, _args: Any, kwargs: dict[str, Any]) -> None:
    """Tell a layer's router, before each pass, which micro-batch this is."""
    choice = layer.mlp.router.choice
    choice.now, choice.moved = kwargs["packed_seq_params"].routed, None


class Routers:
    """The routers of this rank, and facts of those of the whole model."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        shape: Any,
        balance: float,
        z: float,
        device: torch.device,
    ) -> None:
        """Find the routers. This is collective over all ranks.

        Args:
            shape: Megatron's configuration of the model.
            balance: coefficient of the first of the losses of :class:`Router`.
            z: coefficient of the second.
        """
        layers: list[Any] = [
            m for chunk in chunks for m in chunk.modules() if isinstance(_router_of(m), Router)
        ]
        numbers = [layer.layer_number for layer in layers]
        every = sorted({number for found in exchange(numbers) for number in found})
        self.routers: list[Router] = [layer.mlp.router for layer in layers]
        self.num_layers, self.device, self.coefficients = len(every), device, (balance, z)
        self.num_experts, self.topk = shape.num_moe_experts or 0, shape.moe_router_topk

        for layer, router in zip(layers, self.routers, strict=True):
            layer.register_forward_pre_hook(_tell, with_kwargs=True)
            router.choice.index = every.index(layer.layer_number)
            router.coefficients = self.coefficients
            router.totals = router.totals.to(device)
            router._maintain_float32_expert_bias()

    def freeze(self) -> None:
        """Train no router. It is called before gradients have buffers."""
        for router in self.routers:
            router.requires_grad_(False)

    def problem(self, batch: Batch) -> str:
        """Return why the column ``routed_experts`` of ``batch`` cannot be replayed.

        It is empty if the column can be replayed, or is not there.
        """
        if not batch.has(ROUTED_EXPERTS):
            return ""
        if not self.num_layers:
            return "the batch has a column routed_experts, and the model has no experts"

        column, want = batch[ROUTED_EXPERTS], (batch.num_tokens, self.num_layers, self.topk)
        if column.shape != want or column.dtype.kind not in "iu":
            return (
                f"routed_experts is {column.dtype} {list(column.shape)}, expected integers "
                f"{list(want)}"
            )

        chosen = np.sort(column, axis=2)
        fed = (chosen >= 0).all(2)
        if (chosen[..., -1] >= self.num_experts).any():
            return f"routed_experts names expert {chosen.max()} of {self.num_experts}"
        if (fed & (chosen[..., 1:] == chosen[..., :-1]).any(2)).any():
            return "routed_experts names an expert twice for one token"
        return ""

    def tokens(
        self, batch: Batch, held: np.ndarray, share: float, record: Tensor | None
    ) -> Tokens | None:
        """Return what the routers of one micro-batch are told, or None without routers.

        Args:
            held: [n of the context-parallel rank] the token of the batch at each place;
                -1: none.
            record: [T, L, K] to note experts in, at the rows that the column ``row`` of
                ``batch`` says.
        """
        if not self.num_layers:
            return None
        # The ranks of this group split the tokens: Megatron wants sequence parallelism
        # if there are experts.
        group = groups.tensor()
        held = np.split(held, group.size())[group.rank()]
        places = np.flatnonzero(held >= 0)
        rows = held[places]

        targets = None
        if batch.has(ROUTED_EXPERTS):
            column = batch[ROUTED_EXPERTS]
            targets = np.full((len(held), self.num_layers, self.topk), -1, column.dtype)
            targets[places] = column[rows]
        sequence = np.repeat(np.arange(len(batch)), batch.lengths)

        def tensor(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(self.device)

        return Tokens(
            places=tensor(places),
            rows=tensor(rows if record is None else batch["row"][rows]),
            sequence=tensor(sequence[rows]),
            lengths=tensor(np.maximum(batch.lengths, 1).astype(np.float32)),
            targets=None if targets is None else tensor(targets),
            share=share,
            record=record,
        )

    def empty_record(self, num_tokens: int) -> Tensor:
        """Return [T, L, K] zeros, in which 1 stands for expert 0."""
        dtype = torch.uint8 if self.num_experts < 255 else torch.int32
        return torch.zeros(num_tokens, self.num_layers, self.topk, dtype=dtype, device=self.device)

    def whole_record(self, record: Tensor) -> np.ndarray:
        """Return [T, L, K] what the ranks of one data shard noted together.

        The dtype is the smallest that holds it.
        """
        for group in (groups.tensor_and_context(), groups.pipeline()):
            if group.size() > 1:
                dist.all_reduce(record, group=group)
        dtype = np.int8 if self.num_experts <= 128 else np.int16
        return (record.cpu().numpy().astype(np.int32) - 1).astype(dtype)

    def clear(self) -> None:
        """Forget the sums."""
        for router in self.routers:
            router.totals.zero_()

    def metrics(self) -> Metrics:
        """Return metrics of the last mini-batch, the same on every rank.

        This is collective over all ranks. ``moe/max_load`` is the tokens of a layer's
        busiest expert over the mean, and 1 if all have as many. ``moe/max_rank_load``
        is the same for expert-parallel ranks, whose slowest one all wait for.
        ``moe/route_disagreement`` is how often the router would have chosen others than
        were replayed.
        """
        if not self.num_layers:
            return {}
        width = self.num_experts + len(_FACTS)
        totals = torch.zeros(self.num_layers, width, dtype=torch.float64, device=self.device)
        for router in self.routers:
            totals[router.choice.index] = router.totals
        dist.all_reduce(totals)
        counts = totals[:, : self.num_experts].cpu()
        balance, z, replayed, moved = totals[:, self.num_experts :].sum(0).tolist()

        found = {"moe/max_load": self._load(counts)}
        if (ranks := groups.expert().size()) > 1:
            found["moe/max_rank_load"] = self._load(counts.unflatten(1, (ranks, -1)).sum(2))
        if replayed:
            found["moe/route_disagreement"] = Metric(moved, replayed)
        losses = {"moe/aux_loss": balance, "moe/z_loss": z}
        for (name, value), on in zip(losses.items(), self.coefficients, strict=True):
            if on:
                found[name] = Metric(value, self.num_layers)
        return found

    def _load(self, counts: Tensor) -> Metric:
        """Return the tokens of the busiest over the mean, of [L, n] tokens."""
        loads = counts.amax(1) / counts.mean(1).clamp(min=1e-9)
        return Metric(float(loads.sum()), self.num_layers)


def _router_of(module: nn.Module) -> Any:
    return getattr(getattr(module, "mlp", None), "router", None)
