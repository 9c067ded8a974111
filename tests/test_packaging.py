"""What users install: every file is in the wheel, every import is declared, and core
works alone.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from email import message_from_bytes
from importlib.metadata import packages_distributions, version
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
FOLDERS = {
    "coupler-core": "core",
    "coupler-engine-fsdp": "engine-fsdp",
    "coupler-engine-megatron": "engine-megatron",
    "coupler-rollout-vllm": "rollout-vllm",
    "coupler-rollout-sglang": "rollout-sglang",
    "coupler-algos": "algos",
    "coupler-agents": "agents",
    "coupler-trackers": "trackers",
}
# imports of distributions that a package does not ask for, and why it works
WITHOUT_DECLARATION = {
    "coupler-core": {
        "torch": (
            "where an engine or a rollout brings its own tensors: functions, and "
            "transports between GPUs"
        ),
        "transformers": "in functions, for tokenizers; engines bring it",
        "tokenizers": "in functions, comes with transformers",
        "sympy": "in functions, comes with reasoning-gym",
        "tensorboard": "in a function of the kit, for event files; their tracker brings it",
        "matplotlib": "in a function, where it is installed: the picture that trackers get",
        "datasets": "in a function, for folders of save_to_disk; the error says what to install",
    },
    "coupler-engine-fsdp": {
        "numpy": "comes with coupler-core, whose batches it is",
        "triton": "comes with torch where there is a GPU; its module is imported there only",
    },
    "coupler-engine-megatron": {"numpy": "comes with coupler-core, whose batches it is"},
    "coupler-algos": {"numpy": "comes with coupler-core, whose batches it is"},
    "coupler-rollout-vllm": {},
    "coupler-agents": {},
    "coupler-trackers": {},
    "coupler-rollout-sglang": {
        "sgl_kernel": "comes with SGLang; the doctor tries in a function whether it loads",
        "triton": "comes with torch where there is a GPU; its module is imported there only",
    },
}
OF_PYTEST = (
    "coupler.testing.plugin",
    "coupler.testing.limits",
    "coupler.testing.conformance.",
)  # of the extra testing: tests, and their plugin
# what runs in the model workers of an inference engine, which have torch
OF_TORCH = tuple(
    f"coupler.engine_kit.{name}"
    for name in ("inference.checksums", "inference.loading", "parked", "pinned")
)
# listed and planned with where their backend is not; it comes with an extra
WITHOUT_BACKEND = {
    "coupler-rollout-vllm": {"vllm", "torch"},
    "coupler-rollout-sglang": {"sglang", "torch"},
    "coupler-agents": {
        "aiohttp",
        "orjson",
        "mcp",
        "gymnasium",
        "verifiers",
        "openenv",
        "renderers",
    },
}
WITHOUT_PLUGIN = {"coupler-agents", "coupler-trackers"}
PROBE = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
for found in pkgutil.walk_packages(package.__path__, sys.argv[1] + "."):
    try:
        importlib.import_module(found.name)
    except ModuleNotFoundError as error:
        print(found.name, error.name)
"""
ELSEWHERE = """
import os, signal, sys
sys.modules.update(dict.fromkeys(("fcntl", "resource", "pwd", "grp", "termios")))
of_os, of_signal = ("killpg", "fork", "sched_getaffinity"), ("SIGKILL", "SIGUSR1")
for module, names in ((os, of_os), (signal, of_signal)):
    for name in names:
        delattr(module, name)
"""  # what Windows lacks
LISTING = "import sys; from coupler.cli import main; sys.exit(main(['plugins']))"


@pytest.fixture(scope="module")
def uv() -> str:
    found = ROOT / ".tools" / "bin" / "uv"
    path = str(found) if found.exists() else shutil.which("uv")
    if path is None:
        pytest.skip("there is no uv: neither .tools/bin/uv (make setup) nor on the PATH")
    return path


