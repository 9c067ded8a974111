"""A run that ends at any instant goes on, with the same command, as if it had not
ended.
"""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from forking import Forks
from job_run import (
    MEASURED,
    SAMPLING,
    arguments,
    metrics,
    replayed,
    reproducible,
    run,
    write_inputs,
)
from safetensors.numpy import load_file

from coupler.batch import Batch
from coupler.cli import main
from coupler.metrics import Metrics
from coupler.run.run_folder import Journal
from coupler.testing.models import write_tokenizer, write_toy

KILLS = int(os.environ.get("COUPLER_KILLS", "4"))
# seconds from the time that a run, or its next step, begins
KILL_AFTER = tuple(map(float, os.environ.get("COUPLER_KILL_AFTER", "0,0.6").split(",")))
KILL_WITH = tuple(
    os.environ.get("COUPLER_KILL_WITH", "").split()
)  # options: "algorithm=ppo executor=ray", say
JOBS = ("train", "sft", "dpo", "sampled")
MORE = (
    "steps=6",
    "checkpoint.every_steps=2",
    "eval.every_steps=3",
    "eval.data.source=rows.jsonl",
    "record.every_steps=1",
)

# Supervised training on pairs of the same rows, and such that samples evaluations.
DPO = ("algorithm=dpo", "data.columns.chosen=answer", "data.columns.rejected=prompt")
SAMPLED = (*SAMPLING[:3], "eval.every_steps=2", "eval.data.max_prompt_tokens=64")

TOY = (
    "engine=toy", "engine.lr=0.1", "rollout=toy", "algorithm=toy", "data.max_prompt_tokens=64",
    "steps=2",
    "checkpoint.every_steps=1", "prompts_per_step=2", "samples_per_prompt=4",
    "sampling.max_tokens=8",
)  # fmt: skip


def command(
    job: str, model: Path, run_dir: Path, *overrides: str, inputs: Path | None = None
) -> list[str]:
    inputs = inputs or run_dir.parent
    if job == "dpo":
        job, overrides = "sft", (*DPO, *overrides)
    elif job == "sampled":
        held_out = (
            f"eval.data.source={inputs}/rows.jsonl",
            f"reward.target={inputs}/reward.py:score",
        )
        job, overrides = "sft", (*SAMPLED, *held_out, *overrides)
    more = [text.replace("=rows", f"={inputs}/rows") for text in MORE]
    more = more if job == "train" else ["steps=6", "checkpoint.every_steps=2"]
    return [*arguments(job, model, inputs, run_dir), *more, *overrides]


def often_equal(folder: Path) -> tuple[str, ...]:
    """Dynamic sampling on a reward that most groups have in common."""
    (folder / "odd.py").write_text(
        "def score(completion):\n    return float(len(completion) % 2)\n"
    )
    return (
        "algorithm.dynamic_sampling=true",
        f"reward.target={folder}/odd.py:score",
        "samples_per_prompt=2",
        # A policy that is sure of every token gives equal groups alone.
        "engine.lr=1e-4",
    )


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    server = Forks(tmp_path_factory.mktemp("forks") / "log")
    yield server
    server.close()


@pytest.fixture
def toy(tmp_path: Path) -> Callable[..., int]:
    """Runs two steps on the toy backends in ``tmp_path/NAME``; a checkpoint after
    each.
    """
    write_inputs(tmp_path)
    write_toy(tmp_path / "toy")
    write_tokenizer(tmp_path / "toy")
    inputs = (f"model.path={tmp_path / 'toy'}", f"data.source={tmp_path / 'rows.jsonl'}")
    reward = f"reward.target={tmp_path / 'reward.py'}:score"

    def start(name: str, *overrides: str) -> int:
        return main(["train", *TOY, *inputs, reward, f"run_dir={tmp_path / name}", *overrides])

    return start


def weights(run_dir: Path) -> dict[str, np.ndarray]:
    return load_file(run_dir / "export" / "model.safetensors")


def batch_of(run_dir: Path, step: int) -> Batch:
    return Batch.load(run_dir / "record" / f"step_{step}" / "batch.npz")


def same(one: Path, other: Path) -> None:
    # The first evaluation of each process is proved.
    measured = (*MEASURED, "eval/sync/probe_permuted")
    assert reproducible(one, measured) == reproducible(other, measured)
    for first, second in zip(
        *(sorted(run_dir.glob("export*/*.safetensors")) for run_dir in (one, other)), strict=True
    ):
        assert first.parent.name == second.parent.name and first.read_bytes() == second.read_bytes()


