"""``coupler sft`` in the processes of ``torchrun``: the numbers of one process, and one
sentence where something is wrong.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from job_run import metrics
from test_supervised import arguments, held_out, run, write_conversations

from coupler.batch import Batch
from coupler.cli import main
from coupler.executors.torchrun.wire import receive, send
from coupler.interfaces import Layout, Model, Output, Part, Rank, StepResult
from coupler.metrics import Metric
from coupler.system.gate import LENGTH
from coupler.worker.spec import Trained

LIMIT_S = 240.0
STARTED = {
    "TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost", "MASTER_PORT": "1",
}  # fmt: skip
TRAIN = (
    "algorithm=grpo", "rollout=hf", "reward.target=json:loads", "data.max_prompt_tokens=64",
    "sampling.max_tokens=8",
)  # fmt: skip
SAME = ("loss", "nll", "train/grad_norm", "eval/loss", "eval/nll", "eval/perplexity")


def started(*given: str) -> subprocess.Popen[str]:
    """Two processes of a run, under torchrun."""
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    return subprocess.Popen(
        [sys.executable, *launch, "-m", "coupler", *given],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def in_two(model: Path, folder: Path, name: str, *options: str) -> list[dict[str, float]]:
    """The metrics of a run in two processes."""
    process = started(*arguments(model, folder, name, *options))
    said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, said
    return metrics(folder / name)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with conversations, of which some have a weight."""
    folder = tmp_path_factory.mktemp("torchrun")
    write_conversations(folder, 8)
    file = folder / "train.jsonl"
    first, *rest = file.read_text().splitlines(keepends=True)
    file.write_text("".join([first.replace("{", '{"weight": 2.5, ', 1), *rest]))
    return folder


@pytest.mark.parametrize("engine", ["fsdp", pytest.param("megatron", marks=pytest.mark.slow)])
def test_training_and_validation_are_those_of_one_process(
    engine: str, model: Path, rows: Path
) -> None:
    """At any micro-batch and number of data shards, and over tensor-parallel ranks."""
    usual = (
        f"engine={engine}",
        "prompts_per_step=4",
        *held_out(rows, "eval.every_steps=1", "eval.at_start=true"),
    )
    split = ("engine.tensor_parallel=2",) if engine == "megatron" else ()
    whole = run(model, rows, f"{engine}-one", *usual)
    others = [
        run(model, rows, f"{engine}-small", *usual, "engine.max_tokens_per_gpu=80"),
        in_two(model, rows, f"{engine}-two", *usual, *split),
    ]

    assert [line["step"] for line in whole] == [0, 1, 2, 3]
    for lines, (line, want) in ((o, pair) for o in others for pair in zip(o, whole, strict=True)):
        assert lines and {name for name in SAME if name in line} == {n for n in SAME if n in want}
        found = {name: line[name] for name in SAME if name in want}
        assert found == pytest.approx({name: want[name] for name in found}, rel=1e-5)


@dataclass
class Running:
    """A run in two processes, which has taken its first step."""

    process: subprocess.Popen[str]
    ranks: dict[int, int]  # process ids

    def rest(self) -> str:
        said, _ = self.process.communicate(timeout=LIMIT_S)
        return said


@pytest.fixture
def running(model: Path, rows: Path, tmp_path: Path) -> Iterator[Running]:
    process = started(*arguments(model, rows, tmp_path.name, "steps=100000"))
    end = time.monotonic() + LIMIT_S
    assert process.stdout
    while "step    1" not in process.stdout.readline():
        assert time.monotonic() < end
    yield Running(process, {rank_of(pid): pid for pid in children(process.pid)})
    process.kill()
    process.communicate(timeout=LIMIT_S)


def children(parent: int) -> list[int]:
    threads = Path(f"/proc/{parent}/task").iterdir()
    return [int(pid) for task in threads for pid in (task / "children").read_text().split()]


def rank_of(pid: int) -> int:
    given = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return next(int(text[5:]) for text in given if text.startswith("RANK="))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("rank", "text"),
    [
        (1, "coupler: policy rank 1 (pid {pid}, node "),
        pytest.param(0, "coupler: rank 0, which controls the run, ended.", marks=pytest.mark.slow),
    ],
)
def test_a_killed_process_ends_the_run_with_one_sentence(
    rank: int, text: str, running: Running
) -> None:
    pid = running.ranks[rank]
    os.kill(pid, signal.SIGKILL)
    said = running.rest()
    assert running.process.returncode == 1
    sentences = [line for line in said.splitlines() if line.startswith("coupler: ")]
    assert len(sentences) == 1, said
    assert sentences[0].startswith(text.format(pid=pid))
    assert not [pid for pid in running.ranks.values() if Path(f"/proc/{pid}").exists()]


