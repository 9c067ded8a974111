"""Check what every algorithm must do: losses are per token, of one unit, and blind to
masked tokens and micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from coupler.batch import Batch
from coupler.errors import CouplerError
from coupler.interfaces import Aggregation, Algorithm, Columns
from coupler.loop.loss_weight import prepare
from coupler.metrics import Metrics, merge, read, values
from coupler.system.imports import resolve
from coupler.testing import expect, toy
from coupler.testing.cases import RAGGED, make_batch, poisoned
from coupler.testing.left_alone import generators
from coupler.testing.reference import Reference, torch_columns
from coupler.testing.subject import Subject
from coupler.worker.train_infer import checked_loss

# Columns that core can add, and how far they are from the rollout's log-probs.
COLUMNS = {"ref_logprobs": 0.2, "old_logprobs": 0.1, "values": 0.3, "teacher_logprobs": 0.4}
# Others that core can add.
OTHERS = ("greedy_reward", "sum_pi_squared", "turn", "anchor", "data_source", "demonstration")
TOP = "teacher_top_logprobs"
# Probabilities of a teacher's most likely tokens, before noise.
LIKELY = np.log([0.4, 0.2, 0.1])
# Columns of preference rows, which an algorithm with such rows reads.
PREFERENCES = ("chosen", "margin", "desirable", "mismatched")
ALWAYS = (
    "tokens",
    "loss_mask",
    "version",
    "rollout_logprobs",
    "temperature",
    "reward",
    "group",
    "trajectory",
    "unit",
)


class CriticOf(Algorithm):
    """Expose the loss of an algorithm's critic on the batch of the trainer."""

    def __init__(self, policy: Algorithm) -> None:
        super().__init__(policy.config)
        self.policy: Algorithm = policy
        self.value_loss: Algorithm = resolve(policy.critic)(policy.config)
        self.needs, self.always = policy.needs, policy.always
        self.critic, self.want = policy.critic, self.value_loss.want
        self.aggregation, self.constant = self.value_loss.aggregation, self.value_loss.constant

    def advantages(self, batch: Batch) -> Batch:
        return self.policy.advantages(batch)

    def loss(self, out: Columns, batch: Columns) -> tuple[Any, Metrics]:
        return self.value_loss.loss(out, batch)

    def keep(self, group: Batch) -> bool:
        return self.policy.keep(group)


@pytest.fixture(params=["policy", "critic"])
def algorithm(request: pytest.FixtureRequest, algorithm_subject: Subject) -> Algorithm:
    policy = algorithm_subject.backend.load()(algorithm_subject.config())
    if request.param == "policy":
        return policy
    if not policy.critic:
        pytest.skip(f"{algorithm_subject} has no critic")
    return CriticOf(policy)


def sampled(reference: Reference) -> Batch:
    """Make two groups of four as the sampler writes them, with every column that core
    can add.
    """
    batch = make_batch(reference, RAGGED)
    random, mask = np.random.default_rng(1), batch["loss_mask"]
    near = {
        n: batch["rollout_logprobs"] + random.normal(0, d, batch.num_tokens)
        for n, d in COLUMNS.items()
    }

    # Rows begin with what was shown, and are shown more in the midst of their tokens.
    begins = mask & ~np.append(False, mask[:-1])
    turn = np.cumsum(begins) - batch.spread(np.cumsum(begins)[batch.starts[:-1]]) - 1
    squares = np.exp(2 * np.minimum(batch["rollout_logprobs"], 0)) + 0.01
    return batch.with_tokens(
        **{n: np.where(mask, c, 0).astype(np.float32) for n, c in near.items()},
        teacher_top_logprobs=(LIKELY - random.random((batch.num_tokens, 3))).astype(np.float32),
        sum_pi_squared=np.where(mask, squares, 0).astype(np.float32),
        turn=np.where(mask, turn, -1).astype(np.int32),
        anchor=np.where(mask, 5 - turn, -1),
    ).with_seqs(
        reward=np.array([0, 1, 1, 0.5, 2, 0, 0, 1], np.float32),
        greedy_reward=np.repeat(np.array([0.5, 1], np.float32), 4),
        data_source=np.full(len(batch), "sums"),
        demonstration=np.arange(len(batch)) == 3,
    )


@pytest.fixture
def plain(reference_of: Callable[[str], Reference], algorithm_subject: Subject) -> Batch:
    return fitting(sampled(reference_of("toy")), algorithm_subject)