@pytest.fixture(scope="module")
def wheels(uv: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, ZipFile]:
    """The wheel of every package."""
    folder = tmp_path_factory.mktemp("wheels")
    for name in FOLDERS:
        call(uv, "build", "--quiet", "--wheel", "--package", name, "--out-dir", str(folder))
    return {name: ZipFile(next(folder.glob(f"{name.replace('-', '_')}-*.whl"))) for name in FOLDERS}


def call(*command: str) -> str:
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def source(name: str) -> Path:
    return ROOT / "packages" / FOLDERS[name] / "src"


def canonical(requirement: str) -> str:
    return re.split(r"[ <>=!~;\[]", requirement)[0].lower().replace("_", "-")


def requirements(wheel: ZipFile) -> list[str]:
    (path,) = [n for n in wheel.namelist() if n.endswith(".dist-info/METADATA")]
    return message_from_bytes(wheel.read(path)).get_all("Requires-Dist", [])


@pytest.mark.parametrize("name", FOLDERS)
def test_the_wheel_holds_every_file(name: str, wheels: dict[str, ZipFile]) -> None:
    files = {p.relative_to(source(name)) for p in source(name).rglob("*") if p.is_file()}
    if name == "coupler-core":  # coupler recipes and coupler plugin new copy from them
        shipped = [p for top in ("recipes", "examples") for p in (ROOT / top).rglob("*")]
        files |= {Path("coupler") / p.relative_to(ROOT) for p in shipped if p.is_file()}
    expected = {str(p) for p in files if "__pycache__" not in p.parts}
    packed = {n for n in wheels[name].namelist() if ".dist-info/" not in n}
    assert packed == expected
    assert any(n.endswith("/py.typed") for n in packed)
    (licence,) = [n for n in wheels[name].namelist() if n.endswith("/licenses/LICENSE")]
    assert wheels[name].read(licence) == (ROOT / "LICENSE").read_bytes()
    assert f"{name.replace('-', '_').replace('coupler_core', 'coupler')}/__init__.py" in packed


@pytest.mark.parametrize(
    ("name", "entry", "offered"),
    [
        ("coupler-engine-fsdp", "fsdp", "coupler-engine-fsdp"),
        ("coupler-engine-megatron", "megatron", "coupler-engine-megatron"),
        ("coupler-algos", "algos", "coupler-algos"),
        ("coupler-rollout-vllm", "vllm", "coupler-rollout-vllm[cuda]"),
        ("coupler-rollout-sglang", "sglang", "coupler-rollout-sglang[cuda]"),
    ],
)
def test_a_plugin_is_found_and_core_offers_it(
    name: str, entry: str, offered: str, wheels: dict[str, ZipFile]
) -> None:
    (points,) = [n for n in wheels[name].namelist() if n.endswith("entry_points.txt")]
    module = f"{name.replace('-', '_')}.plugin"
    assert f"[coupler]\n{entry} = {module}" in wheels[name].read(points).decode()
    assert f"{module.replace('.', '/')}.py" in wheels[name].namelist()
    assert f"{offered}; extra == '{entry}'" in requirements(wheels["coupler-core"])
    (core,) = [Requirement(r) for r in requirements(wheels[name]) if canonical(r) == "coupler-core"]
    assert core.specifier.contains(version("coupler-core"))
    assert not core.specifier.contains("99.0"), "the interfaces of a later core may differ"


@pytest.mark.parametrize("name", FOLDERS)
def test_an_index_can_show_the_wheel(name: str, wheels: dict[str, ZipFile]) -> None:
    (path,) = [n for n in wheels[name].namelist() if n.endswith(".dist-info/METADATA")]
    said = message_from_bytes(wheels[name].read(path))
    assert said["License-Expression"] == "Apache-2.0"
    assert said["Summary"] and len(said.get_payload()) > 300, "its README"
    assert "Typing :: Typed" in said.get_all("Classifier", [])