def used_once(run_dir: Path, steps: int, *, lost: bool = False) -> None:
    """Hold every step's prompt groups, two each, against each other; ``lost`` if some
    may have been rejected.
    """
    used = np.concatenate(
        [np.unique(batch_of(run_dir, step)["group"]) for step in range(1, steps + 1)]
    ).tolist()
    assert len(used) == len(set(used)) == steps * 2
    assert lost or sorted(used) == list(range(steps * 2))
    assert all(line["staleness/violations"] == 0 for line in metrics(run_dir)[1:])


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs that nothing interrupted."""
    folders = {}
    for job in JOBS:
        folder = tmp_path_factory.mktemp(job)
        write_inputs(folder)
        assert main(command(job, model, folder / "run")) == 0
        folders[job] = folder / "run"
    return folders


def started(forks: Forks, given: list[str], run_dir: Path, *, steps: bool) -> int:
    """Start it, and wait until it has written its name into the folder, or a step."""
    name, log = run_dir / "run.json", run_dir / "metrics.jsonl"
    before, process = read(name), forks.start(given)
    while read(name) == before and forks.wait(process, 0) is None:
        time.sleep(0.005)

    least = len(read(log))  # a run that goes on cuts what comes after its checkpoint
    while steps and forks.wait(process, 0) is None and len(read(log)) <= least:
        least = min(least, len(read(log)))
        time.sleep(0.002)
    return process


def read(file: Path) -> bytes:
    return file.read_bytes() if file.exists() else b""


@pytest.mark.parametrize("job", JOBS)
def test_kills_at_random_instants_change_nothing(
    job: str, model: Path, whole: dict[str, Path], forks: Forks, tmp_path: Path
) -> None:
    """At max_staleness=0 and in fp32 on the CPU, bit by bit; else nothing is used
    twice, and nothing lost. Every second kill comes after a step.
    """
    instants, kills, runs = random.Random(KILLS), 0, count()
    synchronous, unharmed = (
        not any(text.startswith("max_staleness=") for text in KILL_WITH),
        whole[job],
    )
    if KILL_WITH and synchronous:
        unharmed = tmp_path / "unharmed" / "run"
        unharmed.parent.mkdir()
        write_inputs(unharmed.parent)
        assert forks.wait(forks.start(command(job, model, unharmed, *KILL_WITH)), 300) == 0, (
            forks.log.read_text()
        )
    while kills < KILLS:
        folder = tmp_path / str(next(runs))
        folder.mkdir()
        write_inputs(folder)
        given = command(job, model, folder / "run", *KILL_WITH)
        start = partial(started, forks, given, folder / "run")
        process = start(steps=kills % 2 == 1)
        while kills < KILLS and forks.wait(process, instants.uniform(*KILL_AFTER)) is None:
            forks.kill(process)
            kills += 1
            process = start(steps=kills % 2 == 1)
        assert forks.wait(process, 300 if KILL_WITH else 60) == 0, forks.log.read_text()[-3000:]
        if synchronous:
            same(folder / "run", unharmed)
        else:
            used_once(folder / "run", 6)


def test_more_steps_later_are_the_same_as_at_once(
    model: Path, whole: dict[str, Path], tmp_path: Path
) -> None:
    """Where the last step of the shorter run is one that is evaluated in the longer one
    too.
    """
    write_inputs(tmp_path)
    assert main(command("train", model, tmp_path / "run", "steps=3")) == 0
    assert main(command("train", model, tmp_path / "run")) == 0
    steps = [
        {k: v for k, v in line.items() if k != "run/steps"}
        for line in reproducible(tmp_path / "run")
    ]
    assert steps == [
        {k: v for k, v in line.items() if k != "run/steps"} for line in reproducible(whole["train"])
    ]
    assert len(json.loads((tmp_path / "run" / "run.json").read_text())) == 2


def test_a_schedule_without_a_length_ends_with_the_run_that_became_longer(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the resume on, rates are those of the longer run; a length that was set
    stays.
    """
    write_inputs(tmp_path)

    def rates(run_dir: Path) -> list[float]:
        return [line["train/lr"] / 1e-2 for line in metrics(run_dir) if "train/lr" in line]

    for name, more, want in (
        ("run", [], [1, 0.5, 0.5, 0.25]),
        ("set", ["engine.total_steps=8"], [1, 7 / 8, 6 / 8, 5 / 8]),
    ):
        for steps in (2, 4):
            given = arguments("sft", model, tmp_path, tmp_path / name)
            assert main([*given, "engine.schedule=linear", *more, f"steps={steps}"]) == 0
        assert rates(tmp_path / name) == pytest.approx(want)
    assert "policy linear over 4 optimizer steps" in capsys.readouterr().out


