"""What a path, a key or a name alone can refuse is refused before torch is imported.

Each kind of run has a process that forks for every mistake. An import of a heavy
package ends the child, so that what is refused is refused without it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from job_run import write_inputs

HEAVY = ("torch", "transformers", "vllm", "sglang", "megatron", "ray", "reasoning_gym")
IMPORTS = 9
SERVER = f"""
import json, os, sys
# What is light is imported once, not by each child.
import coupler.cli.composing, coupler.jobs
from coupler.cli import main

class Ends:
    def find_spec(self, name, path=None, target=None):
        if name in {HEAVY}:
            os.write(2, f"imports {{name}}".encode())
            os._exit({IMPORTS})

assert not [name for name in {HEAVY} if name in sys.modules]
for line in sys.stdin:
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(writes, 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.meta_path.insert(0, Ends())
        code = main(json.loads(line))
        sys.stderr.flush()
        os._exit(code)
    os.close(writes)
    with os.fdopen(reads, errors="replace") as said:
        text = said.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(json.dumps([code, text]), flush=True)
"""
KINDS = ("grpo", "vllm", "megatron", "tools", "sft", "dpo", "eval")
SAMPLED = {"grpo", "vllm", "megatron", "tools", "eval"}
TRAINED = {"grpo", "vllm", "megatron", "tools", "sft", "dpo"}
# By the kinds of run that it is made in: a mistake, and how the complaint begins.
MISTAKES = [
    ({*KINDS}, ["engine.lrr=1"], "unknown option engine.lrr."),
    ({*KINDS}, ["engine=fdsp"], "no engine named 'fdsp' is installed."),
    ({*KINDS}, ["stepz=1"], "unknown option stepz."),
    ({*KINDS}, ["trackers=[wandbb]"], "no tracker named 'wandbb' is installed."),
    ({*KINDS}, ["sync.transport=nope"], "no transport named 'nope' is installed."),
    ({*KINDS}, ["model.path=/not/there"], "model.path='/not/there' is no folder."),
    ({*KINDS}, ["model.path=gone.py:build"], "model.path=gone.py:build is no folder, and no"),
    ({*KINDS}, ["run_dir=/proc/here"], "run_dir=/proc/here cannot be written: "),
    ({*KINDS}, ["--config", "/gone.yaml"], "there is no configuration file /gone.yaml."),
    (TRAINED, ["engine.lr=-1"], "engine.lr must be above 0, got -1.0."),
    (TRAINED, ["algorithm=gpro"], "no algorithm named 'gpro' is installed."),
    (TRAINED, ["data.source=gone.jsonl"], "data.source: there is no file gone.jsonl."),
    (TRAINED, ["data.source=gone.py:rows"], "data.source=gone.py:rows cannot be imported: "),
    (TRAINED, ["data.prompt_key=question"], "{rows}, line 1 has no 'question'"),
    (TRAINED, ["data.source={late}"], "{late}, line 7 is not JSON: "),
    (TRAINED, ["data.sampler=gone.py:Pick"], "data.sampler=gone.py:Pick cannot be used: "),
    (TRAINED, ["checkpoint.resume=/gone"], "checkpoint.resume=/gone is no whole checkpoint: "),
    (
        TRAINED,
        ["checkpoint.hook=gone.py:f"],
        "checkpoint.hook=gone.py:f: there is no file gone.py.",
    ),
    (SAMPLED, ["rollout=hff"], "no rollout named 'hff' is installed."),
    (SAMPLED, ["reward.target=gone.py:f"], "reward.target=gone.py:f cannot be used: there is no"),
    (SAMPLED, ["reward.target={reward}:scor"], "reward.target={reward}:scor cannot be used: "),
    (SAMPLED, ["reward.target=gone.mod:f"], "reward.target=gone.mod:f cannot be imported: "),
    ({"eval"}, ["eval.data.source=gone.jsonl"], "eval.data.source: there is no file gone.jsonl."),
    ({"eval"}, ["eval.data.prompt_key=q"], "{rows}, line 1 has no 'q'"),
    ({"eval"}, ["eval.data.source={late}"], "{late}, line 7 is not JSON: "),
    (
        {"grpo", "vllm", "megatron", "tools"},
        ["eval.every_steps=1", "eval.data.source={late}"],
        "{late}, line 7 is not JSON: ",
    ),
    (
        {"grpo"},
        ["algorithm=opd", "teacher.model.path=/gone"],
        "teacher.model.path=/gone is no folder.",
    ),
    (
        {"grpo"},
        ["algorithm=ppo", "critic.model.path=/gone"],
        "critic.model.path=/gone is no folder.",
    ),
    ({"grpo"}, ["environment=tolls"], "no environment named 'tolls' is installed."),
    (
        {"tools"},
        ["environment.functions=[gone.py:add]"],
        "environment.functions=gone.py:add cannot be used: there is no file gone.py.",
    ),
    (
        {"tools"},
        ["environment.functions=['{tools}:ad']"],
        "environment.functions={tools}:ad cannot be used: ",
    ),
    ({"tools"}, ["environment.target=gone.mod:X"], "environment.target=gone.mod:X cannot be"),
]
NEEDS = {
    "grpo": "coupler_engine_fsdp",
    "sft": "coupler_engine_fsdp",
    "dpo": "coupler_engine_fsdp",
    "eval": "coupler_engine_fsdp",
    "megatron": "megatron",
    "vllm": "coupler_rollout_vllm",
    "tools": "coupler_agents",
}


def recipe(kind: str, model: Path, folder: Path) -> list[str]:
    """The command line of a run of this kind, which would start."""
    rows, common = folder / "rows.jsonl", [f"model.path={model}", f"run_dir={folder / 'run'}"]
    engine = "engine=megatron" if kind == "megatron" else "engine=fsdp"
    if kind in ("sft", "dpo"):
        rows = folder / "pairs.jsonl" if kind == "dpo" else rows
        return ["sft", *common, engine, f"algorithm={kind}", f"data.source={rows}", "steps=1"]

    rollout = "rollout=vllm" if kind == "vllm" else "rollout=hf"
    common += [engine, rollout, f"reward.target={folder / 'reward.py'}:score"]
    common += ["sampling.max_tokens=8"]
    if kind == "eval":
        return ["eval", *common, f"eval.data.source={rows}"]
    if kind == "tools":
        common += ["environment=tools", f"environment.functions=['{folder / 'tools.py'}:add']"]
    return ["train", *common, "algorithm=grpo", f"data.source={rows}", "steps=1"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_is_refused_before_torch_is_imported(kind: str, model: Path, tmp_path: Path) -> None:
    if find_spec(NEEDS[kind]) is None:
        pytest.skip(f"{NEEDS[kind]} is not installed")
    write_inputs(tmp_path)
    rows = tmp_path / "rows.jsonl"
    (tmp_path / "late.jsonl").write_text(rows.read_text() + '{"prompt":\n')
    pair = {"prompt": "what is 1 + 2 ?", "chosen": "3", "rejected": "4"}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(pair) + "\n")
    (tmp_path / "tools.py").write_text("def add(a: int, b: int) -> int:\n    return a + b\n")
    paths = {
        "rows": tmp_path / ("pairs.jsonl" if kind == "dpo" else "rows.jsonl"),
        "late": tmp_path / "late.jsonl",
        "reward": tmp_path / "reward.py",
        "tools": tmp_path / "tools.py",
    }

    given = recipe(kind, model, tmp_path)
    made = [(more, first) for kinds, more, first in MISTAKES if kind in kinds]
    if kind == "dpo":
        made = [one for one in made if "{late}" not in one[1]]
    lines = [[*given, *(part.format(**paths) for part in more)] for more, _ in made]
    server = subprocess.run(
        [sys.executable, "-c", SERVER],
        input="".join(f"{json.dumps(line)}\n" for line in [*lines, given]),
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        check=True,
    )
    *answers, good = map(json.loads, server.stdout.splitlines())

    found = {}
    for (more, first), (code, text) in zip(made, answers, strict=True):
        says = [line for line in text.splitlines() if not line.startswith("coupler: warning: ")]
        start = f"coupler: {first.format(**paths)}"
        if code != 2 or not any(line.startswith(start) for line in says):
            found[" ".join(more)] = (code, text[-300:])
    assert not found
    # Without a mistake the same process goes on to the first import.
    assert good[0] == IMPORTS and "imports transformers" in good[1]
    assert not (tmp_path / "run" / "config.yaml").exists()