def fitting(sampled: Batch, algorithm_subject: Subject) -> Batch:
    """Return the batch of the sampler, or rows of preferences as their packing makes
    them.
    """
    if algorithm_subject.has("rows:pair"):
        pair = np.arange(len(sampled)) // 2
        return sampled.with_seqs(
            unit=pair,
            trajectory=pair,
            chosen=np.arange(len(sampled)) % 2 == 0,
            margin=(pair / 4).astype(np.float32),
        )

    if algorithm_subject.has("rows:select"):
        # Groups of two, of which it can leave out none.
        return sampled.with_seqs(
            group=np.arange(len(sampled)) // 2,
            reward=np.array([0, 1, 1, 0.5, 2, 0, 0, 1], np.float32),
        )
    if algorithm_subject.has("rows:label"):
        labels = np.array([True, False, False, True, True, True, False, False])
        return sampled.with_seqs(desirable=labels, mismatched=np.zeros(len(sampled), bool))
    return sampled


def given(batch: Batch, needs: frozenset[str]) -> Batch:
    """Keep what an algorithm gets that declares these needs."""
    return batch.select(*ALWAYS, *filter(batch.has, PREFERENCES), *needs)


def main_output(algorithm: Algorithm) -> str:
    """Name the output that the loss must have a gradient by."""
    wanted = [output.name for output in algorithm.want]
    return next((name for name in ("values", "top_logprobs") if name in wanted), "logprobs")


def ready(algorithm: Algorithm, plain: Batch) -> Batch:
    """Return the batch as an engine gets it: only declared columns, advantages and
    weights.
    """
    return prepare(algorithm.advantages(given(plain, algorithm.needs)), algorithm)


def under(mask: np.ndarray, column: np.ndarray, filler: float) -> np.ndarray:
    """Return a column [T, ...] with ``filler`` outside ``mask``."""
    return np.where(mask.reshape(-1, *[1] * (column.ndim - 1)), column, filler)


class Evaluated:
    """Evaluate a loss and its gradient by every wanted output, all [T] float64."""

    def __init__(
        self,
        subject: Subject,
        algorithm: Algorithm,
        batch: Batch,
        filler: float = 0.0,
        noise: float = 1.0,
    ) -> None:
        mask = batch["loss_mask"]
        # The noise follows its token when rows move.
        noises = noise * np.sin(batch["tokens"].astype(np.float64))
        near = {
            "logprobs": batch["rollout_logprobs"] + 0.3 * noises,
            "entropy": 2 + noises,
            "values": noises,
            "top_logprobs": LIKELY + 0.2 * np.sin(noises[:, None] + np.arange(3)),
        }

        inputs = {o.name: under(mask, near[o.name], filler) for o in algorithm.want}
        loss = checked_loss(algorithm, None)
        evaluate = self._in_numpy if subject.toy else self._in_torch
        token_loss, metrics = evaluate(loss, inputs, batch)
        self.loss: np.ndarray = np.where(mask, token_loss, 0)
        self.metrics: Metrics = read(metrics)

    def _in_numpy(
        self, loss: Any, inputs: dict[str, np.ndarray], batch: Batch
    ) -> tuple[np.ndarray, Metrics]:
        columns = toy.columns_of(batch)
        self.grads = toy.slopes(loss, inputs, columns)
        return loss(inputs, columns)

    def _in_torch(
        self, loss: Any, inputs: dict[str, np.ndarray], batch: Batch
    ) -> tuple[np.ndarray, Metrics]:
        import torch

        out = {
            name: torch.from_numpy(np.array(value)).requires_grad_()
            for name, value in inputs.items()
        }
        columns = torch_columns(batch)
        token_loss, metrics = loss(out, columns)
        torch.where(columns["loss_mask"], token_loss * columns["loss_weight"], 0.0).sum().backward()
        self.grads = {
            n: np.zeros(v.shape) if v.grad is None else v.grad.numpy() for n, v in out.items()
        }
        return token_loss.detach().numpy(), metrics


def same(got: Evaluated, want: Evaluated, rows: np.ndarray | slice = slice(None)) -> None:
    np.testing.assert_allclose(got.loss, want.loss[rows], rtol=1e-9, atol=1e-12)
    for name, grad in want.grads.items():
        np.testing.assert_allclose(got.grads[name], grad[rows], rtol=1e-6, atol=1e-9, err_msg=name)


def token_rows(batch: Batch, rows: list[int]) -> np.ndarray:
    return np.concatenate([np.arange(batch.starts[i], batch.starts[i + 1]) for i in rows]).astype(
        int
    )


