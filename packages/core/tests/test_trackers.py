"""Trackers: their options, what a run gives them, and that none stops or slows it."""

from __future__ import annotations

import json
import sys
import threading
import time
from asyncio import CancelledError
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
from fake_plugins import install

from coupler.config.compose import Composed, compose, dump_yaml
from coupler.config.schema import Job
from coupler.errors import ConfigError, CouplerError, PluginError
from coupler.interfaces import Tracker
from coupler.metrics import Metric
from coupler.plugins.manager import Plugins
from coupler.run import background
from coupler.run.background import Background
from coupler.run.effect import changes
from coupler.run.explain import explain
from coupler.run.inputs import check_inputs
from coupler.run.picture import draw_reward
from coupler.run.resume import config_hash
from coupler.run.run_folder import Journal
from coupler.system.reads import track
from coupler.system.yaml_file import parse_yaml

PLUGIN = """
from dataclasses import dataclass
from coupler import Backend, hookimpl

@dataclass
class BoardConfig:
    name: str = "board"
    project: str = "mine"
    width: int = 3

    def __post_init__(self):
        if self.width < 1:
            raise ValueError("width must be at least 1")

@dataclass
class FarConfig(BoardConfig):
    name: str = "far"

@hookimpl
def coupler_backends():
    target = "test_trackers:Recording"
    yield Backend(kind="tracker", name="board", target=target, config=BoardConfig)
    yield Backend(kind="tracker", name="bare", target=target)
    yield Backend(kind="tracker", name="far", target="test_trackers:Far", config=FarConfig)
"""
NEEDED = [
    "engine=toy", "rollout=toy", "algorithm=toy", "model.path=/m", "data.source=x.jsonl",
    "reward.target=a:b",
]  # fmt: skip


class Recording(Tracker):
    """Keeps every call, with the tracker that got it."""

    calls: ClassVar[list[tuple[Any, ...]]] = []

    def start(self, run: str, config: Mapping[str, Any]) -> None:
        self.calls.append(("start", run, config))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.calls.append(("log", step, dict(values)))

    def samples(self, step: int, rows: Any) -> None:
        self.calls.append(("samples", step, rows))

    def picture(self, name: str, path: Path) -> None:
        self.calls.append(("picture", name, path))

    def rewind(self, step: int) -> int | None:
        self.calls.append(("rewind", step))
        return None

    def ended(self, how: str) -> None:
        self.calls.append(("ended", how))

    def close(self) -> None:
        self.calls.append(("close",))


class Far(Recording):
    """Is called in the background, and has no more than step 1 when it is rewound."""

    in_background = True

    def rewind(self, step: int) -> int:
        super().rewind(step)
        return 1


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plugins]:
    folder = tmp_path_factory.mktemp("site")
    install(folder, "coupler-tracker-board", PLUGIN)
    sys.path.insert(0, str(folder))
    yield Plugins.load()
    sys.path.remove(str(folder))
    sys.modules.pop("coupler_tracker_board", None)


@pytest.fixture
def calls() -> list[tuple[Any, ...]]:
    Recording.calls.clear()
    return Recording.calls


def composed(plugins: Plugins, *overrides: str, complete: bool = True) -> Composed:
    return compose(plugins, [*NEEDED, *overrides], None, Job.TRAIN, complete=complete)


# --- options ---


def test_options_are_in_a_section_of_each_tracker(plugins: Plugins, tmp_path: Path) -> None:
    made = composed(plugins, "trackers=[jsonl,bare,board]", "tracker.board.project=yours")
    assert made.config.tracker.board.project == "yours" and made.config.tracker.board.width == 3
    assert not hasattr(made.config.tracker, "bare"), "it has no options"
    assert made.origin["tracker.board.project"] == "command line"

    file = tmp_path / "run.yaml"
    file.write_text(dump_yaml(made.config))
    again = compose(plugins, [], str(file), Job.TRAIN)
    assert again.config == made.config
    without = composed(plugins, "trackers=[jsonl]")
    assert without.config.tracker is None and "tracker:" not in dump_yaml(without.config)


@pytest.mark.parametrize(
    ("override", "error", "said"),
    [
        ("tracker.board.projct=x", ConfigError, "did you mean:  tracker.board.project"),
        ("tracker.board.width=wide", ConfigError, "tracker.board.width takes an integer, got"),
        ("tracker.board.width=0", ConfigError, "tracker.board.width must be at least 1"),
        ("tracker.board=x", ConfigError, "tracker.board is a section, got 'x'"),
        ("tracker.jsonl.x=1", ConfigError, "the options of tracker.jsonl are known where"),
        ("tracker=board", ConfigError, "tracker is a section, got 'board'"),
        ("tracker=bord", ConfigError, "tracker is a section, got 'bord'"),
        ("tracker.bord.width=1", PluginError, "did you mean: tracker=board"),
        ("trackers=[bord]", PluginError, "no tracker named 'bord' is installed"),
    ],
)
def test_what_is_no_option_is_one_sentence(
    plugins: Plugins, override: str, error: type[CouplerError], said: str
) -> None:
    with pytest.raises(error, match=said):
        composed(plugins, "trackers=[board]", override)


