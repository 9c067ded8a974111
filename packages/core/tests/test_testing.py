"""The conformance kit: the toy backends pass it, and each of many faults is caught by
the test that is about it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest
from broken_backends import CAUGHT_BY, REWARDS_CAUGHT_BY

from coupler.errors import ConfigError, CouplerError, TooFewDevices, WaitTimeout
from coupler.testing import losses, plugin, ranks
from coupler.testing.cases import make_batch, weighted
from coupler.testing.conformance.test_engine import assert_gradient
from coupler.testing.models import write_toy
from coupler.testing.ranks import SHARE_GPUS, RankFailed, World
from coupler.testing.reference import Gradient, ToyReference
from coupler.testing.subject import Subject, configured, parse_settings
from coupler.testing.toy import columns_of
from coupler.testing.toy_config import ToyEngineConfig

HERE = Path(__file__).parent


def kit(folder: Path, *arguments: str) -> tuple[int, dict[str, set[str]], str]:
    """Run the kit; return its exit code, the tests that failed per id of a backend, and
    what it printed.
    """
    report = folder / "report.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--tb=short",
        f"--junitxml={report}",
    ]
    environment = {
        **os.environ,
        "COUPLER_PLUGINS": "broken_backends",
        "PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}",
    }
    done = subprocess.run(
        [*command, "--pyargs", "coupler.testing.conformance", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    failed: dict[str, set[str]] = {}
    if report.exists():
        for case in ElementTree.parse(report).iter("testcase"):
            if case.find("failure") is not None or case.find("error") is not None:
                name, _, parameters = case.attrib["name"].partition("[")
                for part in parameters.rstrip("]").split("-"):
                    failed.setdefault(part, set()).add(name)
    return done.returncode, failed, done.stdout + done.stderr


def test_core_s_own_backends_conform(tmp_path: Path) -> None:
    trackers = ["console", "jsonl", *(["tensorboard"] if find_spec("tensorboard") else [])]
    chosen = ["--coupler=sharding=stream", *(f"--coupler=tracker={name}" for name in trackers)]
    code, failed, printed = kit(tmp_path, *chosen, "-rs")
    assert (code, failed) == (0, {}), printed
    assert "tracker=console keeps no file" in printed
    assert "tracker=jsonl" not in printed, "of jsonl nothing may be skipped"


def test_a_good_reward_conforms(tmp_path: Path) -> None:
    """On the kit's rows, and on rows of its own task, whose columns it reads."""
    (tmp_path / "good.py").write_text(
        "from coupler.rewards import Graded, Invalid\n"
        "def exact(completion, answer):\n    return Graded(float(completion == answer), "
        "completion[:9])\n"
        "def reads(completion, row):\n    return row['unit'] in completion\n"
    )
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "How far?", "answer": "3 km", "unit": "km"}\n')
    code, failed, printed = kit(
        tmp_path, "--coupler=reward=good:exact", f"--coupler=reward=good:reads,rows={rows}"
    )
    assert (code, failed) == (0, {}), printed
    _, failed, printed = kit(tmp_path, "--coupler=reward=good:reads")
    assert "test_no_completion_makes_it_raise" in failed["reward=good:reads"]
    assert "KeyError: 'unit'" in printed
    code, _, printed = kit(tmp_path, "--coupler=reward=good:reads,row=3")
    assert code == 4 and "has no setting 'row'" in printed


