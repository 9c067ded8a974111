r"""A GRPO step on one GPU, ours (engine=fsdp, rollout=vllm) against TRL 1.16 with vLLM
colocated, with all of it resident and with roles that leave the device by turns.

    python benchmarks/grpo_step_vs_trl_gpu.py
    python benchmarks/grpo_step_vs_trl_gpu.py --tokens 1536 --mean-tokens 256
    python benchmarks/grpo_step_vs_trl_gpu.py --modes offloaded --offload auto
    python benchmarks/grpo_step_vs_trl_gpu.py --shape tiny --rollout hf --prompts 2 \
        --samples 4 --tokens 24 --mean-tokens 8 --micro-tokens 512 --steps 2  # anywhere

Each side is a process of its own, one after the other. Both get the same weights,
prompts, reward, group size, limit of tokens and optimizer, take one optimizer step a
batch, and have no reference model. TRL's trainer stays on the device in both modes: it
lets vLLM sleep (``vllm_enable_sleep_mode``), we move the engine too.

Weights are random. Completions are as long as allowed, or with --mean-tokens end by
chance (endings.py). Steps are timed here, from the line that a side prints at the end
of one to the next. As both sides sample lengths of their own, compare tokens per second
where these are ragged. trl-fp32 trains fp32 weights under bf16 autocast, which is what
our engine does. trl-bf16 trains bf16 weights and moments. Without --correction TRL does
not compute log-probs a second time to weigh the difference to vLLM's. With it, its
default, both sides do.

TRL and vLLM are imported from this interpreter, or from that of --trl.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from grpo_step import CACHE_GIB, GPU, PHASES, PROMPT, WARM_UP, composed_of, run_job, write_job
from shapes import SHAPES
from sides import ANSWER, free_port

HERE = Path(__file__).parent
DTYPES = {"trl-fp32": "float32", "trl-bf16": "bfloat16"}
SIDES = ("coupler", *DTYPES)
MODES = ("resident", "offloaded")
GIB = 1 << 30
MOVES = ("time/leave_", "time/return_")
STEP = re.compile(r"step {1,4}\d")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
    "CUDA_VISIBLE_DEVICES": "0",
    # compiling the kernels of this sampler takes a minute, and nothing here needs them
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_HOST_IP": "127.0.0.1",
}


def settings_of(args: argparse.Namespace, folder: Path) -> list[str]:
    """Return what our job has beside the options of grpo_step.py."""
    settings = [
        f"run_dir={folder / 'run'}",
        "trackers=[console,jsonl]",
        "engine.lr=1e-6",
        f"engine.max_tokens_per_gpu={args.micro_tokens}",
        f"engine.gradient_checkpointing={str(args.checkpointing).lower()}",
        f"engine.compile={str(args.compile).lower()}",
        f"rollout.max_sequences={args.prompts * args.samples}",
    ]
    if args.correction:
        settings += [
            "algorithm.correction_cap=3",
            "algorithm.correction=mask",
            "algorithm.correction_ratio=sequence",
        ]
    if not GPU:
        return settings
    if args.mode == "resident":
        return [*settings, "offload=false", f"rollout.kv_cache_gib={CACHE_GIB}"]
    memory = ["rollout.kv_cache_gib=0", f"rollout.gpu_memory_gib={args.memory}"]
    return [*settings, f"offload={args.offload}", *memory]


def run_ours(args: argparse.Namespace) -> dict[str, Any]:
    """Run our job in this process, and return the numbers of its measured steps."""
    folder = args.folder / f"coupler-{time.time_ns()}"
    args.settings = settings_of(args, folder) + args.settings
    composed, plugins = composed_of(args, args.folder)
    rows = run_job(composed, plugins, folder)
    shutil.rmtree(folder)  # its checkpoint has as many bytes as the weights

    computed = "bf16" if GPU else "fp32"
    moves = {name for row in rows for name in row if name.startswith(MOVES)}
    return {
        "tokens": [row["batch/completion_tokens"] * row["batch/sequences"] for row in rows],
        "longest": [row["batch/completion_tokens_max"] for row in rows],
        "phases": {
            name.removeprefix("time/"): [row.get(name, 0.0) for row in rows]
            for name in (*PHASES, *sorted(moves))
        },
        "process_gib": torch.cuda.max_memory_allocated() / GIB if GPU else 0.0,
        "holds": "trainer",
        "dtypes": f"weights fp32, AdamW fp32, computed in {computed}, rollout {computed}, "
        f"micro-batches of {composed.config.engine.max_tokens_per_gpu} tokens",
    }


def command(side: str, mode: str, args: argparse.Namespace) -> list[str]:
    if side == "coupler":
        again = [*sys.argv[1:], f"--mode={mode}", f"--folder={args.folder}"]
        return [sys.executable, __file__, *again]

    own = {
        "mode": mode,
        "dtype": DTYPES[side],
        "folder": str(args.folder),
        "trl_memory": args.trl_memory[MODES.index(mode)],
        "longest": PROMPT + args.tokens,
        "steps": args.steps + args.trl_warm_up,
    }
    keys = ("rollout", "prompts", "samples", "tokens", "micro_tokens", "checkpointing", "compile")
    shared = {key: getattr(args, key) for key in (*keys, "correction")}
    return [str(args.trl), str(HERE / "grpo_step_vs_trl_gpu_trl.py"), json.dumps(shared | own)]


def run(side: str, mode: str, args: argparse.Namespace) -> dict[str, Any] | None:
    """Run one side to its end, and return what it answers and the seconds of its
    measured steps. None if it failed, or took longer than --limit.
    """
    # TRL and its vLLM meet at this port, and two comparisons may share a host
    environment = ENVIRONMENT | {"MASTER_PORT": str(free_port())} | os.environ
    process = subprocess.Popen(
        command(side, mode, args),
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    timer = threading.Timer(args.limit, os.killpg, (process.pid, signal.SIGKILL))
    timer.daemon = True
    timer.start()

    ends: list[float] = []
    answer: dict[str, Any] = {}
    assert process.stdout is not None
    with DeviceMemory(environment["CUDA_VISIBLE_DEVICES"].partition(",")[0]) as memory:
        for line in process.stdout:
            if line.startswith(ANSWER):
                answer = json.loads(line.removeprefix(ANSWER))
                continue
            if STEP.match(line):
                ends.append(time.perf_counter())
            print(f"[{side} {mode}] {line}", end="", flush=True)
        failed = process.wait()
    timer.cancel()

    if failed or not answer:
        print(f"RESULT {side} {mode}: failed with {failed} after {len(ends)} steps", flush=True)
        return None
    answer["device_gib"] = memory.most / 1024
    answer["seconds"] = [after - before for before, after in pairwise(ends)][-args.steps :]
    return answer


class DeviceMemory:
    """Watches what all processes together hold of a device, with nvidia-smi."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.most = 0  # MiB; 0 where there is no nvidia-smi

    def __enter__(self) -> DeviceMemory:
        self.log = tempfile.TemporaryFile("w+")
        found = shutil.which("nvidia-smi")
        query = ["--query-gpu=memory.used", "--format=csv,noheader,nounits", "--loop-ms=250"]
        self.process = None
        if found:
            self.process = subprocess.Popen([found, f"--id={self.device}", *query], stdout=self.log)
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait()
        self.log.seek(0)
        self.most = max((int(line) for line in self.log if line.strip().isdigit()), default=0)
        self.log.close()


