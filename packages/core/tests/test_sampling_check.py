"""A run finds rollouts whose sampling is not what their log-probs say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from toy_run import ToyRun, small

from coupler.config.schema import SamplingConfig, SyncConfig
from coupler.errors import WeightSyncError
from coupler.interfaces import Completion, Request
from coupler.metrics import Metric, Metrics, merge
from coupler.run.sampling_check import SamplingCheck
from coupler.system.seeding import stream
from coupler.testing.toy import ToyRollout, log_softmax, nucleus
from coupler.worker.train_infer import surprise

MANY = 100_000


class Hidden(ToyRollout):
    """Reports the log-probs of the policy, and samples from :meth:`altered` ones."""

    def altered(self, log_p: np.ndarray, before: tuple[int, ...]) -> np.ndarray:
        raise NotImplementedError

    async def generate(self, request: Request) -> Completion:
        await self.admits.wait()
        random = stream(request.seed, "hidden")
        tokens: list[int] = []
        logprobs: list[float] = []
        for _ in range(request.max_tokens):
            last = np.array([(*request.prompt, *tokens)[-1]])
            log_p = log_softmax(self.weights, last, request.temperature)[0]
            p = np.exp(self.altered(log_p, tuple(tokens)))
            tokens.append(int(random.choice(len(p), p=p / p.sum())))
            logprobs.append(float(log_p[tokens[-1]]))
        versions = (self.version,) * len(tokens)
        return Completion(tuple(tokens), tuple(logprobs), versions, "length")


class TopP(Hidden):
    def altered(self, log_p: np.ndarray, before: tuple[int, ...]) -> np.ndarray:
        return nucleus(log_p, 0.95)


class MinP(Hidden):
    def altered(self, log_p: np.ndarray, before: tuple[int, ...]) -> np.ndarray:
        return np.where(log_p >= log_p.max() + np.log(0.05), log_p, -np.inf)


class Warm(Hidden):
    def altered(self, log_p: np.ndarray, before: tuple[int, ...]) -> np.ndarray:
        return 0.8 * log_p


class Honest(Hidden):
    def altered(self, log_p: np.ndarray, before: tuple[int, ...]) -> np.ndarray:
        return log_p


def run(folder: Path, rollout: str, *, replicas: int = 1, **changes: object) -> list[dict]:
    settings: dict = {"steps": 16, "samples_per_prompt": 8, **changes}
    settings.setdefault("sampling", SamplingConfig(max_tokens=16))
    target = rollout if ":" in rollout else f"test_sampling_check:{rollout}"
    return ToyRun(folder, small(**settings), rollout=target, replicas=replicas).run()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    ("rollout", "less"), [("TopP", "less"), ("MinP", "less"), ("Warm", "more")]
)
def test_hidden_sampling_ends_a_run(
    tmp_path: Path, rollout: str, less: str, temperature: float
) -> None:
    sampling = SamplingConfig(max_tokens=16, temperature=temperature)
    with pytest.raises(WeightSyncError, match="the rollouts sample from another dist") as raised:
        run(tmp_path, rollout, sampling=sampling)
    assert f"tokens are {less} surprising" in str(raised.value)
    assert "sync.max_sampling_z" in str(raised.value)


def test_hidden_sampling_ends_an_asynchronous_run(tmp_path: Path) -> None:
    with pytest.raises(WeightSyncError, match="from another distribution"):
        run(tmp_path, "MinP", max_staleness=2, steps=60)


def test_the_sentence_names_the_replica() -> None:
    """The second of 40 replicas never samples a token that is less likely than 2 %."""
    random, check = np.random.default_rng(3), SamplingCheck(8.0)
    steps = [sampled(random, "common", 8000, 40, cut=1) for _ in range(10)]
    with pytest.raises(WeightSyncError, match="rollout replica 1 samples from another") as raised:
        any(check.judge(step, {}, 4) == {} for step in steps)
    assert "tokens are less surprising" in str(raised.value)


def test_the_check_can_be_turned_off(tmp_path: Path) -> None:
    log = run(tmp_path, "MinP", sync=SyncConfig(max_sampling_z=0), steps=6)
    assert min(step.get("sampling/z", 0.0) for step in log[1:]) < -3


@pytest.mark.parametrize("max_staleness", [0, 2])
@pytest.mark.parametrize("seed", range(2))
def test_honest_runs_pass(tmp_path: Path, seed: int, max_staleness: int) -> None:
    toy = "coupler.testing.toy:ToyRollout"
    log = run(tmp_path, toy, seed=seed, max_staleness=max_staleness)
    assert len(log) == 17 and all("sampling/surprise" in step for step in log[1:])
    if not max_staleness:
        assert max(abs(step.get("sampling/z", 0.0)) for step in log[1:]) < 6


def sampled(
    random: np.random.Generator, kind: str, count: int, replicas: int = 1, cut: int = -1
) -> Metrics:
    """Return metrics of a step whose tokens follow a ``kind`` of distribution.

    Replica ``cut`` samples none below 2 %.
    """
    if kind == "two levels":  # one token is likely, and the others are equally rare
        likely = random.uniform(0.9, 0.9999, count)
        hit = random.random(count) < likely
        rare = np.log((1 - likely) / 150_000)
        logprobs = np.where(hit, np.log(likely), rare)
        entropy = -likely * np.log(likely) - (1 - likely) * rare
    else:
        width = {"flat": 0.1, "common": 2.0, "peaked": 8.0}[kind]
        logits = random.normal(0, width, (64, 500))
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        p = np.exp(log_p)
        row = random.integers(0, 64, count)
        points = random.random(count)
        drawn = p[row] * ((p[row] >= 0.02) | (np.arange(count) % replicas != cut)[:, None])
        drawn /= drawn.sum(-1, keepdims=True)
        token = np.minimum((drawn.cumsum(-1) < points[:, None]).sum(-1), 499)
        logprobs, entropy = log_p[row, token], -(p * log_p).sum(-1)[row]
    batch = {
        "rollout_logprobs": logprobs,
        "loss_mask": np.ones(count, bool),
        "version": np.zeros(count, np.int32),
        "seq": np.arange(count),
        "replica": np.arange(count) % replicas,
    }
    return surprise({"logprobs": logprobs, "entropy": entropy}, batch, 0, replicas)


@pytest.mark.parametrize("kind", ["flat", "common", "peaked", "two levels"])
def test_honest_distributions_stay_far_below_the_limit(kind: str) -> None:
    """Also where all of the variance is in tokens that hardly ever come."""
    random = np.random.default_rng(7)
    for run_number in range(20):
        check = SamplingCheck(8.0 if kind == "two levels" else 6.0)
        for _ in range(40):
            count = int(random.integers(16, 400))
            check.judge(sampled(random, kind, count, 1 + run_number % 3), {}, 4)


def test_rejected_groups_allow_what_their_choice_can_explain() -> None:
    """Half of the groups are kept: 0.7 nats over 16 tokens hide 0.3 deviations."""
    x = np.full(4000, 0.1)
    x[::2] = -0.1
    biased = x + 0.02
    found = {
        "sampling/surprise": Metric(biased.sum(), 4000),
        "sampling/variance": Metric((biased**2).sum(), 4000),
        "sampling/square_max": Metric((biased**2).max(), how="max"),
        "sampling/entropy": Metric(4000.0, 4000),
        "sampling/kl": Metric(0.0, 4000),
    }
    rejected = {"sampled/rejected_groups": Metric(250.0, how="sum")}
    SamplingCheck(8.0).judge(found, rejected, 250)
    with pytest.raises(WeightSyncError, match="more surprising"):
        SamplingCheck(8.0).judge(found, {}, 250)


def test_a_step_in_which_nothing_was_sampled_is_judged() -> None:
    """The metrics of an environment and of replicas come all the same."""
    random = np.random.default_rng(0)
    found = sampled(random, "flat", 100, 1)
    plain, other = SamplingCheck(8.0), SamplingCheck(8.0)
    assert other.judge(found, {"environment/failed": Metric(0.0)}, 4) == plain.judge(found, {}, 4)


def test_a_loss_without_entropies_says_nothing() -> None:
    assert surprise({"logprobs": np.zeros(2)}, {"rollout_logprobs": np.zeros(2)}, 0) == {}
    assert SamplingCheck(8.0).judge({}, {}, 4) == {}


def test_sums_merge_over_micro_batches() -> None:
    parts = [sampled(np.random.default_rng(i), "common", 100 * i) for i in (1, 2)]
    assert merge(parts)["sampling/surprise"].weight == 300


def hidden(random: np.random.Generator, how: str, count: int) -> Metrics:
    """Return metrics of a step whose tokens are drawn from an altered distribution."""
    logits = random.normal(0, 2.0, (32, 300))
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    drawn = np.stack([altered(row, how) for row in log_p])
    drawn /= drawn.sum(-1, keepdims=True)
    row = random.integers(0, 32, count)
    token = (drawn[row].cumsum(-1) < random.random(count)[:, None]).sum(-1).clip(0, 299)
    logprobs, entropy = log_p[row, token], -(np.exp(log_p) * log_p).sum(-1)[row]
    batch = {
        "rollout_logprobs": logprobs,
        "loss_mask": np.ones(count, bool),
        "version": np.zeros(count, np.int32),
    }
    return surprise({"logprobs": logprobs, "entropy": entropy}, batch, 0)


def altered(log_p: np.ndarray, how: str) -> np.ndarray:
    if how == "top-p":
        return np.exp(nucleus(log_p, 0.95))
    if how == "top-k":
        return np.exp(np.where(log_p >= np.sort(log_p)[-50], log_p, -np.inf))
    if how == "min-p":
        return np.exp(np.where(log_p >= log_p.max() + np.log(0.05), log_p, -np.inf))
    if how == "penalty":
        return np.exp(np.where(np.argsort(np.argsort(-log_p)) < 10, log_p - 0.2, log_p))
    return np.exp(log_p * {"warm": 1 / 1.05, "cold": 1 / 0.95, "honest": 1.0}[how])


@pytest.mark.parametrize("how", ["top-p", "top-k", "min-p", "penalty", "warm", "cold"])
def test_what_is_hidden_is_found_within_a_window(how: str) -> None:
    """A temperature that is 5 % off takes the most tokens: fewer than 50,000."""
    random, check = np.random.default_rng(11), SamplingCheck(8.0)
    more = how in ("penalty", "warm")
    steps = [hidden(random, how, 1000) for _ in range(50)]
    with pytest.raises(WeightSyncError, match="more surprising" if more else "less surprising"):
        any(check.judge(step, {}, 4) == {} for step in steps)


def test_rounding_of_a_flat_distribution_is_no_deviation() -> None:
    """All tokens are as likely: what is left of x is the same rounding in each."""
    x = np.full(20_000, 2e-6)
    found = {
        "sampling/surprise": Metric(x.sum(), len(x)),
        "sampling/variance": Metric((x * x).sum(), len(x)),
        "sampling/square_max": Metric((x * x).max(), how="max"),
        "sampling/entropy": Metric(5.0 * len(x), len(x)),
        "sampling/kl": Metric(0.0, len(x)),
    }
    SamplingCheck(8.0).judge(found, {}, 4)
