"""Runs with an environment: what is trained, what fails, and how episodes end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from job_run import metrics, reproducible
from played_environments import SEEN
from tests.faults import toy_runs
from tests.faults.toy_runs import Said

from coupler.batch import Batch
from coupler.conversation.packing import ENDED
from coupler.testing.models import EOS, read_tensors, rewrite

STEPS = 2
IMPORTED = (Path(__file__).parent, Path(__file__).parents[1])
PLAYED = (
    "environment=played",
    "environment.retries=1",
    "environment.max_failed_fraction=1",
    "rollout=kept",
    "sampling.max_tokens=48",
)
# a tool call is one token of the model, so that a bigram can make it
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "here"}}\n</tool_call>'
CALLS = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    "{{ c.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Start = Callable[..., Said]


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy model that often ends its turn, its rows, and a reward."""
    folder = tmp_path_factory.mktemp("inputs")
    toy_runs.write_inputs(folder)
    tensors = read_tensors(folder / "toy")
    tensors["head.bias"][EOS] += 6
    rewrite(folder / "toy", folder / "toy", tensors)
    return folder


def command(inputs: Path, run_dir: Path, *options: str, scored: bool = False) -> list[str]:
    given = [*toy_runs.arguments(inputs, run_dir, f"steps={STEPS}"), *PLAYED, *options]
    return [option for option in given if scored or not option.startswith("reward.target")]


