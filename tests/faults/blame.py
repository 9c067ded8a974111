"""Runs in which one side is wrong: the sentence must not accuse another one.

Engine, rollout, transport or the manager of the sync has one fault, or none does and
the model is sure of every token. A case comes through if the sentence that ends the run
names sides among which the faulty one is not, if a run without a fault ends, or if it
ends in a traceback. Which faults a run finds at all is the matter of ``backends``.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tests.faults import ROOT, run
from tests.faults.faulty import HONEST, KIND_OPTIONS, every

from coupler.testing.models import read_tensors, rewrite

LIMIT_S = 1500
RUN_S = 240  # of one run, on a machine with other work
# The words by which a sentence accuses a side, in the lines that say what is wrong.
ACCUSED = {
    "engine": r"\bengine\b(?!'s)|entropy that the engine|the engine is wrong|the policy's gradient",
    "rollout": r"\brollouts?\b(?!'s log-probs differ)|replica",
    "transport": r"\btransport\b",
    "sharding": r"\ba sync\b|sync\.manager|sharding manager",
    "algorithm": r"\bloss\b|algorithm",
}
CANNOT_TELL = "cannot tell"
# Models whose log-probs are the same with their weights in order or not.
SURE = ("two_tokens", "flat", "cold")


def check(seed: int, cases: int, kind: str = "") -> Iterator[str]:
    """Yield the sentences that accuse the wrong side."""
    stream = random.Random(seed)
    found = [
        case for case in every() if case.kind in ("engine", "rollout", "transport", "sharding")
    ]
    chosen = stream.sample(found, min(cases, len(found)))
    sure = [f"model={name}" for name in SURE[: max(1, cases // 8)]]
    said = told([*sure, *(f"{case.kind}={case.name}" for case in chosen)])
    for name, text in said.items():
        side = name.partition("=")[0]
        if wrong := judged(side, name, text):
            yield f"{name}: {wrong}: {text[:300]}"


def judged(side: str, name: str, text: str) -> str:
    """Return what is wrong with a sentence, empty if nothing is."""
    if not text:
        return ""
    if side == "model" or f"={HONEST}" in name:
        return "a run without a fault ended"
    if "Traceback" in text or text.startswith("raised"):
        return "no sentence"
    if not re.search(r"log-prob|weights|another distribution|tensors", text):
        return ""  # It is of something else, such as a number that is not finite.
    if CANNOT_TELL in text:
        wanted = {"sharding": "sync|transport"}.get(side, side)
        return "" if re.search(wanted, text) else f"it tells between others than the {side}"
    accused = [each for each, words in ACCUSED.items() if re.search(words, text)]
    return "" if side in accused or not accused else f"it accuses {' and '.join(accused)}"


def told(names: list[str]) -> dict[str, str]:
    """Return what a run said of each backend, empty where it went well."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "said.json"
        environment = {
            **os.environ,
            "COUPLER_PLUGINS": "tests.faults.faulty_plugin",
            "COUPLER_FAULTS": json.dumps(names),
            "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(
            [sys.executable, "-m", "tests.faults.blame", "--try", str(out)],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert out.exists(), f"the process ended early: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return json.loads(out.read_text())


def attempt(out: Path) -> None:
    """Run once with each backend or model that the environment names."""
    out.write_text(
        json.dumps({name: said(name) for name in json.loads(os.environ["COUPLER_FAULTS"])})
    )


def said(name: str) -> str:
    """Return what a run says of a backend or a model."""
    from tests.faults import toy_runs

    toy_runs.LIMIT_S = RUN_S
    kind, _, what = name.partition("=")
    with tempfile.TemporaryDirectory() as folder:
        inputs = Path(folder) / "inputs"
        toy_runs.write_inputs(inputs)
        options = [] if kind == "model" else [f"{KIND_OPTIONS[kind]}={what}"]
        if kind == "model":
            write_sure(inputs / "toy", what)
            cold = ["sampling.temperature=0.01"] if what == "cold" else []
            options += ["engine.lr=1e-12", *cold]
        temperature = ["sampling.temperature=0.8"] if len(name) % 2 and kind != "model" else []
        more = [
            "steps=6",
            "sampling.max_tokens=24",
            "prompts_per_step=4",
            "checkpoint.every_steps=0",
        ]
        found = toy_runs.call(
            toy_runs.arguments(inputs, Path(folder) / "run", *more, *temperature, *options)
        )
    if found.code == 0 and not found.raised:
        return ""
    # The sentence comes last, after the plan of the run.
    text = found.text.rpartition("coupler: ")[2]
    return f"raised {found.raised}" if found.raised else " ".join(text.split())


def write_sure(folder: Path, what: str) -> None:
    """Write a model whose log-probs say nothing of its weights, in order or not."""
    tensors = {name: np.zeros_like(tensor) for name, tensor in read_tensors(folder).items()}
    bias = tensors["head.bias"]
    if what == "two_tokens":
        bias[[5, 314]] = 40
    elif what == "cold":
        tensors["embed.weight"][:] = 0.1
        bias[[7, 312]] = 1
    rewrite(folder, folder, tensors)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--try"]:
        attempt(Path(sys.argv[2]))
    else:
        run(check, 60)