def test_it_declares_what_core_knows(algorithm_subject: Subject, algorithm: Algorithm) -> None:
    """Needs are known before the algorithm is imported: its capabilities
    ``needs:<column>`` name the same columns.
    """
    expect.holds(
        algorithm.always <= algorithm.needs <= {*OTHERS, *COLUMNS, TOP},
        f"always within needs, and needs within {sorted([*OTHERS, *COLUMNS, TOP])}",
        (sorted(algorithm.always), sorted(algorithm.needs)),
    )
    declared = {
        c
        for c in algorithm_subject.backend.capabilities_of(algorithm_subject.config())
        if c.startswith("needs:")
    }
    expect.same(
        declared,
        {f"needs:{column}" for column in algorithm.needs},
        "the capabilities needs:*, by the columns that it needs,",
    )

    expect.holds(
        algorithm.aggregation in list(Aggregation), "an aggregation of core", algorithm.aggregation
    )
    expect.holds(
        algorithm.constant >= 1 or algorithm.aggregation is not Aggregation.CONSTANT,
        "a constant of at least 1",
        algorithm.constant,
    )
    expect.same(
        bool(algorithm.critic),
        "values" in algorithm.needs,
        "having a critic, by whether it needs values,",
    )
    expect.holds(
        any(output.name == main_output(algorithm) for output in algorithm.want),
        f"{main_output(algorithm)} among the outputs that it wants",
        algorithm.want,
    )


def test_the_loss_is_per_token_and_finite(
    algorithm_subject: Subject, algorithm: Algorithm, plain: Batch
) -> None:
    """The loss reads declared columns only. Some token has a gradient, and none outside
    the mask does.
    """
    batch = ready(algorithm, plain)
    found = Evaluated(algorithm_subject, algorithm, batch)
    expect.same(found.loss.shape, (batch.num_tokens,), "the shape of the loss")
    expect.finite({"the loss": found.loss, **found.grads}, "an ordinary batch")
    assert all(np.isfinite(value) for value in values(found.metrics).values()), values(
        found.metrics
    )

    expect.moves(
        {main_output(algorithm): found.grads[main_output(algorithm)]},
        "a gradient by its main output",
    )
    expect.zero(
        {name: grad[~batch["loss_mask"]] for name, grad in found.grads.items()}, "outside the mask"
    )


def test_old_logprobs_may_be_left_out(
    algorithm_subject: Subject, algorithm: Algorithm, plain: Batch
) -> None:
    """A step that is the only one of its batch gets no old log-probs, which are then
    its own.

    Nor do :meth:`Algorithm.advantages` get any, unless the algorithm needs them always.
    """
    if "old_logprobs" not in algorithm.needs:
        pytest.skip("it does not need them")
    needs = algorithm.needs - ({"old_logprobs"} - algorithm.always)
    batch = algorithm.advantages(given(plain, needs)).without("old_logprobs")
    batch = prepare(batch, algorithm)
    found = Evaluated(algorithm_subject, algorithm, batch)
    expect.finite({"the loss": found.loss}, "a batch without old_logprobs")
    expect.moves(
        {main_output(algorithm): found.grads[main_output(algorithm)]},
        "a gradient without old_logprobs",
    )


def test_values_under_the_mask_change_nothing(
    algorithm_subject: Subject, algorithm: Algorithm, plain: Batch
) -> None:
    """NaN there leaves advantages, loss, metrics and gradient bit-identical."""
    want = Evaluated(algorithm_subject, algorithm, ready(algorithm, plain))
    mask = plain["loss_mask"]
    dirty = algorithm.advantages(poisoned(given(plain, algorithm.needs)))
    batch = ready(algorithm, plain)

    for name, column in algorithm.advantages(given(plain, algorithm.needs)).tokens.items():
        np.testing.assert_array_equal(dirty[name][mask], column[mask], err_msg=name)
    for filler in (0.0, float("nan")):
        got = Evaluated(algorithm_subject, algorithm, poisoned(batch), filler)
        np.testing.assert_array_equal(got.loss, want.loss)
        for name, grad in want.grads.items():
            np.testing.assert_array_equal(got.grads[name], grad, err_msg=name)
        expect.same(
            values(got.metrics), values(want.metrics), "the metrics with NaN under the mask"
        )