@pytest.fixture(scope="module")
def reward_faults(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    chosen = [f"--coupler=reward=broken_backends:{name},timeout_s=1" for name in REWARDS_CAUGHT_BY]
    return kit(tmp_path_factory.mktemp("rewards"), *chosen)[1]


@pytest.mark.parametrize("name", REWARDS_CAUGHT_BY)
def test_a_fault_of_a_reward_is_caught(reward_faults: dict[str, set[str]], name: str) -> None:
    assert REWARDS_CAUGHT_BY[name] in reward_faults.get(f"reward=broken_backends:{name}", set())


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    chosen = [f"--coupler={kind}={name}" for kind, name in CAUGHT_BY]
    tests = " or ".join(f"({name} and {test} and not tcp)" for (_, name), test in CAUGHT_BY.items())
    return kit(tmp_path_factory.mktemp("faults"), *chosen, "-k", tests)[1]


@pytest.mark.parametrize(("kind", "name"), CAUGHT_BY)
def test_a_fault_is_caught(faults: dict[str, set[str]], kind: str, name: str) -> None:
    assert CAUGHT_BY[kind, name] in faults.get(f"{kind}={name}", set())


def test_selecting_what_is_not_installed_says_what_is(tmp_path: Path) -> None:
    code, _, printed = kit(tmp_path, "--coupler=engine=tow")
    assert code == 4
    assert "no engine named 'tow' is installed" in printed
    assert "toy" in printed


def test_only_the_selected_kinds_run(tmp_path: Path) -> None:
    _, _, printed = kit(tmp_path, "--coupler=transport=disk", "--collect-only")
    assert "test_transport.py" in printed
    assert not any(
        f"test_{other}.py" in printed
        for other in ("engine", "rollout", "algorithm", "pair", "tracker")
    )


def chosen(*selected: str, fixtures: tuple[str, ...] = ()) -> list[tuple[str, float, str]]:
    """Id, setting and model of each test that takes an engine, where these were
    selected.
    """
    options = {"--coupler": list(selected), "--coupler-set": ["engine.lr=0.5"]}
    config, found = SimpleNamespace(getoption=options.get, stash={}), []

    def parametrize(
        _names: list[str], values: list[tuple[Subject, str]], *, ids: list[str], **_: object
    ) -> None:
        found.extend(
            (i, subject.config().lr, model) for i, (subject, model) in zip(ids, values, strict=True)
        )

    names = ["engine_subject", "model_name", *fixtures]
    plugin.pytest_generate_tests(
        SimpleNamespace(config=config, fixturenames=names, parametrize=parametrize)
    )  # type: ignore[arg-type]
    return found


def test_a_backend_is_checked_under_several_settings() -> None:
    plain, other = ("engine=toy-toy", 0.5, "toy"), ("engine=toy,toy,lr=0.25-toy", 0.25, "toy")
    selected = "engine=toy", "engine=toy,toy,lr=0.25"
    assert chosen(*selected) == [plain, other]
    assert chosen(*selected, fixtures=("any_setting",)) == [plain]
    assert chosen(selected[1], fixtures=("any_setting",)) == [other]
    with pytest.raises(CouplerError, match=r"no model 'untide' here\.\n  there are:  toy"):
        chosen("engine=toy,untide")


def test_settings_reach_the_configuration() -> None:
    settings = parse_settings(
        ["engine.lr=1e-3", "engine.max_tokens_per_gpu=64", "rollout.name=toy"]
    )
    assert settings["rollout"] == {"name": "toy"}
    config = configured(ToyEngineConfig, settings["engine"])
    assert (config.lr, config.max_tokens_per_gpu) == (1e-3, 64)
    with pytest.raises(ConfigError, match="no key 'learning_rate'"):
        configured(ToyEngineConfig, {"learning_rate": 1.0})
    with pytest.raises(ConfigError, match="write it as"):
        parse_settings(["lr=1"])


def test_the_toy_gradient_equals_finite_differences(tmp_path: Path) -> None:
    """The one closed form that everything in NumPy is compared with, against
    differences of the loss itself.
    """
    reference = ToyReference(write_toy(tmp_path))
    batch = weighted(make_batch(reference))
    grads = reference.gradient(batch, losses.surrogate).grads

    def total() -> float:
        token_loss, _ = losses.surrogate(reference.outputs(batch), columns)
        return float((token_loss * batch["loss_weight"])[batch["loss_mask"]].sum())

    columns = columns_of(batch)
    random = np.random.default_rng(0)
    for name, weight in reference.weights.items():
        direction = random.normal(size=weight.shape)
        weight += 1e-6 * direction
        up = total()
        weight -= 2e-6 * direction
        down = total()
        weight += 1e-6 * direction
        assert (up - down) / 2e-6 == pytest.approx(
            float((grads[name] * direction).sum()), rel=1e-5
        ), name


def recipe_of(target: str, model: str = "") -> dict[str, object]:
    """Of an engine with the toy's configuration."""
    config = "coupler.testing.toy_config:ToyEngineConfig"
    return {"target": target, "config": config, "settings": {}, "head": "lm", "model": model}


def test_a_rank_that_fails_is_shown_and_the_others_end(tmp_path: Path) -> None:
    recipe = recipe_of("coupler.testing.toy:ToyEngine", str(write_toy(tmp_path / "toy")))
    with pytest.raises(RankFailed, match="engine=toy runs on one rank"):
        World(recipe, 2, tmp_path)


def test_an_engine_that_lacks_devices_is_told_apart_from_one_that_fails(tmp_path: Path) -> None:
    """The kit skips its tests on several ranks then; the message says how many devices
    they need.
    """
    lacking = tmp_path / "lacking.py"
    lacking.write_text(
        "from coupler.errors import TooFewDevices\n"
        "class Engine:\n    def __init__(self, config, model): raise TooFewDevices('needs 2 "
        "GPUs')\n"
    )
    recipe = recipe_of(f"{lacking}:Engine")
    with pytest.raises(TooFewDevices, match="needs 2 GPUs"):
        World(recipe, 2, tmp_path)


def test_ranks_that_may_share_a_gpu_are_hosts_of_their_own_to_nccl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tmp_path / "engine.py"
    engine.write_text(
        "import os\n"
        "class Engine:\n"
        "    def __init__(self, config, model): pass\n"
        "    def setup(self, rank): raise ValueError(f'{rank.index} is on host "
        '{os.environ.get("NCCL_HOSTID")}\')\n'
    )
    recipe = recipe_of(f"{engine}:Engine")
    with pytest.raises(RankFailed, match="is on host None"):
        World(recipe, 2, tmp_path)
    monkeypatch.setenv(SHARE_GPUS, "1")
    ranks._template.cache_clear()  # a new process, with this environment
    with pytest.raises(RankFailed, match=r"(\d) is on host \1"):
        World(recipe, 2, tmp_path)


def test_a_rank_that_says_nothing_is_named(tmp_path: Path) -> None:
    sleeper = tmp_path / "sleeper.py"
    sleeper.write_text(
        "import time\nclass Engine:\n    def __init__(self, config, model): time.sleep(60)\n"
    )
    recipe = recipe_of(f"{sleeper}:Engine")
    with pytest.raises(WaitTimeout, match=r"ranks \[0, 1\] of 2"):
        World(recipe, 2, tmp_path, deadline_s=3)


def test_listing_backends_imports_none_of_them() -> None:
    code = (
        "import sys; from coupler.plugins.manager import Plugins; Plugins.load().rows();"
        "print(sorted({'torch', 'transformers', 'ray', 'coupler.testing.toy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def test_an_error_of_a_small_gradient_is_seen_beside_a_large_one() -> None:
    want = Gradient({"large": np.ones(4), "small": np.full(4, 1e-3), "none": np.zeros(4)}, {})
    assert_gradient(want.grads, want)
    for name, wrong in (("small", 1e-3 + 2e-8), ("none", 1e-20), ("large", np.nan)):
        with pytest.raises(AssertionError, match=name):
            assert_gradient({**want.grads, name: np.full(4, wrong)}, want)


def test_how_far_a_gradient_may_be_off_is_an_option(tmp_path: Path) -> None:
    chosen = ("--coupler", "engine=toy", "-k", "test_gradient_over_order")
    assert kit(tmp_path, *chosen)[0] == 0
    assert kit(tmp_path, *chosen, "--coupler-gradient", "1e-30")[0] == 1
