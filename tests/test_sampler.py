"""A class of the user picks the rows of a run, which ends at any instant and goes on as
if it had not ended.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from forking import Forks
from job_run import MEASURED, arguments, metrics, reproducible, write_inputs

from coupler.cli import main
from coupler.testing.models import write_tokenizer, write_toy

# Takes the row with the least mean reward next, and writes down all that it hears.
WORST_FIRST = """
import json, pathlib

class WorstFirst:
    def __init__(self, rows, seed, log=""):
        self.rows, self.log, self.means, self.asked, self.heard = rows, log, {}, 0, []

    def next(self):
        self.asked += 1
        place = min(range(len(self.rows)), key=lambda i: (self.means.get(i, -1.0), i))
        self.means[place] = self.means.get(place, 0.0) + 0.25
        self.write(["next", place, self.rows[place]["index"]])
        return place

    def update(self, row, rewards):
        self.means[row] = sum(rewards) / len(rewards)
        self.heard.append([row, rewards])
        self.write(["update", row, rewards])

    def write(self, line):
        if self.log:
            with open(self.log, "a") as file:
                file.write(json.dumps(line) + "\\n")

    def state(self):
        return {"means": sorted(self.means.items()) and [list(p) for p in self.means.items()],
                "asked": self.asked, "heard": self.heard}

    def restore(self, state):
        self.means, self.asked = dict(state["means"]), state["asked"]
        self.heard = state["heard"]
