r"""Tokens per second of rollout=vllm against vLLM's own ``LLM.generate`` with the same
engine arguments.

    python benchmarks/rollout_vllm_throughput.py --shape 0.5b
    python benchmarks/rollout_vllm_throughput.py --changed \
        'rollout.extra_args={"distributed_executor_backend": "mp"}'
    python benchmarks/rollout_vllm_throughput.py --shape tiny --requests 32 --rounds 1
    # anywhere

512 requests of 256 prompt tokens; each ends after a stored number of tokens (lognormal,
363 in the mean), or all after --tokens. Both sides start together in processes of their
own and measure in turns, each after 64 requests to warm up. "Driver" is CPU time of the
process that asks, per request. Weights are random.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from shapes import SHAPES, write_shape
from sides import Side, serve

from coupler.interfaces import Model, Rank, Request
from coupler.plugins.manager import Plugins
from coupler.testing.subject import configured, parse_settings

LENGTHS = Path(__file__).with_name("lengths_lognormal.json")
PROMPT = 256
WARM = 64
CACHE_GIB = 16.0  # of each side: both are on the GPU at once


def make_requests(count: int, vocabulary: int, tokens: int = 0) -> list[Request]:
    lengths = [tokens] * count if tokens else json.loads(LENGTHS.read_text())[:count]
    return [
        Request(
            tuple((7 * i + 13 * j) % (vocabulary - 10) + 5 for j in range(PROMPT)), length, seed=i
        )
        for i, length in enumerate(lengths)
    ]


def through_coupler(folder: Path, config: Any, requests: list[Request]) -> None:
    backend = Plugins.load().get("rollout", config.name)

    async def start() -> Any:
        rollout = backend.load()(config, Model(str(folder)))
        await rollout.setup(Rank(seed=1))
        await asyncio.gather(*map(rollout.generate, requests[:WARM]))
        return rollout

    async def generate(rollout: Any) -> dict[str, float]:
        begun, cpu = time.perf_counter(), time.process_time()
        done = await asyncio.gather(*map(rollout.generate, requests))
        return measured(sum(len(d.tokens) for d in done), begun, cpu, len(requests))

    with asyncio.Runner() as runner:
        rollout = runner.run(start())
        serve(lambda: runner.run(generate(rollout)))
        rollout.close()


def through_vllm(folder: Path, config: VLLMConfig, requests: list[Request]) -> None:
    from coupler_rollout_vllm.compat.version import prepare_process

    prepare_process()  # before the first import of vLLM
    from vllm import LLM
    from vllm.inputs import tokens_input

    from coupler_rollout_vllm.arguments import engine_arguments
    from coupler_rollout_vllm.compat.engine import sampling_params

    arguments = engine_arguments(config, Model(str(folder)), Rank(seed=1))
    del arguments["scheduler_cls"]  # vLLM's own
    llm = LLM(**arguments)
    prompts: list[Any] = [tokens_input(list(r.prompt)) for r in requests]
    params = [sampling_params(r, 0, r.max_tokens, config.per_request_seeds) for r in requests]
    for each in params:
        each.flat_logprobs = True  # the quickest that it returns
    llm.generate(prompts[:WARM], params[:WARM], use_tqdm=False)

    def generate() -> dict[str, float]:
        begun, cpu = time.perf_counter(), time.process_time()
        done = llm.generate(prompts, params, use_tqdm=False)
        return measured(sum(len(d.outputs[0].token_ids) for d in done), begun, cpu, len(requests))

    serve(generate)


def measured(tokens: int, begun: float, cpu: float, count: int) -> dict[str, float]:
    seconds, busy = time.perf_counter() - begun, time.process_time() - cpu
    return {"tokens_per_s": tokens / seconds, "driver_ms": 1e3 * busy / count}


def compare(args: argparse.Namespace, folder: str, script: str, raw: str) -> None:
    """Measure both sides of ``script`` in turns: ours, and the one named ``raw``."""
    shared = [
        f"--shape={args.shape}",
        f"--requests={args.requests}",
        f"--tokens={args.tokens}",
        f"--folder={folder}",
        *args.settings,
    ]
    seeds = ["--no-seeds"] if args.no_seeds else []
    sides = {
        name: Side(script, f"--side={name}", *seeds, *shared)
        for name in ([args.only] if args.only else ["coupler", raw])
    }
    if args.changed:
        sides["changed"] = Side(script, "--side=coupler", *seeds, *shared, *args.changed)
    for side in sides.values():
        side.ready()
    rounds = {name: [] for name in sides}
    for _ in range(args.rounds):
        for name, side in sides.items():
            rounds[name].append(side.measure())
    median = {}
    for name, found in rounds.items():
        rates = [each["tokens_per_s"] for each in found]
        median[name] = statistics.median(rates)
        driver = statistics.median(each["driver_ms"] for each in found)
        print(
            f"RESULT {name}: {median[name]:,.0f} tokens/s "
            f"({', '.join(f'{r:,.0f}' for r in rates)}), "
            f"driver {driver:.2f} ms a request",
            flush=True,
        )
    if not args.only:
        ratio = median["coupler"] / median[raw]
        print(
            f"RESULT throughput {args.shape}, {args.requests} requests: ratio {ratio:.3f}",
            flush=True,
        )
    for side in sides.values():
        side.close()


def main(
    about: str | None, script: str, config_class: type, sides: dict[str, Callable[..., None]]
) -> None:
    """Compare the two ``sides`` of ``script``, or be one of them."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=0, help="of each; 0: as stored")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--no-seeds", action="store_true", help="sample from the engine's own random stream"
    )
    parser.add_argument(
        "--changed", action="append", help="a setting of a third side, which is ours otherwise"
    )
    parser.add_argument("--only", choices=sides, help="measure one side, without a ratio")
    parser.add_argument("--side", choices=sides, help="be one side; the script starts both")
    parser.add_argument("--folder", type=Path, help="of the model; the script writes one")
    parser.add_argument("settings", nargs="*", help="rollout.KEY=VALUE")
    args = parser.parse_args()
    if not args.side:
        with tempfile.TemporaryDirectory() as folder:
            write_shape(Path(folder), args.shape)
            compare(args, folder, script, next(name for name in sides if name != "coupler"))
        return
    cache = {"kv_cache_gib": CACHE_GIB} if torch.cuda.is_available() else {}
    settings = {
        "prefix_caching": False,
        **cache,
        **parse_settings(args.settings).get("rollout", {}),
    }
    config = configured(config_class, {**settings, "per_request_seeds": not args.no_seeds})
    vocabulary = SHAPES[args.shape]["vocab_size"]
    sides[args.side](args.folder, config, make_requests(args.requests, vocabulary, args.tokens))


if __name__ == "__main__":
    from coupler_rollout_vllm.config import VLLMConfig

    main(__doc__, __file__, VLLMConfig, {"coupler": through_coupler, "vllm": through_vllm})
