"""Send the tokens of a request together, from the process of vLLM's scheduler.

vLLM sends every token of every request as it is sampled. The rollout's process would
unpack them one by one, for a millisecond or more a request, although it reads no
completion before its end or a pause.

A message costs that process more than a request does. A finished completion therefore
waits for others to be sent with it, for a small part of the steps that it took.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from functools import partial
from math import inf
from typing import Any

import numpy as np

from coupler_rollout_vllm.compat import plain_schedule, plain_steps
from coupler_rollout_vllm.compat import scheduler as vllm

LATE = 1 / 20
"""How long a completion waits for others, as a part of the steps that it took."""


def scheduler(**arguments: Any) -> Any:
    """Make vLLM's scheduler of this configuration, with :class:`Gathering` in front.

    ``scheduler_cls`` names this function.
    """
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    base = vllm.scheduler_class(arguments["vllm_config"])
    return type("GatheringScheduler", (Gathering, base), {})(**arguments)


def _end_with_parent() -> None:
    """End this process when the one that started it has ended.

    Otherwise it would keep the device's memory.
    """
    parent = multiprocessing.parent_process()
    while parent is not None and parent.is_alive():
        parent.join(60)
    if parent is not None:
        os.kill(os.getpid(), signal.SIGKILL)


class Gathered:
    """Collect what a request samples until it is sent.

    The scheduler's process handles each token of each request. It therefore keeps
    nothing of a step but the token and its log-prob.
    """

    def __init__(self, ends: plain_steps.Ends | None = None) -> None:
        self.ends = ends
        self.steps = 0
        self.last: Any = None
        self.tokens: list[int] = []
        # The last tokens' log-probs, as long as each came alone.
        self.alone: list[float] = []
        # The log-probs before those.
        self.logprobs: list[Any] = []
        # Pieces of [fed, layers, topk].
        self.experts: list[np.ndarray] = []

    def add(self, output: Any) -> None:
        """Take the output of one step."""
        self.last = output
        self.steps += 1
        found = output.new_logprobs
        if found is not None and found.logprobs.size == 1:
            self.alone.append(found.logprobs.item())
        elif found is not None:
            self._close()
            self.logprobs.append(found)
        self.tokens += output.new_token_ids
        if output.routed_experts is not None:
            self.experts.append(output.routed_experts)

    def add_alone(self, token: int, logprob: float) -> None:
        """Take a token that came with its own log-prob alone."""
        self.steps += 1
        self.tokens.append(token)
        self.alone.append(logprob)

    def _close(self) -> None:
        """Let other log-probs follow those that came alone."""
        if self.alone:
            tokens = self.tokens[-len(self.alone) :]
            self.logprobs.append(vllm.logprobs_alone(tokens, self.alone))
            self.alone = []

    def joined(self) -> Any:
        """Return one output that holds all of them."""
        self._close()
        self.last.new_token_ids = self.tokens
        self.last.new_logprobs = vllm.join_logprobs(self.logprobs) if self.logprobs else None
        self.last.routed_experts = np.concatenate(self.experts) if self.experts else None
        return self.last


class Gathering:
    """Mix into a scheduler that holds outputs back until a request ends.

    A scheduler that is paused with its requests kept gives out all that it holds.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        # By running request.
        self.held: dict[str, Gathered] = {}
        # Whole outputs that wait to be sent.
        self.ended: list[Any] = []
        # Steps that all of them can still wait.
        self.patience = inf

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """Return what runs in the next step."""
        vllms = partial(super().schedule, throttle_prefills)  # type: ignore[misc]
        return vllms() if throttle_prefills else plain_schedule.schedule(self, self.held, vllms)

    def update_from_output(self, scheduled: Any, produced: Any) -> dict[int, Any]:
        """Return what to send to each client."""
        rest = plain_steps.take_plain(self, scheduled, produced, self.held)
        clients: dict[int, Any] = super().update_from_output(rest, produced)  # type: ignore[misc]
        self.patience -= 1

        for sent in clients.values():
            for part in sent.outputs:
                self._hold(part)
                if part.finish_reason is not None:
                    self._end(part.request_id)
            sent.outputs = []

        if vllm.is_frozen(self):
            for name in list(self.held):
                self._end(name)
            self.patience = 0

        if self.ended and (self.patience < 1 or not self.requests):  # type: ignore[attr-defined]
            vllm.outputs_of(clients).extend(self.ended)
            self.ended, self.patience = [], inf

        return {
            client: sent for client, sent in clients.items() if sent.outputs or vllm.says_more(sent)
        }

    def _hold(self, part: Any) -> None:
        """Keep a request's output of one step, by vLLM's scheduler."""
        name = part.request_id
        if name not in self.held:
            request = self.requests.get(name)  # type: ignore[attr-defined]
            self.held[name] = Gathered(plain_steps.ends_of(self, request) if request else None)
        self.held[name].add(part)

    def _end(self, name: str) -> None:
        """Queue the joined output of a request that ended or was paused."""
        gathered = self.held.pop(name)
        self.ended.append(gathered.joined())
        self.patience = min(self.patience, LATE * gathered.steps)

    def has_requests(self) -> bool:
        """Tell if the engine has to step, also to give out what ended or was paused."""
        rest = self.ended or (self.held and vllm.is_frozen(self))
        return super().has_requests() or bool(rest)  # type: ignore[misc]

    def finish_requests(self, *arguments: Any, **named: Any) -> Any:
        """Forget requests that were cut off. Whoever cuts off has paused before."""
        done = super().finish_requests(*arguments, **named)  # type: ignore[misc]
        for name in self.held.keys() - self.requests.keys():  # type: ignore[attr-defined]
            del self.held[name]
        return done
