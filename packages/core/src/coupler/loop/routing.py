"""Choose the replica of each request."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from coupler.interfaces import Completion, Request
from coupler.metrics import Metric, Metrics

# A replica may get this many times the mean load, so that the samples of one prompt
# share its prefix cache.
FULLER = 1.125
# A session leaves its replica where that has so many median requests more to do than
# another one, and the prefix to compute again besides.
MARGIN = 2.0
# The median is of so many requests.
RECENT = 64
# The weight of one more completion in the mean length of completions.
SHARE = 1 / 32


@dataclass(slots=True)
class Session:
    """One conversation, or the samples of one prompt.

    Attributes:
        replica: the one that has its prefix in a cache, -1 before the first request.
        cached: tokens of that prefix.
        whole: whether all its requests go to one replica, however full that is.
    """

    replica: int = -1
    cached: int = 0
    whole: bool = False


class Router:
    """Sends a request to the replica with the fewest outstanding tokens.

    A session keeps the replica that has its prefix in a cache, unless that is
    overloaded. Tokens are those that have to be computed there: the prompt without what
    is cached, and a completion of the mean length.
    """

    def __init__(self, count: int, margin: float = MARGIN) -> None:
        self.margin = margin
        self.outstanding = [0] * count
        self.sessions: dict[str, Session] = {}
        self.costs: deque[int] = deque(maxlen=RECENT)
        self.mean_completion: float | None = None
        self.stayed, self.moved = 0, 0

    def keeps_whole(self, groups: int) -> bool:
        """Return whether this many equal groups of requests load the replicas evenly
        enough if each group goes to one replica.
        """
        count = len(self.outstanding)
        return -(-groups // count) * count <= FULLER * groups

    def begin(self, session: str) -> None:
        """Announce a session whose requests all go to one replica.

        Any other session begins with its first request.
        """
        self.sessions[session] = Session(whole=True)

    def end(self, session: str) -> None:
        """Forget a session, which sends no further request."""
        self.sessions.pop(session, None)

    def forget_caches(self) -> None:
        """Count no prefix as cached, since new weights came."""
        for session in self.sessions.values():
            session.cached = 0

    def start(self, request: Request, living: Sequence[int]) -> tuple[int, int]:
        """Choose among the ``living`` replicas, and return one with the tokens that the
        request costs it, which :meth:`finish` takes back.
        """
        index = self._choose(request, living)
        cost = self._cost(request, index)
        self.outstanding[index] += cost
        self.costs.append(cost)

        if request.session:
            session = self.sessions.setdefault(request.session, Session())
            moved = session.replica not in (-1, index)
            # A session that is kept whole leaves a dead replica alone.
            self.moved += moved and not session.whole
            self.stayed += session.replica == index and not session.whole
            session.cached = max(len(request.prompt), 0 if moved else session.cached)
            session.replica = index
        return index, cost

    def finish(self, request: Request, index: int, cost: int, done: Any) -> None:
        """Take back the cost of a request, and learn from ``done`` if it completed."""
        self.outstanding[index] -= cost
        if not isinstance(done, Completion):
            return

        length = len(done.tokens)
        mean = length if self.mean_completion is None else self.mean_completion
        self.mean_completion = mean + SHARE * (length - mean)
        session = self.sessions.get(request.session)
        if session is not None and session.replica == index:
            session.cached = max(session.cached, len(request.prompt) + length)

    def metrics(self) -> Metrics:
        """Return what sessions did since the last call, nothing if there were none."""
        stayed, moved, self.stayed, self.moved = self.stayed, self.moved, 0, 0
        if not stayed + moved:
            return {}
        return {
            "rollout/migrations": Metric(moved, how="sum"),
            "rollout/session_hits": Metric(stayed, stayed + moved),
        }

    def _choose(self, request: Request, living: Sequence[int]) -> int:
        lightest = min(living, key=self.outstanding.__getitem__)
        session = self.sessions.get(request.session)
        if session is None or session.replica not in living:
            return lightest

        kept = session.replica
        if session.whole or kept == lightest:
            return kept
        # Without this, sessions with long prefixes wander, each time at a high price.
        again = self._cost(request, lightest) - self._cost(request, kept)
        more = self.outstanding[kept] - self.outstanding[lightest]
        return kept if more <= self.margin * median(self.costs) + again else lightest

    def _cost(self, request: Request, index: int) -> int:
        """Return the tokens that a replica has to compute for a request."""
        session = self.sessions.get(request.session)
        cached = session.cached if session is not None and session.replica == index else 0
        expected = request.max_tokens
        if self.mean_completion is not None:
            expected = min(expected, round(self.mean_completion))
        return max(len(request.prompt) - cached, 0) + expected