@pytest.mark.parametrize("text", ["{5: x}", "{a b: {width: 3}}", "{gone: null}"])
def test_a_file_may_name_trackers_that_there_are(
    plugins: Plugins, tmp_path: Path, text: str
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"tracker: {text}\n")
    with pytest.raises(PluginError, match="no tracker named"):
        compose(plugins, NEEDED, str(file), Job.TRAIN)


def test_options_are_known_where_trackers_has_the_tracker(plugins: Plugins) -> None:
    with pytest.raises(ConfigError, match=r"try:  trackers=\[console,jsonl,NAME\]"):
        composed(plugins, "tracker=board")
    said = explain(composed(plugins, "trackers=[board]"), "tracker.board.width")
    assert "default:   3" in said
    with pytest.raises(ConfigError, match=r"try:  trackers=\[console,jsonl,board\]"):
        explain(composed(plugins), "tracker.board.width")


def test_the_name_of_a_tracker_is_no_option(plugins: Plugins) -> None:
    made = composed(plugins, "trackers=[board]", "tracker.board.name=other")
    with pytest.raises(ConfigError, match=r"tracker.board.name=other is no option of the tracker"):
        check_inputs(made.config, Job.TRAIN)


def test_a_tracker_that_is_not_there_matters_to_a_run_alone(plugins: Plugins) -> None:
    """A finished run can be looked at where its trackers are not installed."""
    assert composed(plugins, "trackers=[gone]", complete=False).config.trackers == ["gone"]
    with pytest.raises(PluginError, match="no tracker named 'gone'"):
        composed(plugins, "tracker.gone.x=1", complete=False)


def test_another_tracker_or_project_goes_on_with_the_run(plugins: Plugins) -> None:
    before = composed(plugins, "trackers=[board,far]", "tracker.board.project=a")
    for others in (("trackers=[board]", "tracker.board.project=b"), ("trackers=[jsonl]",)):
        now = composed(plugins, *others)
        old, new = (dump_yaml(each.config) for each in (before, now))
        plain = [parse_yaml(text, Path("config.yaml")) for text in (old, new)]
        assert not changes(*plain, now.options), others
        assert config_hash(old) == config_hash(new)


def test_options_of_a_tracker_that_a_run_does_not_have_are_unread(
    plugins: Plugins, tmp_path: Path, calls: list[tuple[Any, ...]]
) -> None:
    made = composed(
        plugins, "trackers=[board]", "tracker.board.width=4", "tracker.far.width=4",
        f"run_dir={tmp_path}",
    )  # fmt: skip
    config, reads = track(made.config)
    journal = Journal(config, "steps: 3", plugins, {}, {})
    assert reads.unread(made.set_keys).count("tracker.far.width") == 1
    assert "tracker.board.width" not in reads.unread(made.set_keys)
    assert journal.trackers["board"].config.width == 4


# --- what a run gives ---


def opened(plugins: Plugins, folder: Path, name: str, done: int = 0) -> Journal:
    made = composed(plugins, f"trackers=[jsonl,{name}]", f"run_dir={folder}", "steps=9")
    return Journal(track(made.config)[0], "steps: 9", plugins, {"run": "abc"}, {}, done)


def rewards(step: int) -> dict[str, Metric]:
    return {"reward/mean": Metric(float(step), how="sum")}


@pytest.mark.parametrize("name", ["board", "far"])
@pytest.mark.parametrize(
    ("error", "how"),
    [
        (None, "done"),
        (KeyboardInterrupt(), "interrupted"),
        (CancelledError(), "interrupted"),
        (CouplerError("it failed.\n  try:  again"), "it failed."),
        (KeyError("k"), "KeyError: 'k'"),
    ],
)
def test_a_tracker_gets_everything_of_a_run(
    plugins: Plugins,
    tmp_path: Path,
    calls: list[tuple[Any, ...]],
    name: str,
    error: BaseException | None,
    how: str,
) -> None:
    rows = [{"prompt": "a", "reward": 1.0}]
    journal = opened(plugins, tmp_path, name)
    journal.log(0, rewards(0))
    journal.show(1, rows)
    journal.log(1, rewards(1))
    journal.__exit__(type(error) if error else None, error, None)

    (_, run, config), *others = calls
    assert run == "abc" and config["engine"]["name"] == "toy" and config["steps"] == 9
    assert others[:3] == [
        ("log", 0, {"reward/mean": 0.0, "run/steps": 9.0}),
        ("samples", 1, rows),
        ("log", 1, {"reward/mean": 1.0, "run/steps": 9.0}),
    ]
    pictures = [call for call in others[3:] if call[0] == "picture"]
    assert pictures in ([], [("picture", "reward", tmp_path / "reward.png")])
    assert others[3 + len(pictures) :] == [("ended", how), ("close",)]