def test_order_changes_nothing(
    algorithm_subject: Subject, algorithm: Algorithm, plain: Batch
) -> None:
    """Neither advantages nor losses depend on the positions of rows."""
    order = [6, 1, 4, 0, 7, 3, 2, 5]
    rows = token_rows(plain, order)
    want, got = ready(algorithm, plain), ready(algorithm, plain.take(order))
    for name, column in want.tokens.items():
        if column.dtype.kind == "f":
            np.testing.assert_allclose(got[name], column[rows], rtol=1e-6, atol=1e-7, err_msg=name)
    same(
        Evaluated(algorithm_subject, algorithm, want.take(order)),
        Evaluated(algorithm_subject, algorithm, want),
        rows,
    )


@pytest.mark.parametrize("size", [1, 2, 4])
def test_micro_batches_change_nothing(
    algorithm_subject: Subject, algorithm: Algorithm, plain: Batch, size: int
) -> None:
    """A part's losses are those of the whole, and metrics merge to its metrics."""
    batch = ready(algorithm, plain)
    if len(batch) // len(np.unique(batch["unit"])) > size:
        pytest.skip("rows of a unit stay together")
    whole = Evaluated(algorithm_subject, algorithm, batch)
    parts = []

    for start in range(0, len(batch), size):
        rows = list(range(start, start + size))
        parts.append(Evaluated(algorithm_subject, algorithm, batch.take(rows)))
        same(parts[-1], whole, token_rows(batch, rows))
    expect.numbers(
        values(merge(p.metrics for p in parts)),
        values(whole.metrics),
        "the merged metrics of micro-batches",
        rel=1e-6,
    )


def test_micro_batches_of_whole_units_change_nothing(
    algorithm_subject: Subject, algorithm: Algorithm, plain: Batch
) -> None:
    """Trajectories have several rows. Only an algorithm with ``whole_units`` may read
    one row for the loss of another.
    """
    trajectory = np.array([7, 7, 3, 9, 4, 4, 4, 1])
    siblings = plain.with_seqs(
        trajectory=trajectory,
        unit=trajectory,
        reward=np.array([0, 0, 1, 0.5, 2, 2, 2, 1], np.float32),
    )
    batch = ready(algorithm, siblings)
    whole = Evaluated(algorithm_subject, algorithm, batch)
    parts = []

    for unit in np.unique(batch["unit"]):
        rows = np.flatnonzero(batch["unit"] == unit).tolist()
        parts.append(Evaluated(algorithm_subject, algorithm, batch.take(rows)))
        same(parts[-1], whole, token_rows(batch, rows))
    expect.numbers(
        values(merge(p.metrics for p in parts)),
        values(whole.metrics),
        "the merged metrics of units",
        rel=1e-6,
    )


@pytest.mark.parametrize("case", ["no-sequence", "no-valid-token"])
def test_an_empty_micro_batch_passes(
    algorithm_subject: Subject, algorithm: Algorithm, plain: Batch, case: str
) -> None:
    """Ranks run as many micro-batches as the others, if need be empty ones. Metrics
    stay those of the rest.
    """
    batch = ready(algorithm, plain)
    if case == "no-sequence":
        empty = batch.take([])
    else:
        nothing = np.zeros(batch.num_tokens, bool)
        empty = batch.with_tokens(
            loss_mask=nothing, loss_weight=np.zeros(batch.num_tokens, np.float32)
        )

    found = Evaluated(algorithm_subject, algorithm, empty)
    expect.zero({"the loss": found.loss, **found.grads}, "of a batch without valid tokens")
    whole = Evaluated(algorithm_subject, algorithm, batch).metrics
    for order in ([whole, found.metrics], [found.metrics, whole]):
        expect.numbers(
            values(merge(order)),
            values(whole),
            "the metrics, with those of an empty batch",
            rel=1e-6,
        )


def test_groups_come_from_their_column(algorithm: Algorithm, plain: Batch) -> None:
    """Two groups of the same prompt stay two, and a renamed group is the same group."""
    one_prompt = plain.with_tokens(tokens=np.full(plain.num_tokens, 7, np.int32))
    renamed = plain.with_seqs(group=1000 - 7 * plain["group"])
    want = ready(algorithm, plain)
    for other in (one_prompt, renamed):
        got = ready(algorithm, other)
        for name in got.tokens.keys() - {"tokens"}:
            np.testing.assert_array_equal(got[name], want[name], err_msg=name)


