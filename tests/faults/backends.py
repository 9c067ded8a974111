"""Backends with one fault each, for the conformance kit and for the gates of a run.

The kit checks each backend first. Those that it passes take part in a short run of
GRPO on the toy model, which should end with a sentence. A case comes through if neither
finds it. Backends without a fault are among the cases: one that is refused comes
through too.

``python -m tests.faults.backends SEED CASES KIND`` tries one kind alone.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.faults import ROOT, run
from tests.faults.faulty import HONEST, KIND_OPTIONS, Case, every

# The kinds that a run can have a faulty one of, by the options that select it. Trackers
# and transports are judged by the kit alone where a run would not notice.
LIMIT_S = 1500


def chosen(seed: int, cases: int, kind: str = "") -> list[Case]:
    """Choose cases, of which none is there twice."""
    stream = random.Random(seed)
    found = list(every(kind))
    return stream.sample(found, min(cases, len(found)))


def check(seed: int, cases: int, kind: str = "") -> Iterator[str]:
    """Yield the faulty backends that came through, and honest ones that did not."""
    for name, caught in judged(chosen(seed, cases, kind)).items():
        honest = name.split("=")[1].startswith(HONEST)
        if honest and caught:
            yield f"{name} has no fault and was refused: {caught}"
        if not honest and not caught:
            yield f"{name}: neither the kit nor a run found it"


def judged(cases: list[Case]) -> dict[str, str]:
    """Try cases in a process of their own. Return what caught each, by its name."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "caught.json"
        command = [sys.executable, "-m", "tests.faults.backends", "--try", str(out)]
        names = [f"{case.kind}={case.name}" for case in cases]
        environment = {
            **os.environ,
            "COUPLER_PLUGINS": "tests.faults.faulty_plugin",
            "COUPLER_FAULTS": json.dumps(names),
            "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        if not out.exists():
            raise AssertionError(
                f"the process ended early: {done.stdout[-2000:]}{done.stderr[-2000:]}"
            )
        return json.loads(out.read_text())


class Watch:
    """Plugin of pytest: skips the rest of the kit for a backend that was caught."""

    def __init__(self) -> None:
        self.caught: dict[str, str] = {}

    def names(self, item: Any) -> list[str]:
        params = getattr(item, "callspec", None)
        found = params.params.values() if params else ()
        return [f"{s.backend.kind}={s.backend.name}" for s in found if hasattr(s, "backend")]

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Try all of a backend's tests before those of the next one."""
        self.of = {item.nodeid: self.names(item) for item in items}

    def pytest_runtest_setup(self, item: Any) -> None:
        import pytest

        if any(name in self.caught for name in self.of[item.nodeid]):
            pytest.skip("its backend was caught")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            test = report.nodeid.rpartition("::")[2].partition("[")[0]
            for name in self.of[report.nodeid]:
                self.caught.setdefault(name, f"kit: {test}: {_short(report)}")


def _short(report: Any) -> str:
    text = str(getattr(report.longrepr, "reprcrash", None) and report.longrepr.reprcrash.message)
    return " ".join(text.split())[:300]


def attempt(out: Path) -> None:
    """Run the kit on every backend that the environment names, then a run on the
    rest.
    """
    import pytest

    from coupler.testing import ranks

    names: list[str] = json.loads(os.environ["COUPLER_FAULTS"])
    watch = Watch()
    _one_process(ranks)
    arguments = [f"--coupler={name}" for name in names]
    options = ["-q", "-p", "no:cacheprovider", "--tb=line", "-p", "no:faulthandler"]
    start = time.monotonic()
    pytest.main([*options, "--pyargs", "coupler.testing.conformance", *arguments], plugins=[watch])
    print(f"kit: {time.monotonic() - start:.0f} s for {len(names)} backends")

    found = {name: watch.caught.get(name, "") for name in names}
    for name in names:
        kind = name.partition("=")[0]
        if not found[name] and kind in KIND_OPTIONS:
            found[name] = gates(name, kind)
    out.write_text(json.dumps(found))


def _one_process(ranks: Any) -> None:
    """Let worlds of one rank live in this process: the toy engine is deterministic."""
    plain = ranks.World.__init__

    def here(self: Any, *args: Any, deterministic: bool = False, **more: Any) -> None:
        plain(self, *args, **more)

    ranks.World.__init__ = here


def gates(name: str, kind: str) -> str:
    """Return what a run says of a backend, empty if it goes well."""
    from tests.faults import toy_runs

    with tempfile.TemporaryDirectory() as folder:
        inputs = Path(folder) / "inputs"
        toy_runs.write_inputs(inputs)
        more = ["steps=10", "sampling.max_tokens=48", "samples_per_prompt=4", "prompts_per_step=4"]
        option = f"{KIND_OPTIONS[kind]}={name.partition('=')[2]}"
        said = toy_runs.call(
            toy_runs.arguments(
                inputs, Path(folder) / "run", *more, "checkpoint.every_steps=0", option
            )
        )
    if said.code == 0 and not said.raised:
        return ""
    return f"run: {' '.join((said.raised or said.text).split())[-300:]}"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--try"]:
        attempt(Path(sys.argv[2]))
    else:
        only = sys.argv.pop(3) if len(sys.argv) > 3 else ""
        run(lambda seed, cases: check(seed, cases, only), 100)