def test_the_picture_is_the_curve_of_the_reward(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lines = [{"step": step, "loss": 1.0, "reward/mean": step / 3} for step in range(4)]
    assert draw_reward(tmp_path) is None, "there are no numbers"
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text)
    drawn = draw_reward(tmp_path)
    assert drawn is not None and drawn.read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("matplotlib")
    lines = [{"step": step, "reward/mean": 1.0} for step in range(4)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "reward.png").mkdir()
    assert draw_reward(tmp_path) is None
    assert "reward.png cannot be written" in caplog.text


def test_what_a_kill_left_waiting_is_given_again(
    plugins: Plugins, tmp_path: Path, calls: list[tuple[Any, ...]]
) -> None:
    """Its last step was 1, and the run goes on from step 3."""
    first = opened(plugins, tmp_path, "far")
    for step in range(5):
        first.log(step, rewards(step) if step != 3 else {"reward/mean": Metric(float("nan"))})
    first.__exit__(None, None, None)
    calls.clear()

    with opened(plugins, tmp_path, "far", done=3) as again:
        again.log(4, rewards(4))
    assert calls[1] == ("rewind", 3)
    assert [call[1] for call in calls if call[0] == "log"] == [2, 3, 4]
    assert calls[3][2]["reward/mean"] != calls[3][2]["reward/mean"], "null was NaN"


# --- one that fails or hangs ---


@dataclass
class Broken(Tracker):
    """Fails, exits or hangs in every call but ``start``."""

    how: str

    in_background = True
    config: Any = None
    run_dir: Path = Path()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self.how == "hangs":
            threading.Event().wait(100)
        raise SystemExit(3) if self.how == "exits" else ValueError("no\nconnection")


@pytest.mark.parametrize(("how", "said"), [("fails", "ValueError: no"), ("exits", "SystemExit")])
def test_a_tracker_that_fails_is_one_warning(
    how: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = Background("acme", Broken(how))
    for step in range(5):
        tracker.log(step, {})
    tracker.close()
    first, last = (record.getMessage() for record in caplog.records)
    assert first.startswith(f"tracker acme failed, and the run goes on: {said}")
    assert last == "tracker acme lost 5 of 5 calls"


def test_a_tracker_that_hangs_neither_slows_nor_keeps_a_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background, "MAX_CALLS", 3)
    monkeypatch.setattr(background, "CLOSE_S", 0.5)
    tracker, begun = Background("acme", Broken("hangs")), time.monotonic()
    for step in range(100):
        tracker.log(step, {})
    assert time.monotonic() - begun < 5
    tracker.ended("done")
    tracker.close()
    assert time.monotonic() - begun < 10
    slow, lost = (record.getMessage() for record in caplog.records)
    assert slow == "tracker acme is slow, and the run goes on without it for now"
    assert "did not take the rest within 0 s of the end of the run: 3 calls are lost" in lost


def test_a_tracker_that_has_room_again_gets_what_comes_then(
    plugins: Plugins, calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = threading.Event()

    class Slow(Recording):
        def log(self, step: int, values: Mapping[str, float]) -> None:
            free.wait(100)
            super().log(step, values)

    monkeypatch.setattr(background, "MAX_CALLS", 2)
    tracker = Background("acme", Slow(None, Path()))
    for step in range(10):
        tracker.log(step, {})
    free.set()
    end = time.monotonic() + 30
    while not tracker.calls.empty() and time.monotonic() < end:
        time.sleep(0.01)
    tracker.log(10, {})
    tracker.close()
    steps = [call[1] for call in calls if call[0] == "log"]
    assert steps[-1] == 10 and steps == sorted(steps) and len(steps) + tracker.lost == 11


def test_a_second_start_of_options_makes_new_ones(plugins: Plugins) -> None:
    """Nothing that a run gave its trackers leaks into the next configuration."""
    one = composed(plugins, "trackers=[board]", "tracker.board.width=9").config
    two = composed(plugins, "trackers=[board]").config
    assert (one.tracker.board.width, two.tracker.board.width) == (9, 3)
