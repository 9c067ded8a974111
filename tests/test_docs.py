"""Every command and snippet of the documents: run, planned, composed, executed or
checked against what it names.

A page is a script. Snippets with a title are files of its folder, and commands run
there in order. A block is checked by its language; ``text`` is output. Above a block of
commands a comment may say more:

``<!-- run: key=value -->``  run the commands, with these overrides, in place of
planning them ``<!-- needs a run folder: parsed -->``  only parse them

A line that no check knows fails. ``test_tasks.py`` runs the pages of ``docs/tasks``.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from pages import DOCS, GOES_ON, KILLED, ROOT, TASKS, Block, blocks

from coupler import cli
from coupler.cli.parser import parse
from coupler.config.compose import compose
from coupler.config.schema import Job
from coupler.plugins.manager import Plugins

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md")), *TASKS]
# The commands of TASKS run in test_tasks.py.
CHECKED = [page for page in PAGES if page not in TASKS]
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILES = re.compile(r"\.(py|md|png|yaml|jsonl?)$")
# an attribute, a column of data for verl, and sections that plugins fill
ELSEWHERE = {
    "model.head", "reward_model.ground_truth",
    "critic.engine", "eval.rollout", "reward_model.engine", "judge.rollout",
}  # fmt: skip
PARSED = "needs a run folder: parsed"
FAMILIES = "sampled|reward|batch|advantages|staleness|train|critic|train_infer|sync|time|kl|moe"


BLOCKS = {page: blocks(page) for page in PAGES}
SHARED = {block.title: block.text for block in BLOCKS[DOCS / "your-data.md"] if block.title}


def of_language(*languages: str) -> Any:
    found = [block for page in PAGES for block in BLOCKS[page] if block.language in languages]
    return pytest.mark.parametrize("block", found, ids=[block.place for block in found])


@pytest.fixture
def folder(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that looks like a checkout, with a small model and the files of the page
    on data.
    """
    for name in ("recipes", "examples", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "small").symlink_to(model)
    write(tmp_path, SHARED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


# --- what is on a page ---


def test_every_block_has_a_check() -> None:
    known = {"", "python", "yaml", "json", "toml", "text"}
    assert not [b.place for page in PAGES for b in BLOCKS[page] if b.language not in known]
    markers = [b for page in PAGES for b in BLOCKS[page] if b.marker]
    assert not [
        b.place
        for b in markers
        if b.language or not (b.marker.startswith(("run", GOES_ON)) or b.marker in (PARSED, KILLED))
    ]


@of_language("python")
def test_python_is_executed(block: Block, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("snippet")
    monkeypatch.setitem(sys.modules, "snippet", module)
    exec(compile(block.text, block.place, "exec"), vars(module))


@of_language("json")
def test_json_is_read(block: Block) -> None:
    rows = [json.loads(line) for line in block.text.splitlines()]
    # A command of the page maps columns of other names.
    mapped = f"data.source={block.title} data.columns." in block.page.read_text()
    answered = [row.get("answer") or row.get("chosen") or row.get("completion") for row in rows]
    asked = [row.get("prompt") or isinstance(row.get("chosen"), list) for row in rows]
    told = all(row.get("messages") for row in rows)
    assert mapped or told or (all(asked) and all(answered))


@of_language("toml")
def test_toml_is_read(block: Block) -> None:
    assert tomllib.loads(block.text)["project"]["entry-points"]["coupler"]


@of_language("yaml")
def test_yaml_composes(block: Block, folder: Path) -> None:
    if "model" not in yaml.safe_load(block.text):
        # A part of a configuration, which a command of the page composes.
        others = [each.text for each in BLOCKS[block.page] if each != block]
        assert any(Path(block.title).stem in text for text in others), block.place
        return
    (folder / "snippet.yaml").write_text(block.text)
    job = Job.TRAIN if "rollout" in yaml.safe_load(block.text) else Job.SFT
    assert compose(Plugins.load(), [], "snippet.yaml", job).config.model.path


# --- commands ---


@pytest.mark.parametrize("page", CHECKED, ids=[page.name for page in CHECKED])
def test_commands(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    write(folder, {block.title: block.text for block in BLOCKS[page] if block.title})
    for block in BLOCKS[page]:
        for command in block.commands if not block.language else ():
            with monkeypatch.context() as patch:
                check(shlex.split(command, comments=True), block, patch, capfd)


def check(words: list[str], block: Block, patch: pytest.MonkeyPatch, capfd: Any) -> None:
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        patch.setenv(*words.pop(0).split("=", 1))
    program = words[0].removeprefix(".venv/bin/")
    checks: dict[str, Callable[[list[str], Block], None]] = {
        "make": check_make,
        "pip": check_pip,
        "pytest": check_pytest,
        "python": check_python,
        "torchrun": check_torchrun,
    }
    if program == "coupler":
        check_coupler(words[1:], block, capfd)
    else:
        assert program in checks, f"{block.place}: no check knows {program}"
        checks[program](words[1:], block)


def check_coupler(words: list[str], block: Block, capfd: Any) -> None:
    """Run a command that takes no device; run or plan one that does."""
    job, given = words[0], words[1:]
    if block.marker == PARSED:
        assert parse(words).command
        return
    if block.marker.startswith("run"):
        extra = shlex.split(block.marker.removeprefix("run").lstrip(":"))
        words = [*words, *extra]
    elif job == "eval":
        config = given[given.index("--config") + 1]
        rest = [word for word in given if word not in ("--config", config)]
        assert compose(Plugins.load(), rest, config, Job.EVAL).config.eval.data.source
        return
    elif job in ("train", "sft"):
        words = ["plan", *given, "--job", job]
    code = cli.main(words)
    printed = capfd.readouterr()
    assert code == 0, f"{block.place}: coupler {shlex.join(words)}\n{printed.out}{printed.err}"
    assert printed.out.strip(), f"{block.place} printed nothing"


def check_make(words: list[str], block: Block) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert words[0] in targets, f"{block.place}: the Makefile has no target {words[0]}"


def check_pip(words: list[str], block: Block) -> None:
    """Every extra that is named exists, in core or in the plugin of the guide."""
    name, _, extras = words[-1].rstrip("]").partition("[")
    file = {
        "coupler-core": "packages/core",
        "coupler-agents": "packages/agents",
        "coupler-trackers": "packages/trackers",
        ".": "examples/plugin-minimal",
    }[name]
    project = tomllib.loads((ROOT / file / "pyproject.toml").read_text())["project"]
    assert set(extras.split(",")) <= project["optional-dependencies"].keys(), block.place


def check_pytest(words: list[str], block: Block) -> None:
    """The module is there, and the kit has the options."""
    declared = set(
        re.findall(
            r'"(--[\w-]+)"', (ROOT / "packages/core/src/coupler/testing/plugin.py").read_text()
        )
    )
    assert words[0] == "--pyargs" and importlib.util.find_spec(words[1]), block.place
    assert {word for word in words[2:] if word.startswith("--")} <= declared, block.place


def check_torchrun(words: list[str], block: Block) -> None:
    """The command behind torchrun is one of ours, as far as its words go."""
    assert words[1:3] == ["-m", "coupler"] and words[0].startswith("--nproc-per-node="), block.place
    assert parse(words[3:]).command


def check_python(words: list[str], block: Block) -> None:
    """The script is there and compiles."""
    ast.parse((ROOT / words[0]).read_text(), block.place)


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_commands_and_options_within_a_sentence(page: Path) -> None:
    """A command in a sentence is parsed; an option that it or another span names is one
    that there is.
    """
    known = set(re.findall(r"^\| `([\w.]+)` \|", (DOCS / "options.md").read_text(), re.MULTILINE))
    sections = {key.partition(".")[0] for key in known if "." in key}
    unknown = []
    for span in spans(page):
        words = span.split()
        if words[:1] == ["coupler"] and len(words) > 2 and "..." not in words:
            assert parse(words[1:]).command
        for word in words:
            key = word.partition("=")[0]
            key = re.sub(r"^(critic|reward_model)\.(?=engine\.)", "", key)
            is_option = (
                re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", key) and key.partition(".")[0] in sections
            )
            if is_option and not (
                FILES.search(key) or key in known or any(k.startswith(f"{key}.") for k in known)
            ):
                unknown.append(word)
    assert sorted(set(unknown) - ELSEWHERE) == []


def spans(page: Path) -> list[str]:
    """Code within sentences."""
    return re.findall(
        r"(?<!`)`([^`\n]+)`(?!`)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    )


def test_an_unknown_command_fails(capfd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    block = Block(ROOT / "README.md", 1, "", "", "", "")
    with pytest.raises(AssertionError, match="no check knows rm"):
        check(["rm", "-rf", "runs"], block, monkeypatch, capfd)
    recipe = str(ROOT / "recipes" / "smollm2_reasoning_gym_cpu.yaml")
    with pytest.raises(AssertionError, match=r"unknown option engine\.lrr"):
        check(["coupler", "train", "--config", recipe, "engine.lrr=1"], block, monkeypatch, capfd)


# --- what pages say of the tree ---


def test_links_lead_somewhere() -> None:
    dead = []
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for target in LINK.findall(text):
            path, _, anchor = target.partition("#")
            to = (page.parent / path) if path else page
            if path.startswith("http"):
                continue
            if not to.exists() or (anchor and anchor not in anchors(to)):
                dead.append(f"{page.name}: {target}")
    assert not dead


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {
        re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip())
        for heading in headings
    }


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text())
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_the_page_of_options_is_what_the_code_says() -> None:
    spec = importlib.util.spec_from_file_location("docs_options", DOCS / "options.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    fresh = module.page(Plugins.load())
    assert (DOCS / "options.md").read_text() == fresh, "write it anew:  python docs/options.py"


def names_of_metrics() -> Iterator[str]:
    """Every text in the sources that looks like the name of a metric."""
    pattern = re.compile(rf"({FAMILIES})/[a-z0-9_]*[a-z0-9]")
    for file in sorted(ROOT.glob("packages/*/src/*/**/*.py")):
        if "testing" in file.parts:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and pattern.fullmatch(node.value)
            ):
                yield node.value


def test_every_metric_is_explained() -> None:
    page, names = (DOCS / "read-the-metrics.md").read_text(), set(names_of_metrics())
    assert len(names) > 50
    assert not sorted(name for name in names if f"`{name}`" not in page)


def test_a_stranger_finds_the_file() -> None:
    rows = re.findall(
        r"^\| \d+ \| (.*?\?) \| `(.*?)` \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE
    )
    assert len(rows) >= 20
    assert not [question for question, file in rows if not (ROOT / "packages" / file).is_file()]


def test_pages_name_no_file_that_is_gone() -> None:
    pattern = re.compile(r"`((?:recipes|examples|benchmarks|tests|docs)/[\w./-]+)`")
    named = {(page.name, path) for page in PAGES for path in pattern.findall(page.read_text())}
    assert named
    assert not [(page, path) for page, path in sorted(named) if not os.path.lexists(ROOT / path)]
