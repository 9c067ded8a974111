"""Record the turns of an episode with the exact ids that were fed and sampled."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from typing import Any, Protocol

from coupler.batch.trajectory import Origin, Segment
from coupler.conversation.limits import ConversationOver, Limits
from coupler.conversation.messages import Said, canonical
from coupler.conversation.rendering import Renderer
from coupler.conversation.tree import Row, Tree, Turn, digest
from coupler.errors import CouplerError
from coupler.interfaces import Completion, Ended, Message, Reply, Request
from coupler.metrics import Metric, Metrics
from coupler.system.seeding import derive

BETWEEN = (Origin.GLUE, Origin.OBSERVATION)
NO_TOOLS = canonical(())


class Generates(Protocol):
    """Samples one completion of a request. Core's group of replicas does."""

    async def generate(self, request: Request) -> Completion:
        """Sample one completion."""
        ...


class Conversation:
    """The turns of one episode, as a tree.

    A request extends the ids of the longest recorded path that begins its messages. It
    never renders these again. Where a caller changed the history, the request begins a
    branch, and :attr:`forks` says what changed.

    Args:
        rollout: the source of completions.
        request: the sampling of every turn: temperature, top_p, session and the rest.
            Its seed is that of the episode. The conversation sets the prompt, the limit
            of tokens, the stop tokens and a seed for each turn.
    """

    def __init__(
        self, rollout: Generates, renderer: Renderer, limits: Limits, request: Request
    ) -> None:
        self.rollout, self.renderer, self.limits = rollout, renderer, limits
        self.request = replace(request, stop=renderer.stop)
        self.tree = Tree()
        # the messages of the last request with its answer, which the next one repeats
        self._heard: list[Said] = []
        self.ended: Ended | None = None
        self.closed = False

        # in words, in order
        self.forks: list[str] = []
        self.overruled, self.num_calls = 0, 0
        # requests so far, and those that are being sampled
        self.started, self.running = 0, 0
        self.start = time.monotonic()

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] = (),
        *,
        max_tokens: int | None = None,
        wishes: Mapping[str, Any] | None = None,
    ) -> Reply:
        """Sample the answer to messages.

        Args:
            max_tokens: a lower limit than that of :class:`Limits`.
            wishes: what the caller asked of the sampling, by the names of
                :class:`~coupler.interfaces.Request`. Other values than those of the run
                are overruled, and counted.

        Raises:
            ConversationOver: it has ended, or ends now at one of its limits.
            CouplerError: the messages hold something else than text, do not end before
                the policy's turn, or are refused by the chat template.
        """
        told = self._tell(messages)
        self._count_wishes(wishes or {})

        offered = canonical(tools) if tools else NO_TOOLS
        parent, recorded, segments, at = self._continue(told, tools, offered)
        prompt, done = await self._sample(parent, recorded, segments, max_tokens)

        parsed = self.renderer.parse(done.tokens, prompt, tools)
        answer = Said.of(parsed.message)
        turn = Turn(
            parent,
            segments,
            done,
            prompt=digest(prompt),
            tools=offered,
            said=(*told[at:], answer),
        )
        self._add(turn, told)
        self._heard = [*told, answer]
        self._end_if_due(done, len(prompt), len(answer.message.get("tool_calls", [])))
        return Reply(
            parsed.message,
            done.finish,
            self.ended,
            (len(prompt), len(done.tokens)),
            done,
            parsed.malformed,
        )

    async def count(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> int:
        """Return how many tokens :meth:`chat` would feed. Nothing is recorded.

        Raises:
            CouplerError: the messages are none that :meth:`chat` takes.
        """
        _, recorded, segments, _ = self._continue(self._tell(messages), tools, canonical(tools))
        return len(recorded) + sum(len(segment.ids) for segment in segments)

    async def sample(self, ids: tuple[int, ...], max_tokens: int | None = None) -> Completion:
        """Sample after ids, for callers that keep ids themselves.

        What they add to recorded ids is an observation.

        Raises:
            ConversationOver: it has ended, or ends now at one of its limits.
        """
        parent, length = self.tree.match_ids(ids)
        origin = Origin.OBSERVATION if parent else Origin.PROMPT
        segments = (Segment(ids[length:], origin),) if ids[length:] else ()
        prompt, done = await self._sample(parent, ids[:length], segments, max_tokens)

        self._add(Turn(parent, segments, done, digest(prompt)), [])
        self._end_if_due(done, len(prompt), 0)
        return done

    def end(self, ended: Ended) -> None:
        """Say how the conversation ended. The first reason counts."""
        self.ended = self.ended or ended

    def close(self) -> tuple[Row, ...]:
        """End the conversation, and return its rows. All of them are one trajectory.

        A request that is still being sampled leaves nothing.

        Raises:
            AssertionError: a row does not reproduce every request, or a sampled token
                is not trained exactly once.
        """
        self.end(Ended.STOP)
        self.closed = True
        return self.tree.rows()

    def metrics(self) -> Metrics:
        """Return counts of this episode, and how it ended."""
        turns = self.tree.turns

        counts = {
            "rows": sum(not turn.children for turn in turns),
            "turns": len(turns),
            "tokens": max((turn.size for turn in turns), default=0),
            "completion_tokens": sum(len(turn.completion.tokens) for turn in turns),
            "calls": self.num_calls,
            "forks": len(self.forks),
            "overruled": self.overruled,
            **{f"ended_{ended}": self.ended is ended for ended in Ended},
        }
        found = {f"conversation/{name}": Metric(float(count)) for name, count in counts.items()}
        return {**found, "time/conversation": Metric(time.monotonic() - self.start)}

    def _tell(self, messages: Sequence[Message]) -> list[Said]:
        """Tidy messages that the policy is to answer. One that repeats a message of the
        last request is not tidied again.

        Raises:
            CouplerError: they hold something else than text, or do not end before the
                policy's turn.
        """
        heard = zip_longest(messages, self._heard[: len(messages)])
        told = [
            old if old and old.is_plain(message) else Said.of(message) for message, old in heard
        ]

        if not told or told[-1].message["role"] == "assistant":
            raise CouplerError(
                "the policy speaks after a message of a user or a tool, and the last message is "
                f"{'its own' if told else 'missing'}.\n"
                "  set:  messages to end with role user or tool"
            )
        return told

    def _continue(
        self, told: list[Said], tools: Sequence[Any], offered: str
    ) -> tuple[Turn | None, tuple[int, ...], tuple[Segment, ...], int]:
        """Return the turn that messages extend, its ids, the segments that they add,
        and how many messages are recorded already.
        """
        messages = [said.message for said in told]
        parent, at = self.tree.match(told, offered)

        if parent:
            recorded = parent.ids
            segments = self.renderer.extend(
                messages[:at],
                recorded,
                messages[at:],
                tools,
            )
            if segments is not None:
                self._check(segments)
                return parent, recorded, segments, at

        return None, (), (Segment(self.renderer.render(messages, tools), Origin.PROMPT),), 0

    def _check(self, segments: tuple[Segment, ...]) -> None:
        if not segments or any(segment.origin not in BETWEEN for segment in segments):
            found = ", ".join(segment.origin for segment in segments) or "nothing"
            raise CouplerError(
                f"{type(self.renderer).__name__}.extend returned {found}.\n"
                "  it returns:  segments of origin glue and observation, or None"
            )

    async def _sample(
        self,
        parent: Turn | None,
        recorded: tuple[int, ...],
        segments: tuple[Segment, ...],
        max_tokens: int | None,
    ) -> tuple[tuple[int, ...], Completion]:
        """Sample after ``recorded``, the ids of ``parent``, and those of ``segments``.
        Return them with the completion.

        Raises:
            AssertionError: the prompt does not begin with what ``parent`` was fed and
                sampled.
        """
        if self.ended:
            # A caller that asks again and again must not keep others from running.
            await asyncio.sleep(0)
        prompt = (*recorded, *chain.from_iterable(segment.ids for segment in segments))
        assert not parent or parent.begins(prompt), "a prompt leaves what was recorded"
        room = self._room(len(prompt), max_tokens)
        request = replace(
            self.request,
            prompt=prompt,
            max_tokens=room,
            seed=derive(self.request.seed, "turn", self.started),
        )

        self.started += 1
        self.running += 1
        try:
            done = await self._in_time(request)
        finally:
            self.running -= 1
        if self.closed:
            raise ConversationOver(self.ended or Ended.CUT)
        return prompt, done

    def _room(self, length: int, max_tokens: int | None) -> int:
        """Return how many tokens a turn may have.

        Raises:
            ConversationOver: it may have none.
        """
        limits = self.limits
        if limits.seconds and time.monotonic() - self.start >= limits.seconds:
            self.end(Ended.SECONDS)
        if limits.turns and len(self.tree.turns) + self.running >= limits.turns:
            self.end(Ended.TURNS)
        if limits.tokens and length >= limits.tokens:
            self.end(Ended.TOKENS)
        if self.ended:
            raise ConversationOver(self.ended)

        left = [limits.tokens - length] if limits.tokens else []
        return min(limits.completion_tokens, max_tokens or limits.completion_tokens, *left)

    async def _in_time(self, request: Request) -> Completion:
        """Sample a request within the time of the episode.

        Raises:
            ConversationOver: the time is over.
        """
        limit = self.limits.seconds
        if not limit:
            return await self.rollout.generate(request)
        scope = asyncio.timeout(self.start + limit - time.monotonic())

        try:
            async with scope:
                return await self.rollout.generate(request)
        except TimeoutError:
            if not scope.expired():
                raise
            self.end(Ended.SECONDS)
            raise ConversationOver(Ended.SECONDS) from None

    def _add(self, turn: Turn, told: list[Said]) -> None:
        if self.tree.siblings(turn.parent):
            refused = not turn.parent and self.tree.match(told, turn.tools)[0]
            self.forks.append(
                "the renderer cannot extend this turn with these messages"
                if refused
                else self.tree.difference(told, turn.tools)
            )
        self.tree.add(turn)

    def _end_if_due(self, done: Completion, length: int, num_calls: int) -> None:
        self.num_calls += num_calls
        if done.finish == "length":
            full = self.limits.tokens and length + len(done.tokens) >= self.limits.tokens
            self.end(Ended.TOKENS if full else Ended.LENGTH)
        elif done.finish == "abort":
            self.end(Ended.CUT)
        elif self.limits.calls and self.num_calls > self.limits.calls:
            self.end(Ended.CALLS)

    def _count_wishes(self, wishes: Mapping[str, Any]) -> None:
        wanted = {name: value for name, value in wishes.items() if value is not None}
        ours = {name: getattr(self.request, name, None) for name in wanted}
        self.overruled += wanted != ours
