"""Every preset of ``algorithm`` that is GRPO with other switches, in a whole run."""

from __future__ import annotations

from collections import Counter
from math import isfinite
from pathlib import Path

import numpy as np
import pytest
from job_run import arguments, metrics, run, write_inputs

from coupler.batch import Batch
from coupler.cli import main
from coupler.testing.models import EOS, read_tensors, rewrite, write_qwen2
from coupler.testing.reference import TransformersReference

PARTS = """
def graded(completion, answer):
    parts = {"length": len(completion) / 10, "letters": len(set(completion)) / 5}
    return {"reward": sum(parts.values()), **parts}
"""
# The options of each preset that a run of two steps needs to show it.
PRESETS: dict[str, tuple[str, ...]] = {
    "gspo": (),
    "cispo": (),
    "sapo": (),
    "opo": (),
    "maxrl": (),
    "reinforce_plus_plus_baseline": (),
    "reinforce_plus_plus": (),
    "clip_cov": ("algorithm.covariance_low=0.1", "algorithm.covariance_share=0.1"),
    "kl_cov": ("algorithm.covariance_share=0.1",),
    "gmpo": ("algorithm.log_mismatch=true",),
    "dppo": ("algorithm.reject.sequence_mean_k3=0.05",),
    "pass_at_k": (),
    "gdpo": ("algorithm.part_weights.letters=0.5",),
    "gpg": (),
    "luspo": ("algorithm.correction_cap=2", "algorithm.correction_normalize=true"),
    "topr": (),
    "remax": ("samples_per_prompt=1", "algorithm.whiten=true"),
    "otb": (),
    "kpop": (),
    "rae": ("samples_per_prompt=1",),
    "gigpo": ("environment=played",),
}
REPORTED = {
    "clip_cov": {"covariance_marked"},
    "kl_cov": {"covariance_marked"},
    "gmpo": {"mismatch/ess", "mismatch/ess_sequence", "mismatch/ppl_train", "clip_low"},
    "dppo": {"rejected", "mismatch/chi2_sequence", "clip_high"},
    "kpop": {"rejected"},
    "rae": {"baseline/moving_mean"},
    "gdpo": {"reward_parts/length", "reward_parts/letters"},
    "luspo": {"correction_capped", "mismatch/weight", "clip_high"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen2(tmp_path_factory.mktemp("models") / "model", tied=True)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install ``environment=played``."""
    monkeypatch.setenv("COUPLER_PLUGINS", "played_environments")


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_trains(tmp_path: Path, model: Path, played: None, preset: str) -> None:
    """With two optimizer steps for each batch, of which the second has ratios off 1."""
    options = [*PRESETS[preset]]
    if preset == "gdpo":
        (tmp_path / "parts.py").write_text(PARTS)
        options.append(f"reward.target={tmp_path / 'parts.py'}:graded")
    log = metrics(
        run(
            "train",
            model,
            tmp_path / "run",
            f"algorithm={preset}",
            "steps=2",
            "optimizer_steps_per_batch=2",
            *options,
        )
    )
    assert all(isfinite(step["policy_loss"]) for step in log[1:])
    # A step whose rewards are equal moves nothing.
    assert max(step["train/grad_norm"] for step in log[1:]) > 0
    assert any(step["ratio_mean"] != 1 for step in log[1:])
    for name in REPORTED.get(preset, ()):
        assert all(isfinite(step[name]) for step in log[1:]), name


@pytest.mark.parametrize(("temperature", "equal"), [(0.001, True), (1.0, False)])
def test_remax_compares_with_a_greedy_episode(
    tmp_path: Path, model: Path, temperature: float, equal: bool
) -> None:
    """Samples of almost no temperature are greedy ones, and have their reward."""
    folder = run(
        "train",
        model,
        tmp_path / "run",
        "algorithm=remax",
        "algorithm.kl=none",
        "steps=1",
        "record.every_steps=1",
        f"sampling.temperature={temperature}",
    )
    batch = Batch.load(folder / "record" / "step_1" / "batch.npz")
    ahead = batch["reward"] - batch["greedy_reward"]
    assert len(set(batch["greedy_reward"])) <= len(set(batch["group"]))
    assert bool((ahead == 0).all()) is equal
    assert metrics(folder)[1]["advantages/mean"] == pytest.approx(
        np.average(ahead, weights=batch.sum_by_sequence(batch["loss_mask"])), abs=1e-6
    )


def test_remax_refuses_rewards_of_whole_groups(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "together.py").write_text(
        "def scores(completions, answer):\n    return [float(len(c)) for c in completions]\n"
    )
    reward = f"reward.target={tmp_path / 'together.py'}:scores"
    write_inputs(tmp_path)
    given = arguments("train", model, tmp_path, tmp_path / "run")
    assert main([*given, "algorithm=remax", "algorithm.kl=none", reward]) == 2
    assert "reward.target scores all completions of a prompt together" in capsys.readouterr().err


@pytest.mark.parametrize("steps", [1, 2])
def test_otb_weighs_by_what_the_engine_computes(tmp_path: Path, model: Path, steps: int) -> None:
    """The sums are those of the whole distribution, whatever number of steps a batch
    has.
    """
    folder = run(
        "train",
        model,
        tmp_path / "run",
        "algorithm=otb",
        "steps=1",
        "record.every_steps=1",
        f"optimizer_steps_per_batch={steps}",
    )
    batch = Batch.load(folder / "record" / "step_1" / "batch.npz")
    mask, squares = batch["loss_mask"], batch["sum_pi_squared"]
    p = np.exp(batch["old_logprobs"][mask].astype(np.float64))
    assert not squares[~mask].any() and (squares[mask] >= p**2).all() and squares.max() <= 1
    want = TransformersReference(model).outputs(batch)["sum_pi_squared"]
    np.testing.assert_allclose(squares, want, rtol=1e-4, atol=1e-7)

    energy = np.zeros(batch.num_tokens)
    energy[mask] = 1 - 2 * p + want[mask]
    places = np.split(np.arange(batch.num_tokens), batch.starts[1:-1])
    rows = [of_row[mask[of_row]] for of_row in places]
    for at in range(max(map(len, rows))):
        for group in set(batch["group"]):
            there = [i for i in np.flatnonzero(batch["group"] == group) if len(rows[i]) > at]
            weights = [energy[rows[i][: at + 1]].sum() for i in there]
            rewards = batch["reward"][there].astype(np.float64)
            baseline = (rewards * weights).sum() / max(sum(weights), 1e-12)
            found = [batch["advantages"][rows[i][at]] for i in there]
            np.testing.assert_allclose(found, rewards - baseline, atol=2e-4)


def test_otb_refuses_an_engine_without_sums_of_squares(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_inputs(tmp_path)
    given = arguments("train", model, tmp_path, tmp_path / "run")
    given = [option for option in given if not option.startswith("engine")]
    assert main(["plan", *given[1:], "algorithm=otb", "engine=toy"]) == 2
    said = capsys.readouterr().err
    assert "reads sum_pi_squared, which engine=toy does not compute" in said


@pytest.fixture(scope="module")
def brief(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that often ends its turn: all hidden states lean to one side, as the row
    of that token does.
    """
    folder = write_qwen2(tmp_path_factory.mktemp("models") / "brief", tied=False)
    tensors = read_tensors(folder)
    tensors["model.embed_tokens.weight"][:, 0] += 4
    tensors["lm_head.weight"][EOS, 0] = 1.7
    return rewrite(folder, folder, tensors)


def of_gigpo(model: Path, run_dir: Path, *options: str) -> Batch:
    """Run a step without deviations, for plain numbers, and return its batch."""
    folder = run(
        "train",
        model,
        run_dir,
        "algorithm=gigpo",
        "algorithm.kl=none",
        "algorithm.scale_by_std=false",
        "environment=played",
        "steps=1",
        "record.every_steps=1",
        "sampling.max_tokens=24",
        *options,
    )
    return Batch.load(folder / "record" / "step_1" / "batch.npz")


def test_gigpo_compares_turns_that_were_shown_the_same(
    tmp_path: Path, brief: Path, played: None
) -> None:
    """An episode has up to three turns. The first is shown the prompt, and the others
    their number.
    """
    batch = of_gigpo(brief, tmp_path / "run")
    mask, turn, anchor = batch["loss_mask"], batch["turn"], batch["anchor"]
    assert (turn[~mask] == -1).all() and (anchor[~mask] == -1).all()
    shown = set(zip(anchor[mask].tolist(), turn[mask].tolist(), strict=True))
    assert Counter(t for _, t in shown) == {0: len(set(batch["row"])), 1: 1, 2: 1}

    places = np.split(np.arange(batch.num_tokens), batch.starts[1:-1])
    last = np.array([turn[row].max() for row in places])
    for group in set(batch["group"]):
        rows = np.flatnonzero(batch["group"] == group)
        reward = batch["reward"].astype(np.float64)
        for number in range(3):
            there = rows[last[rows] >= number]
            returns = 0.95 ** (last[there] - number) * reward[there]
            of_step = returns - returns.mean() if len(there) else returns
            for row, step in zip(there, of_step, strict=True):
                own = places[row][turn[places[row]] == number]
                want = reward[row] - reward[rows].mean() + step
                np.testing.assert_allclose(batch["advantages"][own], want, atol=1e-5)


def test_a_fork_has_the_number_and_the_anchor_of_its_turn(
    tmp_path: Path, brief: Path, played: None
) -> None:
    """An episode whose first turn ends begins another game in the second."""
    forks = ("environment.how=forks", "environment.turns=1")
    batch = of_gigpo(brief, tmp_path / "run", *forks)
    places = np.split(np.arange(batch.num_tokens), batch.starts[1:-1])
    sampled = [row[batch["loss_mask"][row]] for row in places]
    for name in ("turn", "anchor"):
        assert all(len(set(batch[name][row])) == 1 for row in sampled)
    turns = np.array([batch["turn"][row[0]] for row in sampled])
    anchors = np.array([batch["anchor"][row[0]] for row in sampled])
    assert sum(turns == 0) == 8 and set(turns) == {0, 1}
    assert len(set(anchors[turns == 1])) == 1, "the other game is the same for all"
    assert len(set(anchors[turns == 0])) == len(set(batch["row"]))