def report(side: str, mode: str, found: dict[str, Any], args: argparse.Namespace) -> None:
    """Print one side, and keep its rate of tokens in ``found``."""
    seconds, number = found["seconds"], args.steps
    tokens = found["tokens"][-number:]
    found["step"] = statistics.median(seconds)
    found["rate"] = sum(tokens) / sum(seconds)
    split = ", ".join(
        f"{name} {statistics.median(each[-number:]):.3f}" for name, each in found["phases"].items()
    )
    print(
        f"RESULT {side} {mode}: {found['step']:.3f} s a step ({min(seconds):.3f} to "
        f"{max(seconds):.3f}, {len(seconds)} steps), {found['rate']:.0f} tokens/s; {split} s; "
        f"{statistics.mean(tokens) / (args.prompts * args.samples):.1f} tokens in the mean, "
        f"longest {max(found['longest'][-number:]):.0f}\n"
        f"RESULT {side} {mode}: at most {found['process_gib']:.1f} GiB allocated by "
        f"{found['holds']}, {found['device_gib']:.1f} GiB of the device taken; {found['dtypes']}",
        flush=True,
    )


def compare(args: argparse.Namespace) -> None:
    lengths = f"{args.mean_tokens:g} in the mean" if args.mean_tokens else "equally long"
    print(
        f"RESULT {args.shape} (head apart from the embedding), {args.prompts} x {args.samples} "
        f"samples of at most {args.tokens} tokens, {lengths}; gradient checkpointing "
        f"{args.checkpointing}, compile {args.compile}, correction {args.correction}; "
        f"{' '.join(args.settings)}",
        flush=True,
    )
    for mode in args.modes:
        found: dict[str, dict[str, Any]] = {}
        for side in args.sides:
            answer = run(side, mode, args)
            if answer is not None:
                found[side] = answer
                report(side, mode, answer, args)

        for side in args.sides:
            if side in DTYPES and side in found and "coupler" in found:
                steps = found[side]["step"] / found["coupler"]["step"]
                rates = found["coupler"]["rate"] / found[side]["rate"]
                print(
                    f"RESULT {mode}: {side} takes {steps:.2f} times our step, and {rates:.2f} "
                    "times our time a token",
                    flush=True,
                )