def test_a_complete_run_is_left_alone(
    model: Path, whole: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    before = (whole["train"] / "metrics.jsonl").read_bytes()
    assert main(command("train", model, whole["train"])) == 0
    assert "complete at step 6" in capsys.readouterr().out
    assert (whole["train"] / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("damage", ["altered", "truncated", "missing", "without manifest"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    damage: str,
    model: Path,
    whole: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(whole["train"], run_dir)
    shutil.rmtree(run_dir / "export")
    (victim,) = (run_dir / "checkpoints" / "step_6" / "policy").glob("*.safetensors")
    content = victim.read_bytes()
    if damage == "without manifest":
        (run_dir / "checkpoints" / "step_6" / "MANIFEST.json").unlink()
    elif damage == "missing":
        victim.unlink()
    else:
        victim.write_bytes(content[:-8] + (b"12345678" if damage == "altered" else b""))
    assert main(command("train", model, run_dir, inputs=whole["train"].parent)) == 0
    said = capsys.readouterr().out
    assert "step_6: " in said
    assert ("MANIFEST.json" if damage == "without manifest" else victim.name) in said
    assert "going on from" in said and "step_4" in said
    same(run_dir, whole["train"])


def test_where_no_checkpoint_is_whole_nothing_is_touched(
    model: Path, whole: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(whole["train"], run_dir)
    for manifest in run_dir.glob("checkpoints/*/MANIFEST.json"):
        manifest.unlink()
    files = sorted(run_dir.rglob("*"))
    assert main(command("train", model, run_dir, inputs=whole["train"].parent)) == 2
    assert "is whole" in capsys.readouterr().err
    assert sorted(run_dir.rglob("*")) == files


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("engine.lr=3e-2",), "engine.lr was 0.01, is 0.03"),
        (("checkpoint.resume=disable",), "holds a run already"),
        (("checkpoint.resume=nowhere", "engine.lr=3e-2"), "engine.lr was 0.01, is 0.03"),
    ],
)
def test_another_run_is_refused(
    overrides: tuple[str, ...],
    says: str,
    model: Path,
    whole: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = (whole["train"] / "metrics.jsonl").read_bytes()
    assert main(command("train", model, whole["train"], "steps=8", *overrides)) == 2
    assert says in capsys.readouterr().err
    assert (whole["train"] / "metrics.jsonl").read_bytes() == before


CHANGED = """
class Rows:
    def __init__(self, rows, seed):
        self.at = 0
    def next(self):
        self.at += 1
        return self.at % 3
    def state(self):
        return self.at
    def restore(self, state):
        self.at = state
"""


def test_a_file_of_the_user_that_was_changed_is_named(
    toy: Callable[..., int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "rows.py").write_text(CHANGED)
    sampler = f"data.sampler={tmp_path}/rows.py:Rows"
    assert toy("run", sampler, "steps=2") == 0
    assert toy("run", sampler, "steps=3") == 0
    assert "was changed since" not in caplog.text

    (tmp_path / "rows.py").write_text(CHANGED.replace("% 3", "% 2"))
    assert toy("run", sampler, "steps=4") == 0
    assert (
        f"data.sampler={tmp_path}/rows.py was changed since step 3, and is used as it is now"
        in caplog.text
    )
    assert "reward.target" not in caplog.text

    reward = tmp_path / "reward.py"
    reward.write_text(reward.read_text() + "# changed\n")
    assert toy("run", sampler, "steps=5") == 0
    assert f"reward.target={reward} was changed since step 4" in caplog.text


def ways_out(said: str) -> list[list[str]]:
    """The overrides of each line of advice, as a shell reads them."""
    lines = [
        line[6:].strip() for line in said.splitlines() if line.startswith(("  try:", "  or: "))
    ]
    found = [[word for word in shlex.split(line) if "=" in word] for line in lines]
    return [
        [*given, "run_dir"] if "another run_dir" in line else given
        for given, line in zip(found, lines, strict=True)
    ]


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (("sampling.stop=[]",), ("engine.lr=0.2", "sampling.stop=['+']", "data.answer_key=prompt")),
        (("data.args={}",), ("data.limit=5",)),
        (("max_staleness=1",), ("max_staleness=0", "seed=3")),
    ],
)
def test_each_advice_of_a_refusal_works(
    before: tuple[str, ...],
    now: tuple[str, ...],
    toy: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert toy("run", *before) == 0
    capsys.readouterr()
    assert toy("run", "steps=3", *now) == 2
    said = capsys.readouterr().err
    assert all(f"differs:  {text.split('=')[0]}" in said for text in now)
    ways = ways_out(said)
    assert len(ways) == (4 if "data.limit=5" in now else 3)
    for number, way in enumerate(ways):
        shutil.copytree(tmp_path / "run", tmp_path / str(number))
        renamed = [text.replace(str(tmp_path / "run"), str(tmp_path / str(number))) for text in way]
        folder = f"new{number}" if "run_dir" in way else str(number)
        given = [text for text in renamed if text != "run_dir"]
        more = (
            ["checkpoint.reset_data=true"] if "checkpoint.resume" in str(way) else []
        )  # what it then advises
        assert toy(folder, "steps=3", *now, *given, *more) == 0, way
        steps = [line["step"] for line in metrics(tmp_path / folder)]
        assert steps == ([3] if more else [0, 1, 2, 3]), way


def test_what_changes_no_result_refuses_nothing(
    toy: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    others = (
        "sync.self_test=false",
        "sync.deadline_s=9",
        "engine.max_tokens_per_gpu=512",
        "profile.ranks=[1]",
    )
    assert toy("one", "steps=3") == toy("two") == 0
    assert toy("two", "steps=3", "sync.transport=disk", *others) == 0
    assert "another configuration" not in capsys.readouterr().out
    one, two = (
        reproducible(tmp_path / name, but=("time/", "memory/", "sync/", "run/"))
        for name in ("one", "two")
    )
    assert one == two


def test_options_that_came_or_went_with_a_release_refuse_nothing_at_their_defaults(
    toy: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert toy("run") == 0
    config, about = (tmp_path / "run" / name for name in ("config.yaml", "run.json"))
    values = yaml.safe_load(config.read_text())
    del values["engine"]["num_cycles"], values["data"]["shuffle"], values["waits"]
    config.write_text(yaml.safe_dump({**values, "left": 7}))
    (start,) = json.loads(about.read_text())
    about.write_text(json.dumps([{**start, "not_default": [*start["not_default"], "left"]}]))
    assert toy("run", "steps=3") == 2
    assert (
        "differs:  left was 7, this release has no such option\n  try:  another run_dir"
        in capsys.readouterr().err
    )
    about.write_text(json.dumps([start]))
    assert "engine.lr" in start["not_default"] and "engine.eps" not in start["not_default"]
    assert toy("run", "steps=3", "data.shuffle=false") == 2
    assert (
        "differs:  data.shuffle was True, is False\n  try:  data.shuffle=true "
        in capsys.readouterr().err
    )
    assert toy("run", "steps=3") == 0
    assert "another configuration" not in capsys.readouterr().out


def test_a_configuration_without_an_engine_is_damaged_and_no_command_leaves_a_thread(
    toy: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert toy("run", "record.every_steps=1") == 0
    (tmp_path / "run" / "config.yaml").write_text("{}")
    before = set(threading.enumerate())
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 0
    assert main(["replay", str(tmp_path / "run"), "--step", "2", "--stage", "train"]) == 0
    assert "it names no engine, as every run's does; the copy in" in capsys.readouterr().err
    assert set(threading.enumerate()) <= before
    assert toy("run", "steps=3", "record.every_steps=1") == 0


def test_a_format_of_a_later_release_is_refused_in_a_sentence(
    toy: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert toy("run", "record.every_steps=1") == 0
    files = [
        tmp_path / "run" / name
        for name in ("run.json", "checkpoints/step_2/MANIFEST.json", "record/step_2/record.json")
    ]
    replay = partial(
        main, ["replay", str(tmp_path / "run"), "--step", "2", "--stage", "advantages"]
    )
    export = partial(main, ["export", str(tmp_path / "run"), "--out", str(tmp_path / "out")])
    resume = partial(toy, "run", "steps=3")
    for file, commands in zip(
        files, [(resume, export, replay), (resume, export), (replay,)], strict=True
    ):
        text = file.read_text()
        assert (
            json.loads(text)["format"] == 1
            if text[0] != "["
            else json.loads(text)[0]["format"] == 1
        )
        file.write_text(text.replace('"format": 1', '"format": 2'))
        for command in commands:
            assert command() == 2
            said = capsys.readouterr().err
            assert (
                f"{file} has format 2, and coupler-core {version('coupler-core')} reads "
                "formats up to 1."
            ) in said
            assert said.endswith("try:  pip install --upgrade coupler-core\n")
        file.write_text(text)
    assert resume() == 0


def test_a_configuration_that_a_run_wrote_sets_what_is_not_a_default(
    toy: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing reads ``profile.ranks`` here, which the file has at its default."""
    assert toy("run") == 0
    given = [
        "train",
        "--config",
        str(tmp_path / "run" / "config.yaml"),
        f"run_dir={tmp_path / 'again'}",
    ]
    capsys.readouterr()
    assert main(given) == 0
    assert "you set" not in capsys.readouterr().err
    assert main([*given[:-1], f"run_dir={tmp_path / 'typed'}", "profile.ranks=[0]"]) == 0
    assert "you set profile.ranks, and nothing read it" in capsys.readouterr().err


def test_the_export_of_a_run_is_evaluated(
    toy: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held_out = (f"eval.data.source={tmp_path / 'rows.jsonl'}", "eval.data.max_prompt_tokens=64")
    run_dir = tmp_path / "run"
    assert toy("run", "checkpoint.export=false", "strict=true") == 0
    before = sorted(run_dir.iterdir())
    assert main(["eval", f"{run_dir}/", *held_out]) == 0
    assert "you set" not in capsys.readouterr().err
    assert sorted({*run_dir.iterdir()} - {*before}) == [
        run_dir / "eval_2", run_dir / "export_step_2",
    ]  # fmt: skip
    (scored,) = metrics(run_dir / "eval_2")
    assert toy("other", "steps=4", "eval.every_steps=2", *held_out) == 0
    assert scored["eval/reward"] == pytest.approx(metrics(tmp_path / "other")[2]["eval/reward"])
    assert main(["eval", str(run_dir), *held_out]) == 2
    assert "eval_2 holds a run already" in capsys.readouterr().err
    assert (
        main(["eval", str(run_dir), *held_out, f"run_dir={tmp_path / 'more'}", "eval.limit=1"]) == 2
    )
    assert (
        main(
            ["eval", str(run_dir), *held_out, f"run_dir={tmp_path / 'more'}", "eval.temperature=1"]
        )
        == 0
    )
    assert main(["eval", str(tmp_path)]) == 2
    assert "it has no config.yaml" in capsys.readouterr().err


def test_a_run_that_began_elsewhere_goes_on_from_its_own_checkpoints(
    toy: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = f"checkpoint.resume={tmp_path / 'one' / 'checkpoints' / 'step_2'}"
    assert toy("one") == 0
    assert toy("two", start, "steps=3") == 0
    shutil.rmtree(tmp_path / "one")  # it is not needed any more
    capsys.readouterr()
    assert toy("two", start, "steps=4") == 0
    said = capsys.readouterr().out
    assert (
        f"going on from {tmp_path / 'two' / 'checkpoints' / 'step_3'}" in said
        and f"{start} is left aside" in said
    )
    assert [line["step"] for line in metrics(tmp_path / "two")] == [3, 4]


def test_a_run_that_lives_has_its_folder_alone(
    toy: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It can be looked into meanwhile."""
    run_dir, log, seen = tmp_path / "run", Journal.log, []

    def amid(journal: Journal, step: int, numbers: Metrics) -> dict[str, float]:
        if step == 2 and not seen:
            before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
            with ThreadPoolExecutor(
                1
            ) as thread:  # where there is no event loop, as in another process
                seen.append(thread.submit(toy, "run", "steps=3").result(60))
                assert {
                    path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()
                } == before
                seen.append(
                    thread.submit(
                        main, ["export", str(run_dir), "--out", str(tmp_path / "out")]
                    ).result(60)
                )
                seen.append(thread.submit(main, ["replay", str(run_dir), "--step", "1"]).result(60))
        return log(journal, step, numbers)

    monkeypatch.setattr(Journal, "log", amid)
    assert toy("run", "record.every_steps=1", "checkpoint.asynchronous=false") == 0
    assert seen == [2, 0, 0]
    assert f"run_dir={run_dir} is in use by process {os.getpid()} on " in capsys.readouterr().err
    assert not (run_dir / ".lock").exists()


def test_a_run_does_not_go_on_in_the_folder_of_another(
    toy: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert toy("one") == toy("two", "engine.lr=0.2") == 0
    files = {path: path.read_bytes() for path in (tmp_path / "two").rglob("*") if path.is_file()}
    assert (
        toy("two", "steps=4", f"checkpoint.resume={tmp_path / 'one' / 'checkpoints' / 'step_1'}")
        == 2
    )
    assert "holds a run of another configuration" in capsys.readouterr().err
    assert {
        path: path.read_bytes() for path in (tmp_path / "two").rglob("*") if path.is_file()
    } == files


def test_the_folder_of_a_run_means_its_newest_whole_checkpoint(
    toy: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert toy("one") == 0
    (tmp_path / "one" / "checkpoints" / "step_2" / "state.json").unlink()
    assert toy("two", f"checkpoint.resume={tmp_path / 'one'}") == 0
    said = capsys.readouterr().out
    assert "checkpoint skipped: step_2: state.json is missing" in said
    assert f"starting from {tmp_path / 'one' / 'checkpoints' / 'step_1'}" in said
    assert [line["step"] for line in metrics(tmp_path / "two")] == [2]
    for folder in ("nowhere", "two/export"):
        assert toy("three", f"checkpoint.resume={tmp_path / folder}") == 2
        assert (
            f"checkpoint.resume={tmp_path / folder} is no whole checkpoint"
            in capsys.readouterr().err
        )


@pytest.mark.parametrize(
    ("before", "now", "size"),
    [
        ("max_staleness=1", "max_staleness=0", 2),
        ("seed=0", "prompts_per_step=4", 4),
        ("prompts_per_step=4", "seed=0", 2),
    ],
)
def test_a_run_of_another_configuration_gives_its_engines_alone(
    before: str,
    now: str,
    size: int,
    toy: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert toy("one", before) == 0
    capsys.readouterr()
    assert (
        toy("two", now, "steps=4", f"checkpoint.resume={tmp_path / 'one'}", "record.every_steps=1")
        == 0
    )
    assert (
        "is of another configuration: policy as it was there; prompts start anew"
        in capsys.readouterr().out
    )
    after = metrics(tmp_path / "two")
    assert [line["step"] for line in after] == [3, 4] and not any(
        line["staleness/violations"] for line in after
    )
    numbers = [np.unique(batch_of(tmp_path / "two", step)["group"]).tolist() for step in (3, 4)]
    assert numbers == [list(range(2 * size, 3 * size)), list(range(3 * size, 4 * size))]


def test_reinforcement_learning_starts_from_a_fine_tuned_checkpoint(
    model: Path, whole: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_inputs(tmp_path)
    given = (f"checkpoint.resume={whole['sft']}", "algorithm=ppo", "steps=7", "eval.every_steps=0")
    assert main([*command("train", model, tmp_path / "run"), *given]) == 0
    assert "policy as it was there; prompts, critic start anew" in capsys.readouterr().out
    assert [line["step"] for line in metrics(tmp_path / "run")] == [7]


def test_a_longer_run_that_ends_before_its_export_is_not_complete(
    toy: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def die(*_: object) -> None:
        raise Killed

    export = tmp_path / "run" / "export" / "model.safetensors"
    assert toy("run") == 0
    before = export.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr("coupler.run.session.export_whole", die)
        with pytest.raises(Killed):
            toy("run", "steps=4")
    assert toy("run", "steps=4") == 0
    assert "is complete" not in capsys.readouterr().out
    assert export.read_bytes() != before
    assert toy("run", "steps=4") == 0
    assert "is complete at step 4" in capsys.readouterr().out


class Killed(BaseException):
    pass


@pytest.mark.parametrize("name", ["config.yaml", "run.json"])
def test_a_kill_amid_what_a_run_says_of_itself_leaves_its_folder_usable(
    name: str, toy: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Path.write_text

    def half(path: Path, text: str, *given: Any, **named: Any) -> int:
        if not path.name.startswith(name):
            return write(path, text, *given, **named)
        write(path, text[: len(text) // 2])
        raise Killed

    assert toy("run") == 0
    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", half)
        with pytest.raises(Killed):
            toy("run", "steps=4")
    assert toy("run", "steps=4") == 0
    assert len(json.loads((tmp_path / "run" / "run.json").read_text())) == 2


def test_other_data_is_refused_unless_it_starts_anew(
    model: Path, whole: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_inputs(tmp_path)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        rows.read_text()
        + json.dumps({"prompt": "and 9 + 2 ?", "answer": "11", "difficulty": 0})
        + "\n"
    )
    resume = f"checkpoint.resume={whole['train'] / 'checkpoints' / 'step_4'}"
    assert main(command("train", model, tmp_path / "run", resume)) == 2
    assert "checkpoint.reset_data=true" in capsys.readouterr().err
    assert (
        main(command("train", model, tmp_path / "run", resume, "checkpoint.reset_data=true")) == 0
    )
    assert [line["step"] for line in metrics(tmp_path / "run")] == [5, 6]


def test_old_checkpoints_go_the_best_stays(model: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    keep = (
        "checkpoint.every_steps=1",
        "checkpoint.keep_best=1",
        "checkpoint.best_metric=reward/mean",
    )
    write_inputs(tmp_path)
    assert main(command("train", model, run_dir, *keep)) == 0
    rewards = {line["step"]: line["reward/mean"] for line in metrics(run_dir) if line["step"]}
    best = max(rewards, key=lambda step: (rewards[step], step))
    kept = {int(p.name.removeprefix("step_")) for p in (run_dir / "checkpoints").iterdir()}
    assert kept == {5, 6, best}


@pytest.mark.parametrize("rejecting", [False, True])
def test_an_asynchronous_run_uses_nothing_twice(
    rejecting: bool, model: Path, forks: Forks, tmp_path: Path
) -> None:
    write_inputs(tmp_path)
    more = (
        "max_staleness=2",
        "algorithm.correction_cap=2",
        "steps=8",
        "checkpoint.every_steps=1",
        "checkpoint.asynchronous=false",
        "eval.every_steps=0",
    )
    dynamic = often_equal(tmp_path) if rejecting else ()
    given = command("train", model, tmp_path / "run", *more, *dynamic)
    process = forks.start(given)
    seen = tmp_path / "run" / "checkpoints"
    while not list(seen.glob("step_[3-9]")) and forks.wait(process, 0) is None:
        time.sleep(0.01)
    forks.kill(process)
    assert main(given) == 0
    used_once(tmp_path / "run", 8, lost=rejecting)


def test_the_calls_of_an_evaluation_are_of_its_step(
    toy: Callable[..., int], tmp_path: Path
) -> None:
    """So that a run that goes on after it measures what it would have measured."""
    (tmp_path / "some.py").write_text(
        "def score(completion):\n    return float('nan' if len(completion) % 3 else 1)\n"
    )
    given = (
        "deterministic=true",
        f"reward.target={tmp_path / 'some.py'}:score",
        "reward.max_invalid_fraction=1",
        "max_rejected_factor=1000",
        "eval.every_steps=2",
        f"eval.data.source={tmp_path / 'rows.jsonl'}",
    )
    assert toy("whole", *given, "steps=3") == 0
    assert toy("parts", *given) == toy("parts", *given, "steps=3") == 0
    whole, parts = (
        reproducible(tmp_path / name, but=("time/", "run/")) for name in ("whole", "parts")
    )
    assert whole == parts
    assert 0 < whole[2]["reward/invalid_rate"] < 1


def test_a_save_that_fails_ends_the_run_with_its_reason(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_inputs(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("a file where a folder must be")
    assert main(command("train", model, tmp_path / "run")) == 2
    assert "checkpoints" in capsys.readouterr().err


def test_a_full_disk_ends_a_run_in_a_sentence_and_it_goes_on_later(
    toy: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    full = tmp_path / "run" / "eval_2.jsonl"
    full.symlink_to("/dev/full")
    given = ("eval.every_steps=2", f"eval.data.source={tmp_path / 'rows.jsonl'}")
    assert toy("run", *given) == 2
    said = capsys.readouterr().err
    assert (
        f"coupler: the samples {full} cannot be written: [Errno 28] No space left on "
        "device.\n  try:  room "
    ) in said
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_1"]
    full.unlink()
    assert toy("run", *given) == 0
    assert [line["step"] for line in metrics(tmp_path / "run")] == [0, 1, 2]


def test_replaying_a_stage_gives_what_the_run_had(
    model: Path, whole: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for stage in ("train", "logprobs", "advantages"):
        worst = max(
            abs(difference)
            for *_, difference in replayed(whole["train"], 5, stage, capsys).values()
        )
        assert worst <= (1e-4 if stage == "logprobs" else 0), stage
    assert main(["replay", str(whole["train"]), "--step", "5", "--stage", "values"]) == 2
    assert "needs a run with a critic; algorithm=grpo has none" in capsys.readouterr().err
    assert main(["replay", str(whole["train"]), "--step", "3"]) == 2
    said = capsys.readouterr().err
    assert "step_2: none was made then, or it was deleted since.\n  kept:  step_4, step_6\n" in said
    assert (
        "  try:   --step 1, 5, or --stage advantages, which takes no weights; a run with "
        "checkpoint."
    ) in said
    assert (
        main(["export", str(whole["train"]), "--out", str(whole["train"] / "out"), "--step", "3"])
        == 2
    )
    assert (
        "step_3: none was made then, or it was deleted since.\n  kept:  step_4, step_6\n  "
        "try:   --step 4, 6\n"
    ) in (capsys.readouterr().err)
    assert main(["replay", str(whole["train"]), "--step", "99"]) == 2
    assert "it has:  1, 2, 3, 4, 5, 6" in capsys.readouterr().err


def test_the_conversations_of_a_step_are_shown(
    whole: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(whole["train"])
    assert main(["show", run, "--step", "5"]) == 0
    said = capsys.readouterr().out
    assert said.count("--- group ") == 8 and said.count("[prompt] <|im_start|>user") == 8
    assert re.search(r"\[sampled \d+ tokens, version 4, log-prob -\d+\.\d\d a token\] ", said)
    assert "ended: length" in said or "ended: stop" in said

    group = re.findall(r"--- group (\d+)", said)[0]
    assert main(["show", run, "--step", "5", "--group", group]) == 0
    assert capsys.readouterr().out.count("--- group ") == 4
    assert main(["show", run, "--step", "5", "--group", "999"]) == 2
    assert "step 5 has no group 999.\n  it has:  " in capsys.readouterr().err
    assert main(["show", run, "--step", "99"]) == 2
    assert "it has:  1, 2, 3, 4, 5, 6" in capsys.readouterr().err


def test_exporting_a_checkpoint(model: Path, whole: dict[str, Path], tmp_path: Path) -> None:
    assert main(["export", str(whole["train"]), "--out", str(tmp_path / "out")]) == 0
    exported, trained = load_file(tmp_path / "out" / "model.safetensors"), weights(whole["train"])
    assert all(np.array_equal(exported[name], trained[name]) for name in trained)
    assert main(["export", str(whole["train"]), "--out", str(tmp_path / "out")]) == 2
    assert main(["export", str(tmp_path), "--out", str(tmp_path / "new")]) == 2


def test_an_export_finds_a_folder_and_says_what_it_is(
    whole: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(whole["train"], tmp_path / "run")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write("cut off")
    export = ["export", str(tmp_path / "run"), "--step", "4"]
    assert main(export) == 0
    folder = tmp_path / "run" / "export_step_4"
    said = capsys.readouterr().out
    assert f"{folder}: the policy after step 4" in said
    assert f"  serve it:  vllm serve {folder}\n" in said

    card, last = ((each / "README.md").read_text() for each in (folder, whole["train"] / "export"))
    rewards = [line["reward/mean"] for line in metrics(whole["train"]) if "reward/mean" in line]
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "| steps | 4 |" in card and "| steps | 6 |" in last
    assert f"| reward of samples | {rewards[0]:.4g} first, {rewards[3]:.4g} last |" in card
    assert f"{rewards[0]:.4g} first, {rewards[-1]:.4g} last" in last
    assert f"coupler-core {version('coupler-core')}" in card and "vllm serve THIS_FOLDER" in card

    assert main(export) == 2
    assert f"--out {folder} exists already" in capsys.readouterr().err


def test_an_export_says_which_checkpoints_it_skipped(
    whole: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(whole["train"], tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "step_6" / "state.json").unlink()
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 0
    assert "coupler: checkpoint skipped: step_6: state.json is missing" in capsys.readouterr().out


def test_a_resume_without_an_optimizer_says_so(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_inputs(tmp_path)
    given = [*command("sft", model, tmp_path / "run"), "checkpoint.contents=[model,extra]"]
    assert main([*given, "steps=2"]) == 0
    assert "holds no optimizer" not in capsys.readouterr().out
    assert main([*given, "steps=3"]) == 0
    assert (
        "step_2 holds no optimizer: its moments and the learning rate's schedule start"
        in capsys.readouterr().out
    )


def test_two_deterministic_runs_are_equal_with_dynamic_sampling(
    model: Path, tmp_path: Path
) -> None:
    more = ("deterministic=true", "reward.num_workers=2", *often_equal(tmp_path))
    one, two = (run("train", model, tmp_path / name / "run", *more) for name in "ab")
    assert reproducible(one, but=("time/",)) == reproducible(two, but=("time/",))
    assert any(line.get("sampled/rejected_groups") for line in metrics(one))