"""
STEPS = ("steps=6", "checkpoint.every_steps=1", "record.every_steps=1")


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    server = Forks(tmp_path_factory.mktemp("forks") / "log")
    yield server
    server.close()


def command(model: Path, folder: Path, *more: str) -> list[str]:
    """Train with the sampler in ``folder``, whose log lies there too."""
    folder.mkdir(parents=True, exist_ok=True)
    write_inputs(folder)
    (folder / "worst.py").write_text(WORST_FIRST)
    sampler = f"data.sampler={folder}/worst.py:WorstFirst"
    return [*arguments("train", model, folder, folder / "run"), sampler, *STEPS, *more]


def state(run_dir: Path, step: int) -> dict[str, object]:
    text = (run_dir / "checkpoints" / f"step_{step}" / "state.json").read_text()
    return json.loads(text)["sampler"]["prompts"]


def test_the_sampler_decides_and_hears_every_group_in_order(model: Path, tmp_path: Path) -> None:
    log = tmp_path / "one" / "log.jsonl"
    assert main(command(model, tmp_path / "one", f"data.sampler_args.log={log}")) == 0

    lines = [json.loads(line) for line in log.read_text().splitlines()]
    asked = [line[1] for line in lines if line[0] == "next"]
    heard = [line[1] for line in lines if line[0] == "update"]
    assert asked[:12] == heard and len(heard) == 12
    assert all(len(line[2]) == 4 for line in lines if line[0] == "update")
    # rows of means that fell below others were taken again before an epoch was over
    assert asked[:2] == [0, 1] and len(asked) in (12, 14)


# Groups of equal rewards are rejected, and others take their place.
REJECTING = ("deterministic=true", "algorithm.dynamic_sampling=true", "samples_per_prompt=2")


@pytest.mark.parametrize("more", [(), REJECTING])
def test_kills_at_random_instants_change_nothing(
    more: tuple[str, ...], model: Path, forks: Forks, tmp_path: Path
) -> None:
    if more:
        (tmp_path / "odd.py").write_text("def score(completion): return len(completion) % 2\n")
        more = (*more, f"reward.target={tmp_path}/odd.py:score", "engine.lr=1e-4")
    assert main(command(model, tmp_path / "whole", *more)) == 0

    instants, kills = random.Random(5), 0
    given = command(model, tmp_path / "killed", *more)
    process = forks.start(given)
    while kills < 4 and forks.wait(process, instants.uniform(0.3, 1.5)) is None:
        forks.kill(process)
        kills += 1
        process = forks.start(given)
    assert forks.wait(process, 60) == 0, forks.log.read_text()[-3000:]

    whole, killed = tmp_path / "whole" / "run", tmp_path / "killed" / "run"
    assert reproducible(whole) == reproducible(killed)
    assert state(whole, 6) == state(killed, 6)
    rejected = sum(line.get("sampled/rejected_groups", 0) for line in metrics(whole))
    assert bool(rejected) == bool(more)
    exports = [folder / "export" / "model.safetensors" for folder in (whole, killed)]
    assert exports[0].read_bytes() == exports[1].read_bytes()


def test_an_asynchronous_run_loses_no_update(model: Path, forks: Forks, tmp_path: Path) -> None:
    more = (
        "max_staleness=2",
        "algorithm.correction_cap=2",
        "steps=8",
        "checkpoint.asynchronous=false",
    )
    given = command(model, tmp_path / "run", *more)
    process = forks.start(given)
    while not list((tmp_path / "run" / "run" / "checkpoints").glob("step_[3-9]")):
        if forks.wait(process, 0.01) is not None:
            break
    forks.kill(process)
    assert main(given) == 0

    saved = json.loads(
        (tmp_path / "run" / "run" / "checkpoints" / "step_8" / "state.json").read_text()
    )["sampler"]
    inner = saved["prompts"]["sampler"]
    finished = len(inner["heard"]) + len(saved["prompts"]["waiting"])
    assert inner["asked"] == finished + len(saved["unfinished"])


def test_it_picks_the_rows_of_supervised_training_too(model: Path, tmp_path: Path) -> None:
    runs = []
    for name, lengths in (("whole", (6,)), ("parts", (2, 3, 6))):
        folder = tmp_path / name
        folder.mkdir()
        write_inputs(folder)
        (folder / "worst.py").write_text(WORST_FIRST)
        given = [
            *arguments("sft", model, folder, folder / "run"),
            f"data.sampler={folder}/worst.py:WorstFirst",
            "checkpoint.every_steps=1",
        ]
        for steps in lengths:
            assert main([*given, f"steps={steps}"]) == 0
        saved = json.loads((folder / "run" / "checkpoints" / "step_6" / "state.json").read_text())
        runs.append((reproducible(folder / "run", (*MEASURED, "run/")), saved["order"]))
    assert runs[0] == runs[1]
    assert runs[0][1]["sampler"]["asked"] == 24 and runs[0][1]["sampler"]["heard"] == []


@pytest.fixture
def toy(tmp_path: Path) -> Callable[..., int]:
    write_inputs(tmp_path)
    write_toy(tmp_path / "toy")
    write_tokenizer(tmp_path / "toy")
    given = (
        f"model.path={tmp_path / 'toy'}",
        f"data.source={tmp_path / 'rows.jsonl'}",
        f"reward.target={tmp_path / 'reward.py'}:score",
        f"run_dir={tmp_path / 'run'}",
        *("engine=toy", "engine.lr=0.1", "rollout=toy", "algorithm=toy", "steps=2"),
        *("data.max_prompt_tokens=64", "prompts_per_step=2", "samples_per_prompt=4"),
        "sampling.max_tokens=8",
    )
    return lambda *overrides: main(["train", *given, *overrides])


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "next = lambda self: 6",
            "next() returned 6, which is no row.\n  it may return:  an integer",
        ),
        ("next = lambda self: True", "next() returned True, which is no row"),
        ("next = lambda self: 'x'", "next() returned 'x', which is no row"),
        (
            "next = lambda self: 1 / 0",
            "next() raised ZeroDivisionError: division by zero.\n  at:  ",
        ),
        ("next = None", "it has no method next.\n  it has:  __init__(rows, seed"),
        ("def __init__(self, rows): pass", "data.sampler_args does not fit: too many positional"),
        ("def update(self, row, rewards): self.x", "update() raised AttributeError: "),
        ("state = lambda self: {1: 2}", "state() returned what JSON would change"),
        ("state = lambda self: {'a': {1}}", "state() returned what JSON cannot hold"),
        ("state = lambda self: float('nan')", "state() returned what JSON cannot hold"),
    ],
)
def test_what_a_sampler_may_not_do_ends_the_run_in_a_sentence(
    body: str,
    said: str,
    toy: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "mine.py").write_text(
        "class Mine:\n    def __init__(self, rows, seed): pass\n    def next(self): return 0\n"
        f"    def state(self): return {{}}\n    def restore(self, state): pass\n    {body}\n"
    )
    assert toy(f"data.sampler={tmp_path}/mine.py:Mine") == 2
    error = capsys.readouterr().err
    assert f"data.sampler={tmp_path}/mine.py:Mine: {said}" in error


def test_a_sampler_that_cannot_be_is_refused(
    toy: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text("def rows(): pass\nvalue = 3\n")
    for override, said in (
        ("data.sampler=no.py:Mine", "data.sampler=no.py:Mine cannot be used: there is no file"),
        (f"data.sampler={tmp_path}/mine.py:rows", "rows: it is a function, not a class"),
        (f"data.sampler={tmp_path}/mine.py:Mine", "has no 'Mine'"),
        ("data.sampler=coupler.data.curriculum:Reward", "has no 'Reward'"),
    ):
        assert toy(override) == 2
        assert said in capsys.readouterr().err
    assert toy("eval.every_steps=1", f"eval.data.source={tmp_path}/rows.jsonl",
               "eval.data.sampler=coupler.data.curriculum:ByReward") == 2  # fmt: skip
    assert "an evaluation takes every row once" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_rows_rest_by_their_reward(
    toy: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also that another sampler in the same folder is refused like other data."""
    by_reward = "data.sampler=coupler.data.curriculum:ByReward"
    assert toy(by_reward, "data.sampler_args={high: 0.9}") == 0
    capsys.readouterr()
    assert toy(by_reward, "data.sampler_args={high: 0.8}", "steps=3") == 2
    assert "differs:  data.sampler_args was {'high': 0.9}" in capsys.readouterr().err
    assert (
        toy(by_reward, "data.sampler_args={high: 0.8}", "steps=3", "checkpoint.reset_data=true")
        == 0
    )