@pytest.fixture
def start(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Starts a run with ``environment=played`` in ``tmp_path/run``."""
    monkeypatch.setenv("COUPLER_PLUGINS", "played_environments")
    SEEN.clear()

    def train(*options: str, scored: bool = False, name: str = "run") -> Said:
        return toy_runs.call(command(inputs, tmp_path / name, *options, scored=scored))

    return train


def went_well(said: Said) -> None:
    assert said.code == 0 and not said.raised, f"{said.raised}{said.text[-2000:]}"


def sentence(said: Said) -> str:
    """The message of a run that ended with one, without a traceback of our own."""
    assert said.code == 2 and not said.raised, f"{said.code} {said.raised}{said.text[-2000:]}"
    return said.text.rpartition("coupler: ")[2]


def batches(run_dir: Path) -> list[Batch]:
    return [Batch.load(path) for path in sorted(run_dir.glob("record/step_*/batch.npz"))]


def trained(batch: Batch) -> list[tuple[int, float]]:
    mask = batch["loss_mask"]
    return list(zip(batch["tokens"][mask], batch["rollout_logprobs"][mask], strict=True))


def test_several_turns_train_exactly_the_sampled_tokens(start: Start, tmp_path: Path) -> None:
    went_well(start("samples_per_prompt=4"))
    num_turns = len(SEEN.turns)
    found = batches(tmp_path / "run")
    assert len(found) == STEPS

    rows = [
        tuple(row.tolist())
        for batch in found
        for row in np.split(batch["tokens"], batch.starts[1:-1])
    ]
    turns = [
        (request, done)
        for request, done in SEEN.sampled
        if any(
            row[: len(request.prompt) + len(done.tokens)] == request.prompt + done.tokens
            for row in rows
        )
    ]
    assert len(turns) == num_turns > 2 * len(rows), "a turn is in no row"

    want = Counter(
        (token, np.float32(logprob))
        for _, done in turns
        for token, logprob in zip(done.tokens, done.logprobs, strict=True)
    )
    assert Counter(pair for batch in found for pair in trained(batch)) == want
    assert metrics(tmp_path / "run")[-1]["environment/said"] > 1


def test_a_fork_is_a_second_row_of_one_trajectory(start: Start, tmp_path: Path) -> None:
    went_well(start("environment.how=forks", "environment.turns=1"))
    for batch in batches(tmp_path / "run"):
        assert Counter(batch["trajectory"].tolist()).most_common()[-1][1] == 2
        assert len(batch) == 8
        for trajectory in set(batch["trajectory"]):
            assert len(set(batch["reward"][batch["trajectory"] == trajectory])) == 1

    last = metrics(tmp_path / "run")[-1]
    assert (last["batch/sequences"], last["batch/trajectories"]) == (8, 4)
    assert (last["conversation/rows"], last["conversation/forks"]) == (2, 1)
    assert last["sampled/reward"] == pytest.approx(last["reward/mean"])


# --- failures


def test_an_episode_that_raised_begins_anew(start: Start, tmp_path: Path) -> None:
    went_well(start("environment.how=raises", "environment.fails=1"))
    begun = Counter(SEEN.begun)
    again = {seed for (_, seed), times in begun.items() if times == 2}
    assert again and again == {seed for _, seed in begun if seed % 3 == 0}
    assert max(begun.values()) == 2

    steps = metrics(tmp_path / "run")[1:]
    failed = [step["environment/failed"] for step in steps]
    assert failed == sorted(failed) and failed[-1] == len(again)
    assert all(step["reward/min"] >= 1 for step in steps)


def test_a_failure_leaves_no_trace_in_the_numbers(start: Start, tmp_path: Path) -> None:
    """An episode that is played again is the one that would have been."""
    how = "environment.how=raises"
    went_well(start(how, name="plain"))
    for fails in (1, 2, 3):
        went_well(start(how, f"environment.fails={fails}", name=f"failed_{fails}"))
        one, other = (
            reproducible(tmp_path / name, ("time/", "memory/", "environment/failed"))
            for name in ("plain", f"failed_{fails}")
        )
        assert one == other


def test_then_its_group_begins_anew(start: Start) -> None:
    """With ``retries=1`` an episode is begun twice in each of two groups."""
    went_well(start("environment.how=raises", "environment.fails=2"))
    begun = Counter(SEEN.begun)
    unlucky = {pair for pair, times in begun.items() if times == 3}
    assert unlucky == {pair for pair in begun if pair[1] % 3 == 0} != set()
    groups = {prompt for prompt, _ in unlucky}
    assert any(begun[prompt, seed] > 1 for prompt, seed in begun if prompt in groups and seed % 3)


@pytest.mark.parametrize("workers", [0, 1])
def test_its_episodes_have_ended_by_then(start: Start, tmp_path: Path, workers: int) -> None:
    """Those of the failed group are cancelled, and take a while to give back what they
    hold.
    """
    lingers = ("environment.how=lingers", "environment.fails=2", f"environment.holds={tmp_path}")
    went_well(start(*lingers, f"environment.workers={workers}", "steps=2"))
    assert metrics(tmp_path / "run")[-1]["environment/failed"] >= 2
    assert not (tmp_path / "twice").exists()


def test_too_many_failures_end_the_run(start: Start) -> None:
    said = sentence(
        start(
            "environment.how=raises",
            "environment.fails=99",
            "environment.max_failed_fraction=0.1",
            "samples_per_prompt=16",
        )
    )
    assert "episodes of environment=played failed." in said
    assert "environment.max_failed_fraction=0.1" in said
    assert "RuntimeError: the game broke, try 1" in said
    assert "played_environments.py" in said and "max_failed_fraction=0.1\n" in said
    assert SEEN.open == 0


def test_an_episode_that_always_fails_ends_the_run(start: Start) -> None:
    said = sentence(
        start("environment.how=raises", "environment.fails=99", "environment.retries=0")
    )
    assert "environment.retries=0" in said and "the game broke" in said


@pytest.mark.parametrize("how", ["cancels", "exits"])
def test_an_episode_that_ends_by_itself_has_failed(start: Start, tmp_path: Path, how: str) -> None:
    """A part of it was cancelled, or it called ``sys.exit``."""
    went_well(start(f"environment.how={how}", "environment.fails=1"))
    assert metrics(tmp_path / "run")[-1]["environment/failed"] >= 4


def test_a_caller_that_asks_for_ever_ends_with_its_time(start: Start, tmp_path: Path) -> None:
    """It lets every ``ConversationOver`` pass."""
    went_well(start("environment.how=insists", "environment.timeout_s=1.5", scored=True))
    assert metrics(tmp_path / "run")[-1]["conversation/ended_turns"] == 1


def test_an_outcome_of_another_type_is_named(start: Start) -> None:
    said = sentence(start("environment.how=nothing"))
    assert "returned a NoneType, not an Outcome" in said


@pytest.mark.parametrize("how", ["talk", "hides"])
def test_a_failure_of_the_rollout_is_its_own(start: Start, how: str) -> None:
    """Also where the environment lets it pass."""
    said = start(f"environment.how={how}", "rollout.fails_after=12")
    text = said.raised + said.text
    assert "the rollout broke" in text and "max_failed_fraction" not in text
    assert len(SEEN.begun) == len(set(SEEN.begun)), "an episode began anew"


# --- how episodes end

LIMITS = {
    "turns": ("environment.max_turns=2", "environment.turns=9"),
    "tokens": ("environment.max_tokens=90", "environment.turns=9"),
    "length": ("sampling.max_tokens=1",),
    "calls": ("environment.max_calls=1", "environment.tools=true", "environment.turns=9"),
    "seconds": ("environment.timeout_s=0.3", "environment.how=hangs"),
    "stop": (),
}


@pytest.mark.parametrize("ended", LIMITS)
def test_each_limit_shows_in_the_metrics(
    start: Start, tmp_path: Path, inputs: Path, ended: str
) -> None:
    """What was sampled until then is scored."""
    model = calling(inputs / "toy", tmp_path / "calling") if ended == "calls" else inputs / "toy"
    more = (
        "environment.how=scored",
        f"model.path={model}",
        "steps=1",
        "reward.max_invalid_fraction=0",
    )
    went_well(start(*more, *LIMITS[ended], scored=True))

    (step,) = [step for step in metrics(tmp_path / "run") if "conversation/turns" in step]
    shares = {name: step[f"conversation/ended_{name}"] for name in LIMITS}
    assert sum(shares.values()) == pytest.approx(1)
    assert shares[ended] == (
        1 if ended in ("seconds", "stop", "length", "turns") else max(shares.values())
    )
    assert shares[ended] > 0 and step["reward/mean"] > 0
    assert step["batch/truncated"] == pytest.approx(shares["length"] + shares["tokens"])


def calling(source: Path, folder: Path) -> Path:
    """Write a model that says nothing but tool calls, of one token each."""
    from transformers import AddedToken, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = CALLS
    tokenizer.add_tokens([AddedToken(CALL, special=False)])
    call = tokenizer.convert_tokens_to_ids(CALL)
    tensors = read_tensors(source)
    tensors["head.bias"][[EOS, call]] = 30
    tensors["head.weight"][[EOS, call]] *= 0.1
    rewrite(source, folder, tensors)
    tokenizer.save_pretrained(folder)
    return folder


# --- rewards


def test_an_invalid_episode_is_left_out_and_counted(start: Start, tmp_path: Path) -> None:
    went_well(
        start("environment.how=invalid", "reward.max_invalid_fraction=1", "samples_per_prompt=4")
    )
    step = metrics(tmp_path / "run")[-1]
    assert 0 < step["reward/invalid_rate"] < 1
    assert any(len(batch) < 8 for batch in batches(tmp_path / "run"))
    assert step["reward/min"] >= 1


def test_too_many_invalid_episodes_end_the_run(start: Start) -> None:
    said = sentence(
        start("environment.how=invalid", "reward.max_invalid_fraction=0", "samples_per_prompt=16")
    )
    assert "calls of the environment gave no valid number" in said and "x a draw" in said


def test_no_reward_without_a_target_is_one_sentence(start: Start) -> None:
    said = sentence(start("environment.how=scored"))
    assert "reward.target" in said and "Traceback" not in said


RANKED = """
def score(completions, row):
    order = sorted(set(completions), key=lambda text: (len(text), text))
    ranks = [order.index(text) + 1 for text in completions]
    return [{"reward": r / len(order), "rank": r, "size": len(completions)} for r in ranks]
"""


@pytest.mark.parametrize("plays", [True, False])
def test_a_reward_of_groups_sees_all_episodes_of_a_prompt(
    start: Start, inputs: Path, tmp_path: Path, plays: bool
) -> None:
    (tmp_path / "ranked.py").write_text(RANKED)
    more = (f"reward.target={tmp_path / 'ranked.py'}:score", "samples_per_prompt=4")
    if plays:
        went_well(start(*more, "environment.how=scored", scored=True))
    else:
        given = toy_runs.arguments(inputs, tmp_path / "run", f"steps={STEPS}")
        went_well(toy_runs.call([*given, *more]))

    for batch in batches(tmp_path / "run"):
        assert set(batch["reward_parts/size"]) == {4}
        for group in set(batch["group"]):
            mine = batch["group"] == group
            ranks = batch["reward_parts/rank"][mine]
            assert batch["reward"][mine] == pytest.approx(ranks / ranks.max())
    step = metrics(tmp_path / "run")[-1]
    assert step["reward_parts/size"] == 4 and step["reward_parts/rank"] >= 1
    given = ["replay", str(tmp_path / "run"), "--step", "2", "--stage", "advantages"]
    went_well(toy_runs.call(given))


def test_turn_rewards_stand_at_the_last_token_of_each_turn(start: Start, tmp_path: Path) -> None:
    went_well(start("environment.how=per_turn"))
    for batch in batches(tmp_path / "run"):
        last = np.flatnonzero(batch["token_reward"])
        ends = batch["loss_mask"] & ~np.append(batch["loss_mask"][1:], False)
        assert (np.flatnonzero(ends) == last).all() and len(last) > len(batch)
        for row in np.split(batch["token_reward"], batch.starts[1:-1]):
            found = row[row > 0]
            assert found.tolist() == [1.0 + turn for turn in range(len(found))]


def test_an_episode_that_a_limit_ended_has_its_reward_at_its_last_turn(
    start: Start, tmp_path: Path
) -> None:
    """It gives no rewards of turns, while those that end by themselves do."""
    given = ("environment.how=per_turn", "environment.max_turns=2", "sampling.max_tokens=4")
    went_well(start(*given, scored=True))
    for batch in batches(tmp_path / "run"):
        given = batch.sum_by_sequence(batch["token_reward"])
        limited = batch["ended"] == list(ENDED).index("turns")
        assert limited.any() and not limited.all()
        assert given[limited] == pytest.approx(batch["reward"][limited])
        ends = batch["loss_mask"] & ~np.append(batch["loss_mask"][1:], False)
        last = np.flatnonzero(ends)[np.cumsum(batch.sum_by_sequence(ends)).astype(int) - 1]
        np.testing.assert_array_equal(
            batch["token_reward"][last][limited], batch["reward"][limited]
        )


@pytest.mark.parametrize("how", ["one_less", "no_number"])
def test_wrong_turn_rewards_are_one_sentence(start: Start, how: str) -> None:
    said = sentence(start(f"environment.how={how}"))
    assert "turn" in said and "Outcome.turn_rewards" in said and "Traceback" not in said


# --- processes of their own

SAME = ("time/", "memory/", "environment/failed")


def test_workers_play_the_same_episodes(start: Start, tmp_path: Path) -> None:
    went_well(start(name="here"))
    begun, SEEN.begun = SEEN.begun, []
    went_well(start("environment.workers=2", name="there"))
    assert begun and not SEEN.begun, "an episode was played in the process of the run"
    assert reproducible(tmp_path / "there") == reproducible(tmp_path / "here")


def test_kills_of_workers_change_no_number(start: Start, tmp_path: Path) -> None:
    more = ("steps=15", "samples_per_prompt=4", "environment.retries=4")
    went_well(start(*more, name="plain"))
    (tmp_path / "kills").mkdir()
    kills = f"environment.kills={tmp_path / 'kills'}"
    went_well(start(*more, kills, "environment.workers=2", name="killed"))

    when = Counter(mark.read_text() for mark in (tmp_path / "kills").iterdir() if mark.is_file())
    assert when.total() >= 20 and len(when) == 3
    one, other = (reproducible(tmp_path / name, SAME) for name in ("plain", "killed"))
    assert one == other
    failed = metrics(tmp_path / "killed")[-1]["environment/failed"]
    processes = len(list((tmp_path / "kills" / "processes").iterdir()))
    assert 20 <= failed <= processes, "a process counts once, however many episodes it had"


def test_killed_workers_end_a_run_that_allows_none(start: Start, tmp_path: Path) -> None:
    kills, none = f"environment.kills={tmp_path}", "environment.max_failed_fraction=0"
    said = sentence(
        start(kills, none, "environment.workers=1", "steps=15", "environment.retries=9")
    )
    assert "environment=played failed" in said
    assert "the process of the episode was killed by SIGKILL" in said


@pytest.mark.parametrize("how", ["raises", "exits", "nothing", "cancels"])
def test_a_failure_in_a_worker_is_the_environments(start: Start, how: str) -> None:
    said = sentence(
        start(f"environment.how={how}", "environment.fails=99", "environment.workers=1")
    )
    assert "episode of environment=played failed" in said
    shown = {"raises": "the game broke", "exits": "SystemExit", "cancels": "CancelledError"}
    assert shown.get(how, "returned a NoneType, not an Outcome") in said
    assert "link.py" not in said, "the traceback shows how it came here"


def test_a_worker_whose_rollout_fails_has_not_failed(start: Start) -> None:
    said = start("rollout.fails_after=12", "environment.workers=1")
    text = said.raised + said.text
    assert "the rollout broke" in text and "max_failed_fraction" not in text


def test_an_environment_of_another_interpreter(start: Start, tmp_path: Path) -> None:
    """It has core alone, of this source tree."""
    venv.create(tmp_path / "other", with_pip=False)
    python = tmp_path / "other" / "bin" / "python"
    (site,) = (tmp_path / "other").glob("lib/python*/site-packages")
    paths = [*map(str, IMPORTED), *(path for path in sys.path if path)]
    (site / "ours.pth").write_text("\n".join(paths))
    went_well(start(name="here"))
    SEEN.clear()
    went_well(start(f"environment.python={python}", name="there"))
    assert not SEEN.begun
    assert reproducible(tmp_path / "there") == reproducible(tmp_path / "here")


def test_an_interpreter_without_coupler_is_one_sentence(start: Start, tmp_path: Path) -> None:
    venv.create(tmp_path / "other", with_pip=False)
    python = tmp_path / "other" / "bin" / "python"
    said = sentence(start(f"environment.python={python}"))
    assert f"{python} -m pip install coupler-core" in said
    assert "environment.python=/nowhere" in sentence(start("environment.python=/nowhere"))


def test_an_option_that_no_worker_reads_is_named(start: Start) -> None:
    said = sentence(start("environment.ignored=1", "environment.workers=1", "strict=true"))
    assert "you set environment.ignored, and nothing read it" in said


# --- other runs


def test_it_runs_ahead_of_the_weights(start: Start, tmp_path: Path) -> None:
    went_well(start("max_staleness=1", "deterministic=false", "steps=3"))
    # Where all episodes were played early, the last step has none.
    log = metrics(tmp_path / "run")
    assert max(step.get("conversation/turns", 0) for step in log) > 1
    assert SEEN.open == 0


def test_a_resumed_run_has_the_same_numbers(start: Start, tmp_path: Path, inputs: Path) -> None:
    """The process is killed in an episode of the third step."""
    went_well(start("steps=4", name="whole"))
    given = command(inputs, tmp_path / "killed", "steps=4", "environment.dies_at=10")
    path = os.pathsep.join([*map(str, IMPORTED), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", "from coupler.cli import main; main()", *given],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == -9, done.stderr[-2000:]
    assert len(metrics(tmp_path / "killed")) < len(metrics(tmp_path / "whole"))
    went_well(start("steps=4", name="killed"))
    kept = ("time/", "memory/", "run/steps")
    assert reproducible(tmp_path / "killed", kept) == reproducible(tmp_path / "whole", kept)


def test_an_evaluation_keeps_the_conversation(start: Start, inputs: Path, tmp_path: Path) -> None:
    given = [
        "eval", "rollout=kept", f"model.path={inputs / 'toy'}", "environment=played", "engine=toy",
        f"eval.data.source={inputs / 'rows.jsonl'}", "eval.data.max_prompt_tokens=64",
        "sampling.max_tokens=48", f"run_dir={tmp_path / 'eval'}", "trackers=[jsonl]",
    ]  # fmt: skip
    went_well(toy_runs.call(given))
    lines = [
        json.loads(line) for line in (tmp_path / "eval" / "eval.jsonl").read_text().splitlines()
    ]
    assert len(lines) == 6 and SEEN.open == 0
    said = Counter(SEEN.turns)
    for line in lines:
        (row,) = line["conversation"]
        sampled = [
            text for segment in row for origin, text in segment.items() if origin == "sampled"
        ]
        assert len(sampled) > 1 and line["finish"] == "stop"
        assert all(any(text.startswith(turn) for turn in said) for text in sampled)
        assert next(iter(row[0])) == "prompt" and "what is" in row[0]["prompt"]
    step = metrics(tmp_path / "eval")[-1]
    assert step["eval/conversation/turns"] > 1 and step["eval/environment/said"] > 1


BAD = {
    "environment=nope": "no environment named 'nope' is installed",
    "environment.max_turns=0": "environment.max_turns",
    "environment.max_tokens=64": "leaves no token to answer the longest prompt",
    "data.control_tokens=true": "data.control_tokens=true",
    "environment.timeout_s=0": "environment.timeout_s",
    "environment.nope=1": "environment.nope",
}


@pytest.mark.parametrize("option", BAD)
def test_a_bad_option_starts_nothing(start: Start, tmp_path: Path, option: str) -> None:
    said = sentence(start(option))
    assert BAD[option] in said and "Traceback" not in said
    assert not SEEN.begun and not SEEN.open and not (tmp_path / "run" / "metrics.jsonl").exists()


def test_supervised_training_has_no_environment(start: Start, inputs: Path, tmp_path: Path) -> None:
    given = [
        "sft", "engine=toy", "algorithm=sft", "environment=played", f"model.path={inputs / 'toy'}",
        f"data.source={inputs / 'rows.jsonl'}", f"run_dir={tmp_path / 'run'}",
    ]  # fmt: skip
    assert "environment=played is of coupler train and coupler eval" in sentence(
        toy_runs.call(given)
    )
    assert not SEEN.open
