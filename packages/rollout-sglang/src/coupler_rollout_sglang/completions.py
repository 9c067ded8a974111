"""Read what SGLang answers to a request."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from coupler.errors import CouplerError
from coupler.interfaces import Request
from coupler_rollout_sglang import messages


@dataclass(frozen=True, slots=True)
class Routers:
    """Hold the shape of the routes that SGLang returns for a model."""

    layers: int
    """All layers of the model. Those without a router have a column of zeros."""
    topk: int
    """Experts of a token in one layer."""
    written: tuple[int, ...]
    """Numbers of the layers with a router."""

    def none(self) -> np.ndarray:
        """Return the routes of a request that was fed nothing."""
        return np.zeros((0, len(self.written), self.topk), np.int32)


@dataclass(slots=True)
class Sampling:
    """Hold what one stay of a request in SGLang sampled."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[int] = field(default_factory=list)
    mask: np.ndarray | None = None
    routes: np.ndarray | None = None

    def each_version(self) -> list[int]:
        return self.versions

    def each_route(self) -> np.ndarray | None:
        return self.routes

    def each_mask(self) -> np.ndarray | None:
        return self.mask


def top_k_of(request: Request) -> int:
    """Return the request's ``top_k``, which says nothing to a greedy one."""
    return request.top_k if request.temperature else 0


def sampling_of(
    output: dict[str, Any],
    prompt: int,
    top_k: int = 0,
    routers: Routers | None = None,
) -> tuple[Sampling, str]:
    """Return what SGLang sampled for a request, and why it ended.

    Args:
        prompt: the number of tokens that the request came with.
        routers: the shape of its routes, or None if nobody asked for them.

    Raises:
        CouplerError: there are more log-probs, versions, masks or routes than tokens,
            or fewer.
    """
    meta, tokens = output["meta_info"], list(output["output_ids"])
    logprobs = [float(entry[0]) for entry in meta.get("output_token_logprobs") or []]
    versions = list(meta.get(messages.VERSION_KEY) or [])
    masks = list(meta.get(messages.MASK_KEY) or [])

    for name, found in (
        ("log-probs", logprobs),
        ("versions", versions),
        *([("sampling masks", masks)] if top_k else []),
    ):
        if len(found) != len(tokens):
            raise CouplerError(
                f"SGLang returned {len(found)} {name} of {len(tokens)} tokens.\n  look at:  "
                "rollout.extra_args; speculative decoding and others change what it returns"
            )

    sampling = Sampling(tokens, logprobs, versions)
    finish = str(meta["finish_reason"]["type"])
    if top_k and masks:
        sampling.mask = np.array(masks, np.int32)
    if routers is not None:
        sampling.routes = routes_of(meta, routers, prompt + len(tokens) - 1, finish)
    return sampling, finish


def routes_of(meta: dict[str, Any], routers: Routers, fed: int, finish: str) -> np.ndarray:
    """Return the experts of each token that was fed, [fed, layers with a router, topk].

    SGLang says nothing of a request that it cuts off before it feeds it.

    Raises:
        CouplerError: routes of some tokens or layers are not there.
    """
    text = meta.get(messages.ROUTES_KEY)
    if text is None:
        if finish == "abort":
            return routers.none()
        raise CouplerError(
            "SGLang returned no experts of the tokens that it was fed.\n"
            "  look at:  how the server of rollout.server was started; it takes "
            "routed_experts=true"
        )

    numbers = np.frombuffer(base64.b64decode(text), np.int32)
    width = routers.layers * routers.topk
    if numbers.size != fed * width:
        raise CouplerError(
            f"SGLang returned {numbers.size} numbers of experts for {fed} tokens of "
            f"{routers.layers} layers with {routers.topk} experts each.\n"
            "  look at:  rollout.extra_args, which change what it returns"
        )

    routes = numbers.reshape(fed, routers.layers, routers.topk)[:, list(routers.written)]
    if routers.topk > 1 and fed:
        _check_written(routes, routers)
    return routes


def _check_written(routes: np.ndarray, routers: Routers) -> None:
    """Refuse layers with nothing but zeros, since no token goes twice to an expert.

    Raises:
        CouplerError: there is one.
    """
    empty = np.flatnonzero(~routes.any(axis=(0, 2)))
    if len(empty):
        raise CouplerError(
            f"SGLang wrote down no experts of layer {routers.written[empty[0]]}, whose kernel "
            "chooses them inside.\n"
            "  try:  rollout.extra_args.moe_runner_backend=triton"
        )


def said(answer: Any) -> str:
    """Return the sentence of an answer that is no success."""
    if isinstance(answer, dict):
        error = answer.get("error")
        text = answer.get("message") or (error.get("message") if isinstance(error, dict) else error)
        return str(text or answer)
    return str(answer)
