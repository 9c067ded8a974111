"""What a run leaves behind: checkpoint, export, metrics."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import save_file

from coupler.batch import Batch
from coupler.builtin.trackers.jsonl import JsonlTracker
from coupler.builtin.transports.disk import DiskTransport
from coupler.builtin.transports.inproc import InprocTransport
from coupler.config.schema import CheckpointConfig, RunConfig
from coupler.errors import CouplerError, WaitTimeout, WeightSyncError
from coupler.executors import Local
from coupler.executors.waits import Waits
from coupler.interfaces import Endpoint, Model, Rank, SendReceipt, SyncReceipt, WeightUpdate
from coupler.loop.engine_group import EngineGroup
from coupler.loop.state import State
from coupler.loop.transfer import verify
from coupler.plugins.manager import Plugins
from coupler.run import step_record
from coupler.run.checkpoint import MANIFEST, Checkpoints, check, read
from coupler.run.run_folder import Journal
from coupler.run.step_record import Recorder
from coupler.testing.models import read_tensors, write_toy
from coupler.testing.toy_config import ToyAlgorithmConfig, ToyEngineConfig
from coupler.worker.spec import WorkerSpec
from coupler.worker.torch.hf_export import export
from coupler.worker.worker import reverse_elements


def policy(tmp_path: Path) -> EngineGroup:
    model = Model(str(write_toy(tmp_path / "model")))
    algorithm = ("coupler.testing.toy:ToyAlgorithm", ToyAlgorithmConfig())
    spec = WorkerSpec(
        "policy", "coupler.testing.toy:ToyEngine", ToyEngineConfig(), model, algorithm
    )
    group = EngineGroup(Local(inline=True, waits=Waits(60.0, 60.0)), spec, [Rank()])
    asyncio.run(group.setup())
    return group


def save(group: EngineGroup, folder: Path, step: int, **settings: int) -> None:
    checkpoints = Checkpoints(folder, CheckpointConfig(**settings), {"data": "d"})  # type: ignore[arg-type]

    async def write() -> None:
        async with checkpoints:
            at, hold = State({"at": 1}), lambda role: nullcontext()
            await checkpoints.save(step, {"policy": group}, at, hold=hold, values={}, healthy=True)

    asyncio.run(write())


def test_a_checkpoint_is_complete_and_says_what_it_is(tmp_path: Path) -> None:
    group = policy(tmp_path)
    folder = tmp_path / "checkpoints" / "step_3"
    folder.mkdir(parents=True)
    (folder / "old").touch()
    save(group, folder.parent, 3)
    manifest = json.loads((folder / MANIFEST).read_text())
    assert (
        manifest["step"] == 3
        and manifest["parts"] == ["optimizer", "params"]
        and manifest["data"] == "d"
    )
    written = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert written == {MANIFEST, *manifest["files"]} and any(
        name.startswith("policy/") for name in written
    )
    for name, entry in manifest["files"].items():
        content = (folder / name).read_bytes()
        assert entry == {"bytes": len(content), "sha256": [hashlib.sha256(content).hexdigest()]}
        assert len(content) <= manifest["chunk_bytes"]
    assert sorted(p.name for p in folder.parent.iterdir()) == ["step_3"]
    assert check(folder) == "" and read(folder).state == State({"at": 1})


HANGS = """
import asyncio, os, sys, time
from contextlib import nullcontext
from pathlib import Path
from coupler import cli
from coupler.cli.commands import plugins
from coupler.run import checkpoint
from coupler.system import hashing
from coupler.run.checkpoint import Checkpoints, State
from coupler.config.schema import CheckpointConfig
from test_outputs import policy

async def save():
    settings = CheckpointConfig(deadline_s=1.0)
    async with Checkpoints(folder / "checkpoints", settings, {}) as checkpoints:
        hold = lambda role: nullcontext()
        await checkpoints.save(3, {"policy": group}, State({}), hold=hold, values={}, healthy=True)