def test_a_release_is_what_its_tag_says(tmp_path: Path) -> None:
    """The script of the release workflow, on copies of what it reads."""
    for path in (*ROOT.glob("packages/*/pyproject.toml"), ROOT / ".github" / "release.py"):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    released = version("coupler-core")
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## {released} (2026-11-27)\n")

    def release(tag: str) -> subprocess.CompletedProcess[str]:
        script = str(tmp_path / ".github" / "release.py")
        command = [sys.executable, script, tag, "https://example.org/us/coupler/"]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    wrong = release("v99.0.0")
    assert wrong.returncode == 2
    assert f"packages/core/pyproject.toml has version {released}" in wrong.stderr
    assert "CHANGELOG.md has no section '## 99.0.0'" in wrong.stderr
    core = tmp_path / "packages" / "core" / "pyproject.toml"
    assert core.read_bytes() == (ROOT / "packages" / "core" / "pyproject.toml").read_bytes()

    assert release(f"v{released}").returncode == 0
    for name in FOLDERS.values():
        project = tomllib.loads((tmp_path / "packages" / name / "pyproject.toml").read_text())
        assert project["project"]["urls"]["Source"] == "https://example.org/us/coupler"


def test_workflows_call_targets_that_exist() -> None:
    made = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.M)) | {"test"}
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        jobs = yaml.safe_load(path.read_text())["jobs"]
        lines = [step.get("run", "") for job in jobs.values() for step in job["steps"]]
        called = {target for line in lines for target in re.findall(r"\bmake ([a-z-]+)", line)}
        assert called and called <= made, path
        for script in (word for line in lines for word in re.findall(r"python (\S+\.py)", line)):
            assert (ROOT / script).is_file(), (path, script)


@pytest.mark.parametrize("name", FOLDERS)
def test_every_import_is_declared(name: str, wheels: dict[str, ZipFile]) -> None:
    declared, allowed = set(map(canonical, requirements(wheels[name]))), WITHOUT_DECLARATION[name]
    distributions = {
        **packages_distributions(),
        "coupler": ["coupler-core"],
    }  # an editable install names no module
    undeclared: dict[str, str] = {}
    for path in source(name).rglob("*.py"):
        for module in imported(path) - set(sys.stdlib_module_names) - {name.replace("-", "_")}:
            names = {canonical(d) for d in distributions.get(module, [module])}
            if not names & {*declared, name}:
                undeclared[module] = str(path.relative_to(ROOT))
    assert {m: p for m, p in undeclared.items() if m not in allowed} == {}
    assert undeclared.keys() == allowed.keys()  # and no exception outlives its import