def prepare(args: argparse.Namespace) -> None:
    """Write weights and prompts in a process that ends, so that it holds no memory of
    the device later.
    """
    if not (args.folder / "prompts.jsonl").exists():
        arguments = [*sys.argv[1:], f"--folder={args.folder}", "--mode=write"]
        subprocess.run([sys.executable, __file__, *arguments], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--rollout", choices=("vllm", "hf"), default="vllm")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512, help="most of a completion")
    parser.add_argument("--mean-tokens", type=float, default=0.0, help="0: all as long as allowed")
    parser.add_argument("--micro-tokens", type=int, default=8192, help="of one forward pass")
    parser.add_argument("--steps", type=int, default=6, help=f"of each side, after {WARM_UP}")
    parser.add_argument("--trl-warm-up", type=int, default=WARM_UP, help="TRL's steps before those")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=["coupler", "trl-fp32"])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=[*MODES])
    parser.add_argument("--offload", choices=("true", "auto"), default="true", help="ours")
    parser.add_argument("--memory", type=float, default=60, help="of our vLLM, offloaded, in GiB")
    parser.add_argument(
        "--trl-memory",
        type=float,
        nargs=2,
        default=[0.2, 0.4],
        help="vllm_gpu_memory_utilization, resident and offloaded",
    )
    parser.add_argument("--checkpointing", action="store_true", help="of activations")
    parser.add_argument("--compile", action="store_true", help="the trained layers")
    parser.add_argument("--correction", action="store_true", help="for vLLM's log-probs")
    parser.add_argument("--trl", type=Path, default=Path(sys.executable))
    parser.add_argument("--limit", type=float, default=420, help="seconds of one side")
    parser.add_argument("--folder", type=Path, help="of weights and prompts, kept and used again")
    parser.add_argument("--mode", choices=(*MODES, "write"), help="the script starts these")
    parser.add_argument("settings", nargs="*", help="KEY=VALUE of our job")
    args = parser.parse_args()

    if args.mode == "write":
        write_job(args.folder, args.shape, args.mean_tokens or float("inf"))
    elif args.mode:
        args.steps += WARM_UP
        print(ANSWER + json.dumps(run_ours(args)), flush=True)
    elif args.folder:
        prepare(args)
        compare(args)
    else:
        with tempfile.TemporaryDirectory() as name:
            args.folder = Path(name)
            prepare(args)
            compare(args)


if __name__ == "__main__":
    main()
