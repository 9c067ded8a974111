"""Choose requests for a step that have one more token, past vLLM's own loop.

vLLM's scheduler asks each running request at every step for all that it could need.
Most need a token, and a block of the cache once in a while. All else is left to vLLM:
prompts, ends, and each step for which the cache could become too small.
"""
# pyright: reportMissingImports=false
# The environment that is type-checked has no vLLM: its torch may be another.

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from coupler_rollout_vllm.compat.plain_steps import MORE, Held, sees_all
from coupler_rollout_vllm.compat.scheduler import is_ahead, is_frozen

LIMITS = ("max_num_running_reqs", "max_num_active_reqs")
"""By release, how many requests a scheduler lets run."""

CONNECTORS = ("connector", "ec_connector", "defer_block_free")
"""What a scheduler has that tells others of every request in a step."""


class Plain(NamedTuple):
    """Requests of a step, and what vLLM's output has of each."""

    names: list[str]
    blocks: list[tuple[list[int], ...] | None]
    """New blocks of the cache, a list for each group of layers."""
    computed: list[int]
    """Tokens before this step."""
    sampled: list[int]
    """Tokens before this step, without the prompt."""


def schedule(scheduler: Any, held: Mapping[str, Held], vllms: Callable[[], Any]) -> Any:
    """Return the next step.

    Args:
        held: by request that has had its first output.
        vllms: the ``schedule`` of vLLM's scheduler.
    """
    if not _suits(scheduler) or is_frozen(scheduler):
        return vllms()

    plain, others = _split(scheduler, held)
    if not plain or not _has_room(scheduler, len(plain), len(others)):
        return vllms()

    # vLLM lists new blocks while it makes the output: take ours before.
    taken = _take(scheduler, plain)
    with _apart(scheduler, others, len(plain)):
        step = vllms()
    _add(scheduler, step, taken)
    return step


def _suits(scheduler: Any) -> bool:
    """Tell if running requests can be chosen apart from the others."""
    unusual = (
        scheduler.num_spec_tokens
        or getattr(scheduler, "pp_size", 1) > 1
        or any(getattr(scheduler, field, None) for field in (*CONNECTORS, *MORE))
        # vLLM keeps waiting those whose adapter would be one too many.
        or (scheduler.lora_config and scheduler.get_request_counts()[1])
    )
    return not unusual and sees_all(scheduler.kv_cache_manager)


def _split(scheduler: Any, held: Mapping[str, Held]) -> tuple[list[Any], list[Any]]:
    """Return running requests that take one token and go on, and the others."""
    plain: list[Any] = []
    others: list[Any] = []
    known = None if scheduler.use_v2_model_runner else scheduler.prev_step_scheduled_req_ids

    for request in scheduler.running:
        found = held.get(request.request_id)
        ahead = request.num_output_placeholders
        goes_on = (
            found is not None
            and (end := found.ends) is not None
            and request.num_tokens + ahead == request.num_computed_tokens + 1
            and request.num_output_tokens + ahead + 1 < end.most
            and (known is None or request.request_id in known)
        )
        (plain if goes_on else others).append(request)
    return plain, others


def _has_room(scheduler: Any, plain: int, others: int) -> bool:
    """Tell if no request has to wait, or to give its blocks to another."""
    if plain > scheduler.max_num_scheduled_tokens:
        return False

    manager = scheduler.kv_cache_manager
    groups = manager.coordinator.single_type_managers
    smallest = min(group.block_size for group in groups)
    prompts = scheduler.max_num_scheduled_tokens // smallest
    most = len(groups) * (plain + 2 * others + prompts)
    free = manager.block_pool.get_num_free_blocks()
    return free >= most and not manager.watermark_blocks


def _take(scheduler: Any, plain: list[Any]) -> Plain:
    """Give each of these requests one more token."""
    taken = Plain([], [], [], [])
    manager = scheduler.kv_cache_manager
    ahead = is_ahead(scheduler)
    # Where steps do not overlap, vLLM keeps a full block for others as it is filled.
    keeps = manager.enable_caching and not ahead
    groups = manager.coordinator.single_type_managers
    tables = [(group.req_to_blocks, group.block_size) for group in groups]

    for request in plain:
        name = request.request_id
        before = request.num_computed_tokens
        new = None
        for table, size in tables:
            full = len(table[name]) * size
            if before >= full or (keeps and before + 1 == full):
                new = manager.allocate_slots(request, 1).get_block_ids(allow_none=True)
                break

        taken.names.append(name)
        taken.blocks.append(new)
        taken.computed.append(before)
        taken.sampled.append(request.num_output_tokens + request.num_output_placeholders)
        request.num_computed_tokens = before + 1
        request.num_in_flight_tokens += 1
        if ahead:
            request.num_output_placeholders += 1
    return taken


@contextmanager
def _apart(scheduler: Any, others: list[Any], plain: int) -> Iterator[None]:
    """Let vLLM choose among others, with what ``plain`` requests leave it."""
    limits = [field for field in LIMITS if hasattr(scheduler, field)]
    before = {field: getattr(scheduler, field) for field in (*limits, "max_num_scheduled_tokens")}
    whole = scheduler.running

    scheduler.running = list(others)
    for field, limit in before.items():
        setattr(scheduler, field, limit - plain)
    try:
        yield
    finally:
        for field, limit in before.items():
            setattr(scheduler, field, limit)
        scheduler.running = whole + scheduler.running[len(others) :]


def _add(scheduler: Any, step: Any, taken: Plain) -> None:
    """Add requests to vLLM's output."""
    cached = step.scheduled_cached_reqs
    cached.req_ids[:0] = taken.names
    cached.new_block_ids[:0] = taken.blocks
    cached.num_computed_tokens[:0] = taken.computed
    cached.num_output_tokens[:0] = taken.sampled

    step.num_scheduled_tokens = dict.fromkeys(taken.names, 1) | step.num_scheduled_tokens
    step.total_num_scheduled_tokens += len(taken.names)
    if not scheduler.use_v2_model_runner:
        scheduler.prev_step_scheduled_req_ids.update(taken.names)
    if getattr(step, "num_common_prefix_blocks", None):  # later releases leave it empty
        common = scheduler.kv_cache_manager.get_num_common_prefix_blocks
        step.num_common_prefix_blocks = common(scheduler.running[0].request_id)