def refused(capsys: pytest.CaptureFixture[str], given: list[str], code: int = 2) -> str:
    capsys.readouterr()
    assert main(given) == code
    return capsys.readouterr().err


def test_what_does_not_fit_torchrun_is_refused(
    model: Path, rows: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = arguments(model, rows, "refused")
    said = refused(capsys, [*given, "executor=torchrun"])
    assert "executor=torchrun is of processes that torchrun started" in said

    for name, value in STARTED.items():
        monkeypatch.setenv(name, value)
    said = refused(capsys, [*given, "engine.ranks=3"])
    assert "torchrun started 2 processes, and engine.ranks=3" in said
    assert "try:  engine.ranks=2" in said
    said = refused(capsys, ["train", *given[1:], *TRAIN, "executor=torchrun"])
    assert "executor=torchrun is of coupler sft: for coupler train set executor=ray." in said

    said = refused(capsys, ["train", *given[1:], *TRAIN])
    assert "torchrun started this process, and starts processes for coupler sft alone" in said

    monkeypatch.setenv("RANK", "1")  # which leaves the words to rank 0
    assert refused(capsys, [*given, "nonsense=1"]) == ""
    monkeypatch.delenv("MASTER_ADDR")
    assert "the environment of torchrun lacks a variable" in refused(capsys, given)
    assert not (rows / "refused" / "metrics.jsonl").exists()


# --- the channel ---


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        for end in (one, other):
            end.settimeout(10.0)
        yield one, other


def test_what_calls_need_arrives_as_it_was(ends: tuple[socket.socket, socket.socket]) -> None:
    arrays = {"tokens": np.arange(5, dtype=np.int32), "loss_mask": np.ones(5, bool)}
    batch = Batch(np.array([2, 3]), arrays, {"weight": np.array([1.5, 0], np.float32)})
    trained = Trained({"loss": Metric(0.1, how="sum")}, (StepResult(True, 1e-300, float("inf")),))
    values: list[Any] = [
        None, 1.5, "é", [1, (2,)], {"a": {1: Path("x")}}, frozenset({Part.PARAMS}), trained,
        (Output("logprobs"),), Rank(index=1, world=2), Layout((0, 0), (True, False)), Model("x"),
        {"empty": np.zeros((0, 3), np.float32)},
    ]  # fmt: skip
    for value in values:
        send(ends[0], value)
        found = receive(ends[1])
        assert type(found) is type(value)
        assert str(found) == str(value)

    send(ends[0], batch)
    found = receive(ends[1])
    assert isinstance(found, Batch) and found["tokens"].dtype == np.int32
    assert all(np.array_equal(found[name], batch[name]) for name in (*arrays, "weight"))
    for odd in (object(), np.array([object()]), Path.cwd, 1j):
        with pytest.raises(TypeError, match="cannot be sent"):
            send(ends[0], odd)


@pytest.mark.parametrize(
    "header",
    [
        b'{"is": "subprocess:Popen", "of": [["args", "true"]]}',
        b'{"is": "coupler.system.files:remove", "of": []}',
        b'{"is": "coupler.cli:main", "of": []}',
        b'{"enum": "coupler.batch:Batch", "value": 1}',
        b'{"array": "|O", "shape": [1]}',
        b'{"array": "<f8", "shape": [99999999999, 9]}',
        b'{"what": 1}',
    ],
)
def test_a_message_makes_nothing_but_values(
    header: bytes, ends: tuple[socket.socket, socket.socket]
) -> None:
    ends[0].sendall(LENGTH.pack(len(header)) + header)
    with pytest.raises(ValueError, match=r"class of a message|an array of|no message has"):
        receive(ends[1])


def test_a_long_header_and_a_closed_connection_are_told_apart(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ends[0].sendall(LENGTH.pack(1 << 40))
    with pytest.raises(ValueError, match="a header of"):
        receive(ends[1])
    ends[0].close()
    with pytest.raises(ConnectionError, match="closed the connection"):
        receive(ends[1])