def test_degenerate_rewards_are_finite(
    algorithm_subject: Subject, algorithm: Algorithm, plain: Batch
) -> None:
    """All rewards of a group are equal, and one sequence has no valid token."""
    for rewards in (np.zeros(8), np.ones(8), np.full(8, -1e4)):
        batch = ready(algorithm, plain.with_seqs(reward=rewards.astype(np.float32)))
        floats = {n: c for n, c in batch.tokens.items() if c.dtype.kind == "f"}
        expect.finite(floats, f"a batch with rewards {rewards}")
        found = Evaluated(algorithm_subject, algorithm, batch)
        expect.finite({"the loss": found.loss, **found.grads}, f"a batch with rewards {rewards}")


def test_keep_judges_one_group(algorithm: Algorithm, plain: Batch) -> None:
    kept = algorithm.keep(plain.take([0, 1, 2, 3]))
    expect.same(type(kept), bool, "the type of what keep() returns")


def test_the_input_is_left_alone(
    algorithm_subject: Subject, algorithm: Algorithm, plain: Batch
) -> None:
    """Columns are shared between batches and processes: nothing writes into them."""
    before = {name: plain[name].copy() for name in (*plain.tokens, *plain.seqs)}
    Evaluated(algorithm_subject, algorithm, ready(algorithm, plain))
    for name, column in before.items():
        np.testing.assert_array_equal(plain[name], column, err_msg=name)


# --- groups, state and extremes


def grouped(plain: Batch, sizes: tuple[int, ...], numbers: tuple[int, ...]) -> Batch:
    """Make groups of these sizes and numbers of the first rows of ``plain``."""
    rows = np.resize(np.arange(len(plain)), sum(sizes))
    rewards = np.resize([0, 2, 1, 3, 1], len(rows))
    return plain.take(rows).with_seqs(
        group=np.repeat(np.array(numbers, np.int64), sizes),
        reward=rewards.astype(np.float32),
        trajectory=np.arange(len(rows)),
        unit=np.arange(len(rows)),
    )


def judged(algorithm: Algorithm, batch: Batch) -> np.ndarray:
    """Return the [T] advantages of a batch as the sampler makes it."""
    done = algorithm.advantages(given(batch, algorithm.needs))
    if not done.has("advantages"):
        pytest.skip("it adds no advantages")
    return done["advantages"]


def test_groups_may_have_any_number_and_size(algorithm: Algorithm, plain: Batch) -> None:
    """Their numbers count the prompts of a run. Invalid rewards make them smaller."""
    sizes = (3, 2, 5, 4)
    want = judged(algorithm, grouped(plain, sizes, (0, 1, 2, 3)))
    expect.finite({"advantages": want}, f"groups of {sizes} sequences")
    for numbers in ((0, 256, 512, 768), (9, 7, 2**31, 2**40)):
        got = judged(algorithm, grouped(plain, sizes, numbers))
        off = float(np.abs(got - want).max())
        expect.below(off, 1e-6, f"the difference of advantages where groups are called {numbers}")


def test_a_group_of_one_is_finite_or_refused(algorithm: Algorithm, plain: Batch) -> None:
    """Nothing can be compared with a sequence that is alone."""
    try:
        found = judged(algorithm, grouped(plain, (1, 3, 1), (0, 1, 2)))
    except CouplerError:
        return
    expect.finite({"advantages": found}, "groups of 1, 3 and 1 sequences")


def test_a_group_is_judged_by_itself(
    algorithm_subject: Subject, algorithm: Algorithm, plain: Batch
) -> None:
    """Other rewards in the first group move the advantages of all others alike, as
    whitening does, or not at all.
    """
    if algorithm_subject.has("rows:select"):
        pytest.skip("its rows are those of the groups that it selects from")
    sizes = (4, 4, 4)
    before = grouped(plain, sizes, (0, 1, 2))
    other = before["reward"].copy()
    other[:4] = [7, 0, 3, 1]
    rows = [token_rows(before, list(range(4 * g, 4 * g + 4))) for g in range(3)]
    old, new = judged(algorithm, before), judged(algorithm, before.with_seqs(reward=other))

    mask = before["loss_mask"]
    second, third = (r[mask[r]] for r in rows[1:])
    x, y = old[second].astype(np.float64), new[second].astype(np.float64)
    slope = np.ptp(y) / np.ptp(x) if np.ptp(x) > 1e-9 else 1.0
    shift = y.mean() - slope * x.mean()
    off = float(np.abs(slope * old[third] + shift - new[third]).max())
    expect.below(
        off, 1e-4, "how the third group moves apart from the second by the first's rewards"
    )


