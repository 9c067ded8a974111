"""``coupler report`` compares runs on one page, with their own numbers."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from browser import BROWSER, tab
from job_run import metrics, run, toy_train

from coupler.cli import main
from coupler.run import samples

HOSTILE = (
    "</script><script>alert(1)</script>\"'><img src=//x.test/a onerror=alert(2)>"
    "{{ 7 * 7 }}\u202e\x1b[2J\ud800&amp;"
)
PLOT = Path(__file__).parents[1] / "examples" / "quickstart" / "plot.py"
SEEDS, OTHER = ("first", "second"), "slower"
PIXEL = 0.06


class Page(HTMLParser):
    """The parts of a page: tables by their ids, scripts, tags with attributes, and
    text.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text()
        self.tables: dict[str, list[list[str]]] = {}
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.scripts: list[str] = []
        self.text, self.table, self.raw, self.in_cell = "", "", "", False
        self.feed(self.source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        self.raw = tag
        if tag == "table":
            self.table = self.tags[-1][1].get("id", "samples")
            self.tables.setdefault(self.table, [])
        elif tag == "tr":
            self.tables[self.table].append([])
        elif tag in ("td", "th"):
            self.tables[self.table][-1].append("")
            self.in_cell = True
        elif tag == "script":
            self.scripts.append("")
        elif tag == "br":
            self.handle_data(" ")

    def handle_endtag(self, tag: str) -> None:
        self.raw = ""
        self.in_cell = self.in_cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self.raw == "script":
            self.scripts[-1] += data
        elif self.raw != "style":
            self.text += data
            if self.in_cell:
                self.tables[self.table][-1][-1] += data

    def row(self, table: str, *head: str) -> list[str]:
        """Return the cells behind ``head`` in the one row that begins so."""
        (found,) = (row for row in self.tables[table] if row[: len(head)] == [*head])
        return found[len(head) :]

    def numbers(self) -> dict[str, dict[str, Any]]:
        """Return what the script reads, by the metric of each chart."""
        names = [row[0] for row in self.tables["ends"][1:]]
        return dict(zip(names, json.loads(self.scripts[0]), strict=True))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs that differ by their seed, and one with another rate."""
    folder = tmp_path_factory.mktemp("runs")
    more = ("steps=4", "samples.every_steps=2")
    for seed, name in enumerate(SEEDS):
        assert main([*toy_train(folder, *more), f"run_dir={folder / name}", f"seed={seed}"]) == 0
    assert main([*toy_train(folder, *more), f"run_dir={folder / OTHER}", "engine.lr=0.01"]) == 0
    return folder


def report(file: Path, *folders: Path) -> Page:
    assert main(["report", *map(str, folders), "--html", str(file)]) == 0
    return Page(file)


def shown(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


@pytest.fixture
def page(runs: Path, tmp_path: Path) -> Page:
    return report(tmp_path / "report.html", *(runs / name for name in (*SEEDS, OTHER)))


@pytest.mark.parametrize("metric", ["sampled/reward", "train/grad_norm", "train_infer/kl"])
def test_curves_are_the_numbers_of_the_runs(metric: str, page: Page, runs: Path) -> None:
    first, second, other = (
        [line[metric] for line in metrics(runs / name) if metric in line]
        for name in (*SEEDS, OTHER)
    )
    together, alone = page.numbers()[metric]["curves"]
    pairs = list(zip(first, second, strict=True))
    expected = {
        "mean": [sum(pair) / 2 for pair in pairs],
        "low": [*map(min, pairs)],
        "high": [*map(max, pairs)],
    }
    for name, values in expected.items():
        assert list(map(shown, together[name])) == list(map(shown, values))
    assert list(map(shown, alone["mean"])) == list(map(shown, other))
    assert together["steps"] == alone["steps"] == [1, 2, 3, 4]
    assert "low" not in alone

    ends = [cell.split() for cell in page.row("ends", metric)]
    assert ends == [[shown(expected["mean"][-1])] * 2, [shown(other[-1])] * 2]


def test_the_drawn_lines_are_at_their_values(page: Page) -> None:
    """Read the picture by the labels of its axes, as a person does."""
    svg = re.search(r'<svg class="chart".*?aria-label="Reward of all.*?</svg>', page.source, re.S)
    assert svg
    labels = re.findall(r'class="(x|y)" x="([\d.]+)" y="([\d.]+)">([^<]*)<', svg[0])
    y = [(float(at) - 4, float(text)) for kind, _, at, text in labels if kind == "y"]
    x = [(float(at), float(text)) for kind, at, _, text in labels if kind == "x" and text != "step"]
    lines = re.findall(r'class="line c\d" d="M([^"]*)"', svg[0])
    assert len(lines) == 2
    assert svg[0].count('class="band') == 1
    for curve, line in zip(page.numbers()["sampled/reward"]["curves"], lines, strict=True):
        points = [tuple(map(float, pair.split(","))) for pair in line.split()]
        for step, value, (across, up) in zip(curve["steps"], curve["mean"], points, strict=True):
            assert across == pytest.approx(inside(x, step), abs=2 * PIXEL)
            assert up == pytest.approx(inside(y, value), abs=10 * PIXEL)


def inside(ticks: list[tuple[float, float]], value: float) -> float:
    """Return the pixel of a value on the line through the first and the last tick."""
    (a, low), *_, (b, high) = ticks
    return a + (value - low) / (high - low) * (b - a)


def test_time_and_memory_are_those_of_the_runs(page: Page, runs: Path) -> None:
    lines = [line for line in metrics(runs / OTHER) if "time/step" in line]
    for phase in ("time/sample", "time/train", "time/sync"):
        mean = sum(line[phase] for line in lines) / len(lines)
        assert page.row("time", phase)[1].split()[0] == shown(mean)
    whole = sum(line["time/step"] for line in lines) / len(lines)
    assert page.row("time", "whole step")[1] == shown(whole)
    parts = [float(row[2].split()[0]) for row in page.tables["time"][1:-1]]
    assert sum(parts) == pytest.approx(whole, rel=1e-3)

    most = [
        max(line.get("memory/train/host_gib", 0) for line in metrics(runs / name))
        for name in (*SEEDS, OTHER)
    ]
    assert page.row("memory", "train", "host") == [shown(max(most[:2])), shown(most[2])]


def test_samples_are_ranked_by_reward(page: Page, runs: Path) -> None:
    kept = samples.read(runs / SEEDS[0] / "samples", 4)
    best = max(kept, key=lambda line: line["reward"])
    rows = page.tables["samples"][1:7]
    assert [row[0] for row in rows] == ["1", "2", "4", "5", "7", "8"]
    assert rows[0][1] == shown(best["reward"])
    assert [float(row[1]) for row in rows] == sorted((float(row[1]) for row in rows), reverse=True)
    assert f"{SEEDS[0]}, step 4: 6 of 8 samples" in page.text


def test_configurations_differ_where_they_do(page: Page, runs: Path, tmp_path: Path) -> None:
    heads = ["option", "first and second", "slower"]
    expected = [heads, ["seed", "0, 1", "0"], ["engine.lr", "0.1", "0.01"]]
    assert page.tables["differences"] == expected
    seeds = report(tmp_path / "seeds.html", *(runs / name for name in SEEDS))
    assert "differences" not in seeds.tables
    # The same folder twice is one run.
    once = report(tmp_path / "once.html", runs / OTHER, runs / "." / OTHER)
    assert [row[1] for row in once.tables["runs"][1:]] == [OTHER]


def test_supervised_runs_are_shown_too(model: Path, runs: Path, tmp_path: Path) -> None:
    done = run("sft", model, tmp_path / "sft")
    page = report(tmp_path / "sft.html", done)
    nll = [shown(line["nll"]) for line in metrics(done)]
    assert list(map(shown, page.numbers()["nll"]["curves"][0]["mean"])) == nll
    assert page.row("time", "time/train")
    assert "No run kept samples" in page.text

    both = report(tmp_path / "both.html", done, runs / OTHER)
    assert both.row("ends", "nll")[1] == ""
    assert both.row("differences", "algorithm.name") == ["sft", "toy"]


# --- what others wrote ---


def altered(runs: Path, folder: Path) -> Path:
    """A copy of a run, which may be damaged."""
    shutil.copytree(runs / OTHER, folder)
    return folder


def test_hostile_text_is_only_text(runs: Path, tmp_path: Path) -> None:
    named = altered(runs, tmp_path / "<script>alert(0)<")
    config = (named / "config.yaml").read_text()
    assert "model:\n" in config
    plain = HOSTILE.replace("\ud800", "").replace("\x1b", "")
    changed = re.sub(r"(?m)^  path: .*$", lambda _: f"  path: {json.dumps(plain)}", config, count=1)
    (named / "config.yaml").write_text(changed)
    line = {**samples.read(named / "samples", 4)[0], "prompt": HOSTILE, "completion": HOSTILE}
    (named / "samples" / "step_4.jsonl").write_text(json.dumps({**line, "finish": HOSTILE}))
    with (named / "metrics.jsonl").open("a") as file:
        numbers = {"step": 5, f"memory/{HOSTILE}/{HOSTILE}_gib": 1.0, "sampled/reward": HOSTILE}
        file.write(json.dumps(numbers) + "\n")

    page = report(tmp_path / "report.html", named, runs / SEEDS[0])
    assert Counter(tag for tag, _ in page.tags)["script"] == 2
    assert not [tag for tag, _ in page.tags if tag == "img"]
    assert not [name for _, attrs in page.tags for name in attrs if name.startswith("on")]
    assert "{{ 7 * 7 }}" in page.text
    assert "\u202e" not in page.source
    assert "\x1b" not in page.source
    cell = page.tables["samples"][1][3]
    assert cell == HOSTILE.translate({0x202E: "\ufffd", 0x1B: "\ufffd", 0xD800: "\ufffd"})
    assert page.text.count("</script><script>alert(1)</script>") >= 4
    assert "1 values were not finite" in page.text


def test_the_page_asks_for_nothing(page: Page) -> None:
    assert not {"src", "srcset", "action", "xlink:href"} & {n for _, a in page.tags for n in a}
    assert [attrs["href"] for _, attrs in page.tags if "href" in attrs] == ["data:,"]
    assert "@import" not in page.source
    assert "url(" not in page.source
    (policy,) = (
        attrs["content"]
        for tag, attrs in page.tags
        if tag == "meta" and "content" in attrs and "http-equiv" in attrs
    )
    digest = base64.b64encode(hashlib.sha256(page.scripts[1].encode()).digest()).decode()
    assert policy.startswith("default-src 'none'")
    assert f"script-src 'sha256-{digest}'" in policy


def damage(runs: Path, folder: Path, kind: str) -> Path:
    if kind == "absent":
        return folder
    altered(runs, folder)
    if kind == "no numbers":
        (folder / "metrics.jsonl").write_text("")
    elif kind == "no file of numbers":
        (folder / "metrics.jsonl").unlink()
    elif kind == "noise":
        (folder / "metrics.jsonl").write_bytes(b"\xff\x00[]\n" * 9)
    elif kind == "no configuration":
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        (folder / "config.yaml").write_text("{")
    else:
        (folder / "run.json").write_text('[{"format": 10000}]')
    return folder


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("absent", "is no run folder"),
        ("no numbers", "has no step yet"),
        ("no file of numbers", "had no jsonl in trackers"),
        ("noise", "has no step yet"),
        ("no configuration", "config.yaml is not readable as YAML"),
        ("newer", "has format 10000"),
    ],
)
def test_a_run_that_cannot_be_shown(
    kind: str, why: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken, file = damage(runs, tmp_path / "broken", kind), tmp_path / "report.html"
    capsys.readouterr()
    assert main(["report", str(broken), "--html", str(file)]) == 2
    said = capsys.readouterr().err
    assert why in said
    assert len(said.splitlines()) == 1
    assert not file.exists()

    page = report(file, runs / OTHER, broken)
    assert [row[1] for row in page.tables["runs"][1:]] == [OTHER]
    assert f"Left out: {tmp_path / 'broken'}" in page.text
    assert why in page.text


def test_damage_that_a_run_survives_is_a_note(runs: Path, tmp_path: Path) -> None:
    folder = altered(runs, tmp_path / "run")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    # A resumed run writes a step again, and a kill cuts the last line off.
    again = json.dumps({**json.loads(lines[3]), "sampled/reward": 0.125, "train/grad_norm": None})
    text = "\n".join([*lines, "{nonsense", again, '{"step": 99, "re'])
    (folder / "metrics.jsonl").write_text(text)
    (folder / "samples" / "step_4.jsonl").write_text("{}\n")
    page = report(tmp_path / "report.html", folder)
    assert "has 1 damaged line" in page.text
    assert "No sample of it is shown" in page.text
    (curve,) = page.numbers()["sampled/reward"]["curves"]
    assert curve["mean"][json.loads(again)["step"] - 1] == 0.125
    assert len(page.numbers()["train/grad_norm"]["curves"][0]["steps"]) == 3
    assert "1 values were not finite" in page.text


@pytest.mark.parametrize("name", ["metrics.jsonl", "folder.html", "absent/report.html"])
def test_nothing_but_a_page_is_written_over(
    name: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder.html").mkdir()
    (tmp_path / "metrics.jsonl").write_text("mine")
    assert main(["report", str(runs / OTHER), "--html", str(tmp_path / name)]) == 2
    assert name in capsys.readouterr().err
    assert (tmp_path / "folder.html").is_dir()
    assert (tmp_path / "metrics.jsonl").read_text() == "mine"


def long_runs(runs: Path, folder: Path, steps: int) -> list[Path]:
    """Two seeds of many steps, made of a real step's numbers, with one high peak."""
    found = []
    for name in SEEDS:
        shutil.copytree(runs / name, folder / name)
        line = metrics(runs / name)[-1]
        with (folder / name / "metrics.jsonl").open("w") as file:
            for step in range(1, steps + 1):
                reward = 1 - 1 / step + (step * 7919 % 101) / 1000 + (name == "first") / 50
                peak = {"sampled/reward": 40.0 if step == 1234 else reward}
                file.write(json.dumps({**line, "step": step, **peak}) + "\n")
        found.append(folder / name)
    return found


def test_thousands_of_steps_are_thinned_and_no_peak_is_lost(runs: Path, tmp_path: Path) -> None:
    folders = long_runs(runs, tmp_path, 5000)
    page = report(tmp_path / "report.html", *folders, runs / OTHER)
    curve = page.numbers()["sampled/reward"]["curves"][0]
    assert 100 < len(curve["steps"]) <= 152
    assert (curve["steps"][0], curve["steps"][-1]) == (1, 5000)
    assert curve["high"][curve["steps"].index(1234)] == 40
    lines = {line["step"]: line["sampled/reward"] for line in metrics(folders[0])}
    assert all(
        shown(lines[step]) == shown(high)
        for step, high in zip(curve["steps"], curve["high"], strict=True)
    )
    assert len(page.source.encode()) < 200 << 10


def test_a_picture_for_a_paper_is_wide(runs: Path, tmp_path: Path) -> None:
    out, folders = tmp_path / "reward.png", [str(runs / name) for name in SEEDS]
    command = [sys.executable, str(PLOT), *folders, "--out", str(out)]
    subprocess.run(command, check=True, timeout=120)
    header = out.read_bytes()[:24]
    assert header.startswith(b"\x89PNG")
    assert [int.from_bytes(header[at : at + 4], "big") for at in (16, 20)] == [1600, 800]
    gone = [sys.executable, str(PLOT), str(tmp_path / "gone")]
    done = subprocess.run(gone, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "is no run folder" in done.stderr


# --- in a browser ---


@pytest.mark.skipif(BROWSER is None, reason="no chromium on PATH")
@pytest.mark.parametrize("scripts", [True, False])
def test_a_browser_has_no_complaint(scripts: bool, page: Page, runs: Path, tmp_path: Path) -> None:
    """Open the page as a reader does. It makes no request and logs nothing."""
    address = (tmp_path / "report.html").as_uri()
    with tab(tmp_path / "profile", scripts=scripts) as opened:
        opened.open(address)
        assert opened.value("document.querySelectorAll('.chart .line').length") > 10
        assert opened.value("document.body.classList.contains('scripted')") is scripts

        place = "document.querySelector('[data-chart]').getBoundingClientRect()"
        left, top, width = (opened.value(f"{place}.{name}") for name in ("left", "top", "width"))
        opened.call("Input.dispatchMouseEvent", type="mouseMoved", x=left + width - 12, y=top + 40)
        said = opened.value("document.querySelector('output').textContent")
        last = metrics(runs / OTHER)[-1]["sampled/reward"]
        assert said.endswith(f"slower: {float(shown(last)):g} at 4") if scripts else not said

        hide = (
            "document.querySelector('.show').click(); document.querySelectorAll('.g0.off').length"
        )
        assert opened.value(hide) == (len(page.numbers()) if scripts else 0)
        asked = opened.named("Network.requestWillBeSent")
        assert [one["request"]["url"] for one in asked] == [address]
        assert not opened.named("Runtime.exceptionThrown", "Runtime.consoleAPICalled")
        assert not opened.named("Log.entryAdded")
