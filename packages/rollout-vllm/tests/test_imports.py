"""Importing the plugin does nothing else: a process is prepared for vLLM when a rollout
is made there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

IMPORTS = """
import importlib, json, os, pkgutil, sys
import coupler_rollout_vllm as package
before = dict(os.environ)
names = [found.name for found in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
for name in names:
    importlib.import_module(name)
keys = before.keys() | os.environ.keys()
changed = {key for key in keys if before.get(key) != os.environ.get(key)}
print(json.dumps([names, sorted(changed), "vllm" in sys.modules]))
"""
ABSENT = (
    # what Python then says of it: ModuleNotFoundError
    "import sys; sys.modules['vllm'] = None\n"
)
MADE = """
import os
from coupler.interfaces import Model
from coupler_rollout_vllm.config import VLLMConfig
from coupler_rollout_vllm.rollout import VLLMRollout
VLLMRollout(VLLMConfig(), Model("/m"))
print(os.environ["VLLM_WORKER_MULTIPROC_METHOD"], os.environ["VLLM_LOGGING_LEVEL"])
"""


def printed(code: str, **environment: str) -> str:
    """Run the code in a fresh interpreter, whose environment says nothing of vLLM but
    this.
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env={**kept, **environment}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_imports_change_no_environment_and_raise_nothing() -> None:
    for code in (IMPORTS, ABSENT + IMPORTS):
        names, changed, _ = json.loads(printed(code))
        assert {
            "coupler_rollout_vllm.compat.memory",
            "coupler_rollout_vllm.worker.extension",
        } <= set(names)
        assert changed == []
    assert not json.loads(printed(IMPORTS))[2], "vLLM changes the environment when it is imported"


def test_a_rollout_says_what_to_install_where_neither_vllm_nor_torch_is() -> None:
    absent = "import sys, importlib.metadata as found; sys.modules.update(vllm=None, torch=None)\n"
    absent += "def none(name): raise found.PackageNotFoundError(name)\nfound.version = none\n"
    caught = MADE.replace("VLLMRollout(VLLMConfig()", "try: VLLMRollout(VLLMConfig()")
    caught = caught.partition("\nprint")[0] + "\nexcept ImportError as error: print(error)"
    assert "pip install 'coupler-rollout-vllm[cuda]'" in printed(absent + caught)


def test_a_rollout_prepares_its_process_and_keeps_what_the_user_set() -> None:
    assert printed(MADE, VLLM_LOGGING_LEVEL="DEBUG").split() == ["spawn", "DEBUG"]