def test_advantages_keep_the_batch(
    algorithm_subject: Subject, algorithm: Algorithm, plain: Batch
) -> None:
    """They add columns of float32, and every other one stays as the sampler made it.

    An algorithm that selects rows names their units anew.
    """
    own = {"unit", "trajectory"} if algorithm_subject.has("rows:select") else set()
    before = given(plain, algorithm.needs)
    done = algorithm.advantages(before)
    expect.same(done.lengths.tolist(), before.lengths.tolist(), "the lengths of the rows")
    for name in (*before.tokens, *before.seqs):
        expect.holds(done.has(name), f"the column {name} to stay, it is gone")
        if name not in {"reward", *own}:  # A reward may be shaped.
            np.testing.assert_array_equal(done[name], before[name], err_msg=name)
    for name in done.tokens.keys() - before.tokens.keys():
        expect.same(done[name].dtype, np.dtype(np.float32), f"the dtype of {name}")


def test_nothing_is_kept_between_steps(
    algorithm_subject: Subject, algorithm: Algorithm, plain: Batch
) -> None:
    """The same batch gives the same numbers after another one, and draws from no
    global generator.
    """
    before = generators()
    other = plain.take([1, 0, 3, 2]).with_seqs(reward=np.array([5, 1, 0, 2], np.float32))
    wanted = ready(algorithm, plain)
    want = Evaluated(algorithm_subject, algorithm, wanted)
    kept = [algorithm.keep(plain.take([0, 1, 2, 3])) for _ in range(2)]
    for batch in (other, plain):
        again = ready(algorithm, batch)
        found = Evaluated(algorithm_subject, algorithm, again)
    kept += [algorithm.keep(plain.take([0, 1, 2, 3])) for _ in range(4)]

    for name, column in wanted.tokens.items():
        np.testing.assert_array_equal(again[name], column, err_msg=f"{name}, the second time")
    same(found, want)
    expect.alike(kept, "what keep() says of one group, again and again,")
    expect.same(generators(), before, "the states of global random generators")


def test_equal_tokens_pull_alike(
    algorithm_subject: Subject, algorithm: Algorithm, plain: Batch
) -> None:
    """Each token pulls by its ``loss_weight`` alone, where the policy is the rollout's
    and all advantages are equal. A loss that divides by lengths itself does so twice.
    """
    if main_output(algorithm) == "values":
        pytest.skip("it pulls by the error of values")
    if algorithm.components:
        pytest.skip("its parts pull by weights of their own")
    mask = plain["loss_mask"]
    columns = {name: plain["rollout_logprobs"] for name in COLUMNS if name != "values"}
    ones = np.where(mask, 1, 0).astype(np.float32)
    batch = ready(algorithm, plain.with_tokens(**columns))
    if batch.has("advantages"):
        batch = batch.with_tokens(advantages=ones)

    found = Evaluated(algorithm_subject, algorithm, batch, noise=0.0)
    pulls = found.grads["logprobs"][mask] / batch["loss_weight"][mask]
    # Rows that are not preferred pull the other way.
    pulls = np.abs(pulls) if batch.has("chosen") or batch.has("desirable") else pulls
    off = float(np.ptp(pulls) / np.abs(pulls).max())
    expect.below(off, 1e-4, "the spread of the gradients of equal tokens, as a share,")


@pytest.mark.parametrize("scale", [1e-6, 1e4])
def test_rewards_of_any_size_are_finite(
    algorithm_subject: Subject, algorithm: Algorithm, plain: Batch, scale: float
) -> None:
    rewards = np.array([0, 1, -1, 0.5, 1, 1, 1, 0.25], np.float32) * np.float32(scale)
    batch = ready(algorithm, plain.with_seqs(reward=rewards))
    expect.finite(
        {n: c for n, c in batch.tokens.items() if c.dtype.kind == "f"}, f"rewards up to {scale:g}"
    )
    found = Evaluated(algorithm_subject, algorithm, batch)
    expect.finite({"the loss": found.loss, **found.grads}, f"rewards up to {scale:g}")


def test_keep_leaves_any_group_alone(algorithm: Algorithm, plain: Batch) -> None:
    """Also where all rewards are equal."""
    for rewards in ([0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 2, 3]):
        group = plain.take([0, 1, 2, 3]).with_seqs(reward=np.array(rewards, np.float32))
        before = {name: group[name].copy() for name in (*group.tokens, *group.seqs)}
        kept = algorithm.keep(group)
        expect.same(type(kept), bool, f"the type of what keep() returns for rewards {rewards}")
        for name, column in before.items():
            np.testing.assert_array_equal(group[name], column, err_msg=f"keep() wrote {name}")