folder = Path(sys.argv[1])
group = policy(folder)
WHAT = lambda *_: time.sleep(1000)
plugins.run = lambda _: asyncio.run(save())
sys.exit(cli.main(["plugins"]))
"""


@pytest.mark.parametrize("what", ["os.fsync", "hashing._read", "Checkpoints._prune"])
def test_a_disk_that_hangs_ends_the_process_at_the_deadline(tmp_path: Path, what: str) -> None:
    command = [sys.executable, "-c", HANGS.replace("WHAT", what), str(tmp_path)]
    ended = subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode, ended.stderr) == (
        2,
        f"coupler: {tmp_path}/checkpoints/step_3.part was not written after 1 s.\n"
        "  look at:  the disk, checkpoint.deadline_s\n",
    )


def test_an_altered_manifest_does_not_count(tmp_path: Path) -> None:
    save(policy(tmp_path), tmp_path, 3)
    path = tmp_path / "step_3" / MANIFEST
    manifest = json.loads(path.read_text())
    others = [{name: value for name, value in manifest.items() if name != key} for key in manifest]
    others += [
        {**manifest, **changed}
        for changed in ({"step": 4}, {"parts": ["params"]}, {"roles": {}}, {"more": 1})
    ]
    for text in (*map(json.dumps, others), "[]", "", path.read_text()[:-2]):
        path.write_text(text)
        assert check(tmp_path / "step_3") == "MANIFEST.json was altered after it was written", text
    path.write_text(json.dumps(manifest))  # in other words
    assert check(tmp_path / "step_3") == ""


@pytest.mark.parametrize("keep_last", [0, 1])
def test_what_a_kill_left_unfinished_goes_with_the_next_checkpoint(
    keep_last: int, tmp_path: Path
) -> None:
    for name in ("step_1", "step_2", "step_5", "step_1.part", "step_9.part", "step_mine.part"):
        (tmp_path / name / "policy").mkdir(parents=True)
    (tmp_path / "step_2" / MANIFEST).write_text("altered: left to be looked at")
    save(policy(tmp_path), tmp_path, 3, keep_last=keep_last)
    assert {p.name for p in tmp_path.glob("step_*")} == {
        "step_2",
        "step_3",
        "step_5",
        "step_mine.part",
    }


def test_export_holds_what_the_engine_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # two shards
    monkeypatch.setattr("coupler.worker.torch.hf_export.MAX_SHARD_BYTES", 11_000)
    group = policy(tmp_path)
    asyncio.run(group.all("export", tmp_path / "out", tmp_path / "model"))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    source, written = read_tensors(tmp_path / "model"), read_tensors(tmp_path / "out")
    assert index["weight_map"].keys() == source.keys() == written.keys()
    assert all(np.array_equal(source[name], written[name]) for name in source)
    assert (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize("change", ["an element", "a name", "a shape", "a dtype", "truncated"])
def test_an_export_is_compared_with_what_was_streamed(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(tensors: dict[str, np.ndarray], path: Path, metadata: dict[str, str]) -> None:
        a = tensors["a"].copy()
        if change == "an element":
            a.flat[3] = np.copysign(0.0, -1)  # equal as a number
        found = {"a": {"a shape": a[:1], "a dtype": a.astype(np.float64)}.get(change, a)}
        save_file({"b": a} if change == "a name" else found, path, metadata)
        if change == "truncated":
            path.write_bytes(path.read_bytes()[:-4])

    stream = [("a", np.array([1, np.nan, 2, 0], np.float32))]
    assert export(stream, tmp_path / "good", tmp_path, write=True) == 1
    monkeypatch.setattr("safetensors.numpy.save_file", other)
    says = (
        "cannot be read back"
        if change == "truncated"
        else "does not hold what was written.\n  first difference: a"
    )
    with pytest.raises(CouplerError, match=says):
        export(stream, tmp_path / "bad", tmp_path, write=True)


BATCH = Batch(lengths=np.array([1]), tokens={"tokens": np.array([1])}, seqs={})
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("error", [FULL, SafetensorError(f"I/O error: {FULL}")])
@pytest.mark.parametrize("during", [True, False])
def test_a_full_disk_is_named_whatever_the_engine_raises(
    error: Exception, during: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    group = policy(tmp_path)
    monkeypatch.setattr(
        "coupler.testing.toy.ToyEngine.save" if during else "coupler.testing.toy.Done.wait", fail
    )
    part = tmp_path / "step_3.part" / "policy"
    with pytest.raises(
        CouplerError, match=f"the checkpoint {part} cannot be written: .*No space left on device"
    ):
        save(group, tmp_path, 3)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(
        RunConfig(run_dir=str(tmp_path), trackers=["jsonl"]), "steps: 3", Plugins.load(), {}, {}
    )


@pytest.mark.parametrize("cause", [None, KeyError("cause")])
def test_the_end_of_a_journal_hides_no_failure(cause: Exception | None, journal: Journal) -> None:
    """Nor does the end of one tracker keep another from its own."""

    class Full(JsonlTracker):
        def close(self) -> None:
            super().close()
            raise FULL

    def run() -> None:
        with journal:
            if cause:
                raise cause

    journal.trackers = {name: Full(None, journal.run_dir) for name in ("one", "two")}
    with pytest.raises(
        KeyError if cause else CouplerError, match="cause" if cause else "of tracker one in"
    ):
        run()
    assert all(tracker.file.closed for tracker in journal.trackers.values())  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("taken", "write", "what"),
    [
        ("metrics.jsonl", lambda journal: journal.log(1, {}), "the numbers of tracker jsonl in {}"),
        ("config.yaml.part", lambda journal: journal.log(1, {}), "what {} says of the run"),
        ("run.json.part", lambda journal: journal.log(1, {}), "what {} says of the run"),
        (
            "record",
            lambda journal: Recorder(journal.run_dir / "record", 1).write(1, BATCH, {}),
            "the record {}/record",
        ),
        (
            "export",
            lambda journal: export(
                [("a", np.zeros(1))], journal.run_dir / "export", journal.run_dir, write=True
            ),
            "the export {}/export",
        ),
    ],
)
def test_what_cannot_be_written_is_named(
    taken: str, write: Callable[[Journal], None], what: str, tmp_path: Path
) -> None:
    """A file without room, or in place of a folder; of which a full disk is one case,
    and a wrong owner another.
    """
    (tmp_path / taken).symlink_to("/dev/full")
    journal = Journal(
        RunConfig(run_dir=str(tmp_path), trackers=["jsonl"]), "steps: 3", Plugins.load(), {}, {}
    )
    with pytest.raises(
        CouplerError,
        match=rf"^{what.format(tmp_path)}.* cannot be written: \[Errno .*\n  try:  room",
    ):
        write(journal)


def test_a_record_of_another_run_is_not_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The folder of records may be a link to that run's."""
    (tmp_path / "linked").symlink_to(tmp_path / "record")
    Recorder(tmp_path / "record", 1, "theirs").write(1, BATCH, {})
    Recorder(tmp_path / "linked", 1, "ours").write(1, BATCH, {})
    Recorder(tmp_path / "linked", 1, "ours").write(2, BATCH, {})

    with pytest.raises(CouplerError, match="is the record of another run"):
        step_record.read(tmp_path / "linked", 1, "ours")
    about = [json.loads((tmp_path / f"record/step_{i}/record.json").read_text()) for i in (1, 2)]
    assert [each["run"] for each in about] == ["theirs", "ours"]
    assert "step 1 is not recorded" in caplog.text and "step 2" not in caplog.text


