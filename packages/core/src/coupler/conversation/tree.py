"""Keep the turns of a conversation as a tree of exact ids, and make rows of it."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

from coupler.batch.trajectory import Origin, Segment, Trajectory
from coupler.conversation.messages import Said, differs
from coupler.interfaces import Completion, Message


@dataclass(slots=True, eq=False)
class Turn:
    """A request and its completion, with the ids that they added.

    Attributes:
        parent: the turn whose ids the request extended. None rendered them anew.
        segments: what the request added, of any origin but ``SAMPLED``.
        prompt: a digest of the prompt that the rollout was sent.
        tools: the canonical JSON of the tools that were offered.
        said: the messages that the request added, and the answer. It is empty where a
            caller sent ids.
        size: the number of all ids from the root to the end of this turn.
    """

    parent: Turn | None
    segments: tuple[Segment, ...]
    completion: Completion
    prompt: bytes
    tools: str = ""
    said: tuple[Said, ...] = ()
    children: list[Turn] = field(default_factory=list)
    size: int = field(init=False)

    def __post_init__(self) -> None:
        own = len(self.completion.tokens) + sum(len(segment.ids) for segment in self.segments)
        self.size = own + (self.parent.size if self.parent else 0)

    @property
    def path(self) -> list[Turn]:
        """Return the turns from the root to this one."""
        found: list[Turn] = [self]
        while found[-1].parent:
            found.append(found[-1].parent)
        return found[::-1]

    @property
    def added(self) -> tuple[int, ...]:
        """Return the ids that the request added, and those that were sampled."""
        shown = (segment.ids for segment in self.segments)
        return (*chain.from_iterable(shown), *self.completion.tokens)

    @property
    def ids(self) -> tuple[int, ...]:
        """Return all ids from the root to the end of this turn."""
        each: list[tuple[int, ...]] = []
        for turn in self.path:
            each += [segment.ids for segment in turn.segments]
            each.append(turn.completion.tokens)
        return tuple(chain.from_iterable(each))

    def begins(self, prompt: tuple[int, ...]) -> bool:
        """Return whether ``prompt`` starts with what this turn was fed and sampled."""
        tokens = self.completion.tokens
        end = self.size
        fed = end - len(tokens)
        return digest(prompt[:fed]) == self.prompt and prompt[fed:end] == tokens

    @property
    def anchor(self) -> bytes:
        """Return a digest of what this turn was shown after the last answer before it.

        That is the text of messages, or ids where a caller sent these. Glue between
        turns, which depends on how the last answer ended, does not count.
        """
        if not self.said:
            shown = (s.ids for s in self.segments if s.origin is not Origin.GLUE)
            return digest(tuple(chain.from_iterable(shown)))

        keys: list[bytes] = []
        for said in self.said[:-1]:
            keys = [] if said.message["role"] == "assistant" else [*keys, said.key]
        return hashlib.blake2b(b"".join(keys), digest_size=16).digest()

    @property
    def history(self) -> list[Said]:
        """Return all messages from the root to the answer of this turn."""
        return [said for turn in self.path for said in turn.said]


@dataclass(frozen=True, slots=True)
class Row:
    """One path through a conversation, from the root to a leaf.

    Attributes:
        trajectory: its segments. A sampled turn is ``SAMPLED`` in the first row that
            holds it, and ``PROMPT`` in the others.
        completions: the completions along the path, in order.
        trained: those of them that are ``SAMPLED`` in this row.
        messages: all of the path, with the last answer, or none where ids were sent.
        numbers: the place of each of ``trained`` among the turns of the episode.
        turns: the turns of ``trained``, none in the row of an episode of a single turn.
    """

    trajectory: Trajectory
    completions: tuple[Completion, ...]
    trained: tuple[Completion, ...]
    messages: tuple[Message, ...] = ()
    numbers: tuple[int, ...] = ()
    turns: tuple[Turn, ...] = ()

    @property
    def anchors(self) -> tuple[bytes, ...]:
        """Return a digest of what each of ``trained`` was shown, by their turns."""
        if self.turns:
            return tuple(turn.anchor for turn in self.turns)
        return tuple(digest(self.trajectory.segments[0].ids) for _ in self.trained)

    @classmethod
    def of_one_turn(cls, prompt: tuple[int, ...], done: Completion) -> Row:
        """Return the row of an episode of a single turn."""
        segments = (Segment(prompt, Origin.PROMPT), sampled(done))
        return cls(Trajectory(segments), (done,), (done,), numbers=(0,))


class Tree:
    """The turns of one conversation, in the order in which they were sampled."""

    def __init__(self) -> None:
        self.roots: list[Turn] = []
        self.turns: list[Turn] = []

    def siblings(self, parent: Turn | None) -> list[Turn]:
        """Return the turns that follow ``parent``."""
        return parent.children if parent else self.roots

    def add(self, turn: Turn) -> None:
        """Put a turn behind its parent."""
        self.siblings(turn.parent).append(turn)
        self.turns.append(turn)

    def match(self, told: Sequence[Said], tools: str) -> tuple[Turn | None, int]:
        """Find the longest recorded path that begins ``told``.

        Returns:
            Its last turn and how many messages it has. Among equally long ones it is
            the path whose reasoning was repeated, then the first.
        """
        best: tuple[int, int] = (0, 0)
        found: Turn | None = None
        stack: list[tuple[Turn, int, int]] = [(turn, 0, 0) for turn in reversed(self.roots)]
        while stack:
            turn, at, exact = stack.pop()
            end = at + len(turn.said)
            if not turn.said or turn.tools != tools or end >= len(told):
                continue
            # a caller that changes nothing repeats the very objects
            if tuple(told[at:end]) == turn.said:
                exact += len(turn.said)
            else:
                pairs = list(zip(told[at:end], turn.said, strict=True))
                if not all(new.repeats(old) for new, old in pairs):
                    continue
                exact += sum(new.reasoning == old.reasoning for new, old in pairs)

            if (end, exact) > best:
                best, found = (end, exact), turn
            stack += [(child, end, exact) for child in reversed(turn.children)]
        return found, best[0]

    def match_ids(self, ids: tuple[int, ...]) -> tuple[Turn | None, int]:
        """Find the longest recorded path whose ids begin ``ids``, and their number."""
        found, length = None, 0
        stack = [(turn, 0) for turn in reversed(self.roots)]

        while stack:
            turn, at = stack.pop()
            added = turn.added
            end = at + len(added)
            if ids[at:end] == added:
                if end > length:
                    found, length = turn, end
                stack += [(child, end) for child in reversed(turn.children)]
        return found, length

    def difference(self, told: Sequence[Said], tools: str) -> str:
        """Say in words where ``told`` leaves the nearest recorded path."""
        if not told:
            return "other ids were sent"

        def nearness(turn: Turn) -> tuple[int, int]:
            history = turn.history
            pairs = zip(told, history, strict=False)
            changed = (i for i, (new, old) in enumerate(pairs) if not new.repeats(old))
            return next(changed, min(len(told), len(history))), len(history)

        nearest = max((turn for turn in self.turns if turn.said), key=nearness, default=None)
        if nearest is None:
            return "messages came after ids"
        if nearest.tools != tools:
            return "other tools were offered"
        return differs(told, nearest.history) or "the same messages came again"

    def rows(self) -> tuple[Row, ...]:
        """Return one row per leaf, in the order in which the leaves were sampled.

        Raises:
            AssertionError: a row does not reproduce every request, or a sampled token
                is not trained exactly once.
        """
        # the turns that no row has trained yet, with their places
        left = {id(turn): number for number, turn in enumerate(self.turns)}
        made = tuple(self._row(leaf, left) for leaf in self.turns if not leaf.children)

        total = sum(len(turn.completion.tokens) for turn in self.turns)
        assert sum(len(row.trajectory.sampled) for row in made) == total
        return made

    def _row(self, leaf: Turn, left: dict[int, int]) -> Row:
        """Return the row of a leaf. The turns that it trains leave ``left``."""
        segments: list[Segment] = []
        mine: dict[int, Turn] = {}
        for turn in leaf.path:
            segments += turn.segments
            shown = [segment.ids for segment in segments]
            fed = tuple(chain.from_iterable(shown))
            assert digest(fed) == turn.prompt, "a row is not what the rollout was fed"

            done = turn.completion
            if id(turn) in left:
                segments.append(sampled(done))
                mine[left.pop(id(turn))] = turn
            else:
                segments.append(Segment(done.tokens, Origin.PROMPT))
        path = tuple(turn.completion for turn in leaf.path)
        messages = [said.message for said in leaf.history]
        if not all(turn.said for turn in leaf.path):
            messages = []
        return Row(
            Trajectory(tuple(segments)),
            path,
            tuple(turn.completion for turn in mine.values()),
            tuple(messages),
            tuple(mine),
            tuple(mine.values()),
        )


def sampled(done: Completion) -> Segment:
    """Return the segment that trains a completion."""
    return Segment(done.tokens, Origin.SAMPLED, done.logprobs, done.versions)


def digest(ids: Sequence[int]) -> bytes:
    """Return a short value that tells ids apart."""
    return hashlib.blake2b(struct.pack(f"{len(ids)}q", *ids), digest_size=16).digest()
