"""Tokens per second of rollout=vllm against vLLM's own ``LLM.generate`` with the same engine arguments.

    python benchmarks/rollout_vllm_throughput.py --shape 0.5b
    python benchmarks/rollout_vllm_throughput.py --shape 0.5b --no-seeds rollout.kv_cache_gib=20

512 requests of 256 prompt tokens; each ends after a stored number of tokens (lognormal, 363 in the mean). Each side
runs in processes of its own, in turns; a round warms up with 64 requests and then measures all. "Driver" is CPU time of
the process that asks, per request. Weights are random.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from shapes import SHAPES, write_shape

from coupler.interfaces import Model, Rank, Request
from coupler.testing.subject import configured, parse_settings
from coupler_rollout_vllm.config import VLLMConfig

LENGTHS = Path(__file__).with_name("lengths_lognormal.json")
PROMPT = 256
WARM = 64


def make_requests(count: int, vocabulary: int) -> list[Request]:
    lengths = json.loads(LENGTHS.read_text())[:count]
    return [
        Request(tuple((7 * i + 13 * j) % (vocabulary - 10) + 5 for j in range(PROMPT)), length, seed=i)
        for i, length in enumerate(lengths)
    ]


def through_coupler(folder: Path, config: VLLMConfig, requests: list[Request]) -> dict[str, float]:
    from coupler_rollout_vllm.rollout import VLLMRollout

    async def story() -> dict[str, float]:
        rollout = VLLMRollout(config, Model(str(folder)))
        await rollout.setup(Rank(seed=1))
        await asyncio.gather(*map(rollout.generate, requests[:WARM]))
        start, cpu = time.perf_counter(), time.process_time()
        done = await asyncio.gather(*map(rollout.generate, requests))
        measured = _measured(sum(len(d.tokens) for d in done), start, cpu, len(requests))
        rollout.close()
        return measured

    return asyncio.run(story())


def through_vllm(folder: Path, config: VLLMConfig, requests: list[Request]) -> dict[str, float]:
    from vllm import LLM

    from coupler_rollout_vllm import compat
    from coupler_rollout_vllm.arguments import engine_arguments

    llm = LLM(**engine_arguments(config, Model(str(folder)), Rank(seed=1)))
    prompts: list[Any] = [compat.tokens_input(list(r.prompt)) for r in requests]
    params = [compat.sampling_params(r, 0, r.max_tokens, config.per_request_seeds) for r in requests]
    llm.generate(prompts[:WARM], params[:WARM], use_tqdm=False)
    start, cpu = time.perf_counter(), time.process_time()
    done = llm.generate(prompts, params, use_tqdm=False)
    return _measured(sum(len(d.outputs[0].token_ids) for d in done), start, cpu, len(requests))


def _measured(tokens: int, start: float, cpu: float, count: int) -> dict[str, float]:
    seconds, busy = time.perf_counter() - start, time.process_time() - cpu
    return {"tokens_per_s": tokens / seconds, "driver_ms": 1e3 * busy / count}


SIDES = {"coupler": through_coupler, "vllm": through_vllm}


def measure(side: str, arguments: list[str]) -> dict[str, float]:
    done = subprocess.run([sys.executable, __file__, *arguments, "--side", side], stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-seeds", action="store_true", help="sample from the engine's own random stream")
    parser.add_argument("--side", choices=SIDES, help="measure one side, once, and print it as JSON")
    parser.add_argument("settings", nargs="*", help="rollout.KEY=VALUE")
    args = parser.parse_args()
    settings = {"prefix_caching": False, **parse_settings(args.settings).get("rollout", {})}
    config = configured(VLLMConfig, {**settings, "per_request_seeds": not args.no_seeds})
    if args.side:
        with tempfile.TemporaryDirectory() as folder:
            requests = make_requests(args.requests, SHAPES[args.shape]["vocab_size"])
            print(json.dumps(SIDES[args.side](write_shape(Path(folder), args.shape), config, requests)))
        return
    rounds = {side: [] for side in SIDES}
    for _ in range(args.rounds):
        for side, found in rounds.items():
            found.append(measure(side, sys.argv[1:]))
    print("| side | tokens/s (median; all) | driver, ms a request |\n|---|---|---|")
    median = {}
    for side, found in rounds.items():
        rates = [each["tokens_per_s"] for each in found]
        median[side] = statistics.median(rates)
        driver = statistics.median(each["driver_ms"] for each in found)
        print(f"| {side} | {median[side]:,.0f} ({', '.join(f'{r:,.0f}' for r in rates)}) | {driver:.2f} |")
    print(f"ratio {median['coupler'] / median['vllm']:.3f}")


if __name__ == "__main__":
    main()
