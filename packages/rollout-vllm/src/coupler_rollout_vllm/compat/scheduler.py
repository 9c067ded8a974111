"""Read and make what vLLM's scheduler sends, in the scheduler's process."""
# pyright: reportMissingImports=false
# The environment that is type-checked has no vLLM: its torch may be another.

from __future__ import annotations

from typing import Any

import numpy as np

from coupler.batch.batch import concat

CLIENT = 0  # The index of a scheduler's only client.


def scheduler_class(config: Any) -> type:
    """Return vLLM's scheduler for this configuration."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    return AsyncScheduler if config.scheduler_config.async_scheduling else Scheduler


def is_ahead(scheduler: Any) -> bool:
    """Tell if steps are chosen before the tokens of the last one are known."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    return isinstance(scheduler, AsyncScheduler)


def is_frozen(scheduler: Any) -> bool:
    """Tell whether the scheduler is paused with its requests kept."""
    from vllm.v1.core.sched.interface import PauseState

    return scheduler.pause_state is PauseState.PAUSED_ALL


def outputs_of(clients: dict[int, Any]) -> list[Any]:
    """Return the outputs for our client, the only one there is."""
    from vllm.v1.engine import EngineCoreOutputs

    if CLIENT not in clients:
        clients[CLIENT] = EngineCoreOutputs(outputs=[])
    return clients[CLIENT].outputs


def says_more(sent: Any) -> bool:
    """Tell whether a message without outputs carries anything."""
    return bool(sent.finished_requests or sent.scheduler_stats or sent.utility_output)


def logprobs_alone(tokens: list[int], logprobs: list[float]) -> Any:
    """Make the log-probs of tokens of which no others came with them."""
    from vllm.v1.outputs import LogprobsLists

    ids, values = np.array(tokens, np.int32), np.array(logprobs, np.float32)
    return LogprobsLists(ids[:, None], values[:, None], np.empty(0, np.int32), None)


def join_logprobs(parts: list[Any]) -> Any:
    """Join the log-probs of several steps of a request, as if they were of one step.

    Of the ids, those that cannot be sampled become -1. A step is as wide as its widest
    request. Ranks are left out: nobody reads them.
    """
    from vllm.v1.outputs import LogprobsLists

    logprobs = concat([part.logprobs for part in parts])
    ids = concat([part.logprob_token_ids for part in parts])
    possible = np.where(np.isneginf(logprobs), -1, ids)
    return LogprobsLists(possible, logprobs, np.empty(0, np.int32), None)
