"""Find rollouts that sample from another distribution than the one they report."""

from __future__ import annotations

from collections import deque

import numpy as np

from coupler.errors import WeightSyncError
from coupler.metrics import Metric, Metrics
from coupler.worker.train_infer import SURPRISE_OF, VARIANCE_OF

# The check looks back over at least this many tokens, in whole steps.
WINDOW = 50_000
# It judges a window whose entropies add up to this many nats. Tokens are called too
# little surprising only if the squares are worth this many of the largest one: with
# fewer, too few rare tokens came to know the variance.
MIN_NATS, MIN_SQUARES = 400.0, 32.0
# A mean deviation below this share of a standard deviation, or below so many nats, is
# rounding.
MIN_EFFECT, MIN_MEAN = 0.02, 1e-3


class SamplingCheck:
    """Judges ``x = -log p - H`` of sampled tokens over the last steps.

    Log-probs can be right while sampling is not: a hidden top-p or a repetition penalty
    changes which tokens come, not what is reported of them. The mean of x is 0 if
    tokens come from p. The statistic is ``z = sum(x) / sqrt(sum(x^2))``, with the
    variance of x estimated from the sampled tokens themselves, since engines compute
    entropies and no second moments.

    Tokens of a stale policy, or of groups that were kept for their rewards, are drawn
    from a distribution q that honestly differs from p. Their mean x is at most
    ``sqrt(2 KL(q || p))`` standard deviations from 0 (Donsker and Varadhan 1983, for a
    sub-Gaussian x), and so much is allowed.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        # one row per step: per replica (and first, for all of them) the number of
        # tokens, sum of x and sum of x^2; then nats of entropy, nats of KL, largest x^2
        self.steps: deque[tuple[np.ndarray, float, float, float]] = deque()

    def judge(self, trained: Metrics, sampled: Metrics, groups: int) -> Metrics:
        """Take in a step, and return its ``sampling/z`` if it has enough tokens.

        Args:
            trained: ``sampling/*`` of the engine, on the tokens of the batch.
            sampled: the sampler's metrics of the same time.
            groups: prompt groups in the batch.

        Raises:
            WeightSyncError: the tokens of a window do not follow the distribution.
        """
        surprise = trained.get("sampling/surprise")
        if surprise is None or not surprise.weight:
            return {}
        # A step may train on groups that were all sampled before the last one.
        rejected = sampled.get("sampled/rejected_groups", Metric(0.0)).total
        kept = groups * np.log1p(rejected / groups)
        rows = np.array(
            [
                (total.weight, total.total, trained[square].total)
                for total, square in _sums(trained, surprise)
            ]
        )
        self.steps.append(
            (
                rows,
                trained["sampling/entropy"].total,
                trained["sampling/kl"].total + kept,
                trained["sampling/square_max"].total,
            )
        )
        while sum(step[0][0, 0] for step in self.steps) - self.steps[0][0][0, 0] >= WINDOW:
            self.steps.popleft()

        if self.limit:
            self._check()
        z = _deviations(
            *rows[0, 1:],
            *(trained[name].total for name in ("sampling/entropy", "sampling/square_max")),
        )
        return {"sampling/z": Metric(z)} if z else {}

    def _check(self) -> None:
        width = max(len(step[0]) for step in self.steps)
        rows = sum(np.pad(step[0], ((0, width - len(step[0])), (0, 0))) for step in self.steps)
        nats, kl = (sum(step[i] for step in self.steps) for i in (1, 2))
        largest = max(step[3] for step in self.steps)
        assert isinstance(rows, np.ndarray)
        allowed = MIN_EFFECT + np.sqrt(2 * kl / rows[0, 0])

        for index, (count, total, square) in enumerate(rows):
            z = _deviations(total, square, nats * count / rows[0, 0], largest)
            if abs(z) > max(self.limit, allowed * np.sqrt(count)) and abs(total) > MIN_MEAN * count:
                raise WeightSyncError(
                    _sentence(index - 1, z, total / count, int(count), self.limit)
                )


def _deviations(total: float, square: float, nats: float, largest: float) -> float:
    """Return z, or 0 where there are too few tokens to know their variance."""
    if nats < MIN_NATS or not square > 0 or (total < 0 and square < MIN_SQUARES * largest):
        return 0.0
    return float(total / np.sqrt(square))


def _sums(trained: Metrics, surprise: Metric) -> list[tuple[Metric, str]]:
    """Pair the sum of x with the name of the sum of its squares, for all replicas and
    then for each of them.
    """
    count = sum(name.startswith(SURPRISE_OF) for name in trained)
    each = [(trained[f"{SURPRISE_OF}{i}"], f"{VARIANCE_OF}{i}") for i in range(count)]
    return [(surprise, "sampling/variance"), *each]


def _sentence(replica: int, z: float, mean: float, count: int, limit: float) -> str:
    who = "the rollouts sample" if replica < 0 else f"rollout replica {replica} samples"
    less = "less" if z < 0 else "more"
    causes = (
        "a top-p, top-k, min-p or temperature that is set beside sampling.*"
        if z < 0
        else "a repetition, presence or frequency penalty, banned tokens, or another temperature"
    )

    return (
        f"{who} from another distribution than the log-probs say: the last {count} tokens are "
        f"{less} surprising than the engine's entropy by {abs(mean):.4f} nats on average, "
        f"{abs(z):.1f} standard deviations, limit {limit:g}.\n"
        "  this means:  the rollout samples otherwise than it reports, or the entropy that the "
        "engine computes is not that of its log-probs; these numbers cannot tell which\n"
        f"  look at:  the rollout's own defaults, such as generation_config.json: {causes}; "
        "sampling/z in metrics.jsonl; the limit is sync.max_sampling_z"
    )
