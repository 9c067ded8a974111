"""Do vLLM's bookkeeping of requests that have one more token and go on.

At every step vLLM's scheduler asks each request for all that could have happened to it,
and makes an output of it. With hundreds of requests that takes longer than the GPU
needs for a small model. Of most requests, a step changes a token and three counts.
"""
# pyright: reportMissingImports=false
# The environment that is type-checked has no vLLM: its torch may be another.

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from coupler_rollout_vllm.compat.scheduler import is_ahead

STALE = ("num_stale_output_tokens", "async_tokens_to_discard")
"""By release, where a request counts the tokens under way that are to be dropped."""

MORE = ("enable_return_routed_experts", "aux_output_connector", "return_sampling_mask")
"""By release, what a scheduler has where outputs hold more than tokens."""


class Ends(NamedTuple):
    """Ways in which a request ends."""

    tokens: frozenset[int]
    most: int
    """Tokens that it samples at most."""


class Held(Protocol):
    """Samples of one request so far."""

    ends: Ends | None

    def add_alone(self, token: int, logprob: float) -> None:
        """Take a token that came with its own log-prob alone."""


def ends_of(scheduler: Any, request: Any) -> Ends | None:
    """Return how a request ends, or None if not by a token or their number alone."""
    params = request.sampling_params
    if (
        params is None
        or params.num_logprobs is None
        or params.repetition_detection is not None
        or request.resumable
        or request.has_encoder_inputs
        or request.use_structured_output
    ):
        return None

    tokens = {*(params.stop_token_ids or ()), params.eos_token_id}
    room = scheduler.max_model_len - request.num_prompt_tokens
    return Ends(frozenset(tokens), min(request.max_tokens, room))


def take_plain(scheduler: Any, scheduled: Any, produced: Any, held: Mapping[str, Held]) -> Any:
    """Note one more token of each request that goes on.

    Args:
        held: by request that has had its first output.

    Returns:
        The step without these requests, for vLLM's scheduler.
    """
    from vllm.v1.request import RequestStatus

    if not _is_plain(scheduler, scheduled, produced):
        return scheduled

    manager, running = scheduler.kv_cache_manager, RequestStatus.RUNNING
    newer, older = STALE
    ahead = is_ahead(scheduler)
    block = 0  # After so many tokens of a request, the cache has something to keep.
    if ahead and manager.enable_caching:
        block = scheduler.block_size if sees_all(manager) else 1

    logprobs = produced.logprobs.logprobs[:, 0].tolist()
    sampled, rows = produced.sampled_token_ids, produced.req_id_to_index
    left: dict[str, int] = {}

    for name, count in scheduled.num_scheduled_tokens.items():
        found, request = held.get(name), scheduler.requests.get(name)
        if (
            found is None
            or request is None
            or (end := found.ends) is None
            or request.status is not running
            or count != 1
            or len(tokens := sampled[row := rows[name]]) != 1
            or tokens[0] in end.tokens
            or request.num_output_tokens + 1 >= end.most
            or getattr(request, newer, 0)
            or getattr(request, older, 0)
        ):
            left[name] = count
            continue

        request.num_in_flight_tokens -= 1
        request.append_output_token_ids(tokens[0])
        if ahead:
            request.num_output_placeholders -= 1
        if block:
            computed = request.num_computed_tokens - request.num_output_placeholders
            if computed % block == 0:
                manager.cache_blocks(request, computed)
        found.add_alone(tokens[0], logprobs[row])

    rest = copy.copy(scheduled)
    rest.num_scheduled_tokens = left
    return rest


def _is_plain(scheduler: Any, scheduled: Any, produced: Any) -> bool:
    """Tell if a step brings tokens and their log-probs, and nothing else."""
    more = (
        scheduled.scheduled_spec_decode_tokens
        or produced.kv_connector_output
        or produced.pooler_output
        or produced.num_nans_in_logits
        or any(produced.prompt_logprobs_dict.values())
        or any(getattr(scheduler, field, None) for field in MORE)
    )
    found = produced.logprobs

    return (
        found is not None
        and found.cu_num_generated_tokens is None
        and found.logprobs.shape[1] == 1
        and not more
    )


def sees_all(manager: Any) -> bool:
    """Tell if all layers see every token, so that whole blocks alone are kept."""
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    groups = manager.coordinator.single_type_managers
    return all(type(group) is FullAttentionManager for group in groups)