def test_a_rank_that_does_not_write_still_iterates(tmp_path: Path) -> None:
    seen = []
    stream = (seen.append(i) or (str(i), np.zeros(1)) for i in range(3))
    assert export(stream, tmp_path / "out", tmp_path, write=False) == 3  # type: ignore[arg-type]
    assert len(seen) == 3 and not (tmp_path / "out").exists()


def test_jsonl_keeps_the_last_line_of_each_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file that somebody had joined with itself kept every line twice, in silence."""
    file = tmp_path / "metrics.jsonl"
    file.write_text(
        "".join(f'{{"step": {step}, "loss": {i}}}\n' for i, step in enumerate([0, 1, 0, 1, 2]))
    )
    tracker = JsonlTracker(None, tmp_path)
    tracker.rewind(1)
    tracker.close()
    kept = [json.loads(line) for line in file.read_text().splitlines()]
    assert kept == [{"step": 0, "loss": 2}, {"step": 1, "loss": 3}]
    assert "steps 0, 1, which are there more than once" in caplog.text


def test_jsonl_has_one_object_a_step_and_no_nan(tmp_path: Path) -> None:
    tracker = JsonlTracker(None, tmp_path)
    tracker.log(1, {"a": 1.5, "b": float("nan")})
    tracker.log(2, {"a": 2.0})
    tracker.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": 1, "a": 1.5, "b": None}, {"step": 2, "a": 2.0}]


@pytest.mark.parametrize("transport", [InprocTransport(), DiskTransport()])
def test_a_transport_does_not_wait_for_ever(transport: InprocTransport | DiskTransport) -> None:
    endpoint = transport.bind(Rank())
    update = WeightUpdate(9, "full", "", (endpoint,), 1, deadline_s=0.05)
    with pytest.raises(WaitTimeout, match="weights of version 9"):
        next(transport.receive(update, Rank(), {}))
    assert transport.bind(Rank(index=1, world=2)) == Endpoint()


def test_reversed_elements_keep_shape_and_values() -> None:
    array = np.arange(6.0).reshape(2, 3)
    assert reverse_elements(array).tolist() == [[5, 4, 3], [2, 1, 0]]


SENT = SendReceipt(version=4, num_tensors=3, num_bytes=12, seconds=0.0)


@pytest.mark.parametrize(
    ("receipt", "what"),
    [
        (SyncReceipt(3, 3, 3, 12), "reports version 3, sent was 4"),
        (SyncReceipt(4, 2, 2, 12), "2 of 3 tensors arrived"),
        (
            SyncReceipt(4, 3, 3, 12, missing=("lm_head.weight",)),
            "1 of its parameters got nothing, first: lm_head.weight",
        ),
        (SyncReceipt(4, 3, 2, 12, unexpected=("x",)), "1 tensors match no parameter, first: x"),
        (SyncReceipt(4, 3, 2, 12), "2 of 3 received tensors were loaded"),
    ],
)
def test_a_receipt_that_does_not_add_up(receipt: SyncReceipt, what: str) -> None:
    with pytest.raises(WeightSyncError, match=what):
        verify(SENT, receipt, 0)
    verify(SENT, SyncReceipt(4, 3, 3, 12), 0)