def imported(path: Path) -> set[str]:
    """The first part of every module that the file imports, in functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def test_core_works_alone(uv: str, wheels: dict[str, ZipFile], tmp_path: Path) -> None:
    python = installed_alone(uv, "coupler-core", wheels, tmp_path)
    call(
        python,
        "-c",
        (
            "import importlib.util as u, sys; sys.exit(bool(u.find_spec('torch') or "
            "u.find_spec('pytest')))"
        ),
    )
    for system in ("", ELSEWHERE):
        failed = dict(
            line.split() for line in call(python, "-c", system + PROBE, "coupler").splitlines()
        )
        assert {module for module, lacks in failed.items() if lacks == "torch"} == set(OF_TORCH)
        tests = {module: lacks for module, lacks in failed.items() if module not in OF_TORCH}
        assert set(tests.values()) == {"pytest"}
        assert all(module.startswith(OF_PYTEST) for module in tests), tests
    transports = "builtin.transports.torch"
    late = (
        (f"{transports}.nccl", "torch"),
        (f"{transports}.ipc", "torch"),
        ("executors.ray.cluster", "ray"),
    )
    for module, package in late:
        code = f"import coupler.{module} as m; from coupler.errors import CouplerError\n"
        code += f"try: m.{package}.anything\nexcept CouplerError as error: print(error)"
        assert f"{package} is not installed.\n  try:  pip install 'coupler-core[" in call(
            python, "-c", code
        )
    listed = {tuple(line.split()[:3]) for line in call(python, "-c", LISTING).splitlines()}
    recipes = call(python, "-m", "coupler", "recipes").splitlines()
    assert len(recipes) == 1 + len([*(ROOT / "recipes").rglob("*.yaml")])
    assert any("engine=fsdp, rollout=hf, algorithm=grpo" in line for line in recipes)
    made = ("plugin", "new", "mine", "--kind", "engine", "--out", str(tmp_path / "made"))
    assert "--coupler engine=mine" in call(python, "-m", "coupler", *made)
    assert "engine: toy" in written_by_init(python, tmp_path / "first")
    assert {("engine", "toy", "available"), ("transport", "inproc", "available")} <= listed


def written_by_init(python: str, folder: Path) -> str:
    """Return the recipe of ``coupler init`` in this environment, without comments."""
    call(python, "-m", "coupler", "init", str(folder))
    lines = (folder / "recipe.yaml").read_text().replace(":\n  name:", ":").splitlines()
    return "\n".join(line.partition(" #")[0] for line in lines)


def test_a_third_party_s_wheel_is_found(
    uv: str, wheels: dict[str, ZipFile], tmp_path: Path
) -> None:
    """By its entry point alone, next to a core that does not know of it."""
    python = installed_alone(uv, "coupler-core", wheels, tmp_path / "env")
    call(
        uv,
        "build",
        "--quiet",
        "--wheel",
        str(ROOT / "examples" / "plugin-minimal"),
        "--out-dir",
        str(tmp_path),
    )
    (wheel,) = map(str, tmp_path.glob("*.whl"))
    call(uv, "pip", "install", "--quiet", "--no-deps", "--python", python, wheel)
    assert ["rollout", "minimal"] in [
        line.split()[:2] for line in call(python, "-c", LISTING).splitlines()
    ]


# its environment takes as long as those of all others, and has a suite of its own
PARTS = {"coupler-engine-megatron": pytest.mark.slow}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=PARTS.get(name, ())) for name in FOLDERS if name != "coupler-core"],
)
def test_a_plugin_works_alone(
    name: str, uv: str, wheels: dict[str, ZipFile], tmp_path: Path
) -> None:
    python = installed_alone(uv, name, wheels, tmp_path)
    missing = {
        line.split()[1] for line in call(python, "-c", PROBE, name.replace("-", "_")).splitlines()
    }
    assert missing <= WITHOUT_BACKEND.get(name, set())
    kinds = {
        line.split()[0] for line in call(python, "-c", LISTING).splitlines() if f" {name} " in line
    }
    assert kinds & {"engine", "algorithm", "rollout"} or name in WITHOUT_PLUGIN


def installed_alone(uv: str, name: str, wheels: dict[str, ZipFile], folder: Path) -> str:
    """The interpreter of an empty environment that the wheel and what it asks for went
    into.
    """
    python, wheel = str(folder / "bin" / "python"), Path(str(wheels[name].filename))
    call(uv, "venv", "--quiet", "--python", sys.executable, str(folder))
    call(
        uv,
        "pip",
        "install",
        "--quiet",
        "--python",
        python,
        "--find-links",
        str(wheel.parent),
        str(wheel),
    )
    return python


@pytest.mark.parametrize("image", ["cpu", "cuda"])
def test_an_image_has_what_the_wheels_are_built_from(image: str) -> None:
    """Core's wheel takes folders from beside the packages."""
    lines = (ROOT / "docker" / f"{image}.Dockerfile").read_text().splitlines()
    copied = {Path(words[1]).name for words in map(str.split, lines) if words[:1] == ["COPY"]}
    needed = {
        Path(source).name
        for folder in FOLDERS.values()
        for source in forced(ROOT / "packages" / folder)
    }
    assert {"recipes", "examples"} <= needed <= copied - {"packages"}


def forced(package: Path) -> list[str]:
    """What hatchling puts into a wheel from elsewhere."""
    build = tomllib.loads((package / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    return list(build["targets"]["wheel"].get("force-include", ()))
