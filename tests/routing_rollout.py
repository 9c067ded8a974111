"""``rollout=routing``: transformers, one sequence at a time, that says which experts
each token went to.

It sends every fourth token to other experts than the router chose, as kernels with
other rounding do now and then.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from coupler import Backend, RolloutConfig, hookimpl
from coupler.interfaces import (
    Completion,
    InFlight,
    Rank,
    Request,
    Rollout,
    SyncReceipt,
    WeightUpdate,
)


@dataclass
class RoutingConfig(RolloutConfig):
    name: str = "routing"
    silent: int = -1  # the token whose experts it leaves out; -1: none


class RoutingRollout(Rollout):
    """Requests run one after the other, so a pause has nothing to wait for."""

    config: RoutingConfig

    async def setup(self, rank: Rank) -> int:
        """Build a Qwen3-MoE with random weights."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        from coupler_engine_fsdp.weights import files_of, match

        self.rank, self.version = rank, -1
        self.hf = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(self.model.path), dtype=torch.float32
        )
        self.hf.eval().requires_grad_(False)
        matched, experts = match(self.hf, list(files_of(Path(self.model.path))))
        self.targets = {name: tensor for name, tensor in matched.items() if name not in experts}
        for key, places in experts.items():
            self.targets |= {name: place.of(matched[key]) for name, place in places.items()}
        self.routers = [
            module for name, module in self.hf.named_modules() if name.endswith("mlp.gate")
        ]
        for router in self.routers:
            router.register_forward_hook(self._elsewhere)
        return 1

    def _elsewhere(self, router: Any, _args: Any, out: Any) -> Any:
        """Note where the tokens of this pass go; the experts' weights are of the
        current scores.
        """
        import torch

        logits, _, chosen = out
        moved = (torch.arange(len(chosen)) + self.fed) % 4 == 1
        chosen = torch.where(moved[:, None], (chosen + 1) % router.num_experts, chosen)
        self.routes.append(chosen)
        scores = logits.softmax(-1).gather(1, chosen)
        return logits, scores / scores.sum(1, keepdim=True), chosen

    async def generate(self, request: Request) -> Completion:
        import torch
        from transformers import DynamicCache

        ids, logprobs, self.fed = list(request.prompt), list[float](), 0
        generator = torch.Generator().manual_seed(request.seed % 2**63)
        cache, passes = DynamicCache(config=self.hf.config), list[torch.Tensor]()
        room, finish = (
            request.room(self.hf.config.max_position_embeddings, self.hf.config.vocab_size),
            "length",
        )
        while len(logprobs) < room and finish == "length":
            self.routes: list[torch.Tensor] = []
            logits = self.hf(
                input_ids=torch.tensor([ids[self.fed :]]), past_key_values=cache
            ).logits[0, -1]
            passes.append(torch.stack(self.routes, 1))
            self.fed = len(ids)
            log_p = (logits / request.temperature).log_softmax(-1)
            ids.append(int(torch.multinomial(log_p.exp(), 1, generator=generator)))
            logprobs.append(float(log_p[ids[-1]]))
            finish = "stop" if ids[-1] in request.stop else "length"
        routes = np.full((len(ids), len(self.routers), passes[0].shape[2]), -1, np.int16)
        routes[: self.fed] = torch.cat(passes).numpy()
        if self.config.silent >= 0:
            routes[self.config.silent] = -1
        versions = (self.version,) * len(logprobs)
        tokens = tuple(ids[len(request.prompt) :])
        return Completion(
            tokens, tuple(logprobs), versions, finish, routes if request.routed_experts else None
        )

    async def update(self, update: WeightUpdate) -> SyncReceipt:
        import torch

        number = size = 0
        for name, value in update.receive(self.rank):
            tensor = torch.as_tensor(value)
            self.targets[name].copy_(tensor)
            number, size = number + 1, size + tensor.nbytes
        self.version = update.version
        return SyncReceipt(update.version, number, number, size)

    async def pause(self, in_flight: InFlight) -> None:
        """Nothing runs."""

    async def resume(self) -> None:
        """Nothing was held back."""


@hookimpl
def coupler_backends() -> Iterator[Backend]:
    yield Backend(
        kind="rollout",
        name="routing",
        target=f"{__name__}:RoutingRollout",
        config=RoutingConfig,
        capabilities=frozenset({"weights:full", "output:routed_experts"}),
    )
