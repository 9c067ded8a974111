"""What vLLM's scheduler and that of rollout=vllm take of the host's time for a token.

    python benchmarks/rollout_vllm_scheduler.py
    python benchmarks/rollout_vllm_scheduler.py --caching --requests 256

Both schedulers are real. There is no model: tokens are drawn here, and each request
ends after a stored number of them (lognormal, 363 in the mean). As on a GPU, a step is
chosen before the tokens of the last one are noted. The sides take rounds by turns.
Start it where vLLM is installed; it runs on a CPU.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rollout_vllm_throughput import LENGTHS
from shapes import write_shape
from sides import spread

from coupler_rollout_vllm.compat.version import prepare_process

PROMPT, BLOCK, LONGEST = 64, 16, 2048
SKIPPED = 10  # steps at the start, which choose prompts


def configuration(folder: str, requests: int, caching: bool) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        model=folder,
        skip_tokenizer_init=True,
        max_model_len=LONGEST,
        max_num_seqs=requests,
        max_num_batched_tokens=8192,
        block_size=BLOCK,
        enable_prefix_caching=caching,
        kv_cache_memory_bytes=1 << 30,
    )
    config = arguments.create_engine_config()
    config.scheduler_config.async_scheduling = True
    config.cache_config.num_gpu_blocks = requests * LONGEST // BLOCK
    return config


def make_scheduler(kind: Callable[..., Any], config: Any) -> Any:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    cache = KVCacheConfig(
        config.cache_config.num_gpu_blocks, [], [KVCacheGroupSpec(["layer"], spec)]
    )
    return kind(
        vllm_config=config,
        kv_cache_config=cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        hash_block_size=BLOCK,
    )


def add_requests(scheduler: Any, config: Any, count: int) -> None:
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    caching = config.cache_config.enable_prefix_caching
    hashed = {"block_hasher": get_request_block_hasher(BLOCK, sha256)} if caching else {}
    for i, length in enumerate(json.loads(LENGTHS.read_text())[:count]):
        params = SamplingParams(max_tokens=length, logprobs=0, seed=i)
        prompt = [(7 * i + 13 * j) % 900 + 5 for j in range(PROMPT)]
        scheduler.add_request(Request(f"request{i}", prompt, params, None, **hashed))


def draw(scheduler: Any, step: Any, random: np.random.Generator) -> Any:
    """Be the model."""
    from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

    names = list(step.num_scheduled_tokens)
    ids = random.integers(5, 900, (len(names), 1), np.int32)
    values = -random.random((len(names), 1), np.float32)
    tokens: list[list[int]] = ids.tolist()
    for row, name in enumerate(names):
        request = scheduler.requests[name]
        if request.num_computed_tokens < request.num_prompt_tokens:
            tokens[row] = []
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: row for row, name in enumerate(names)},
        sampled_token_ids=tokens,
        logprobs=LogprobsLists(ids, values, np.ones(len(names), np.int32), None),
    )


def measure(kind: Callable[..., Any], config: Any, requests: int) -> tuple[float, float]:
    """Return the microseconds of a token: to choose what runs, and to note it."""
    scheduler, random = make_scheduler(kind, config), np.random.default_rng(0)
    add_requests(scheduler, config, requests)
    under_way: deque[Any] = deque()
    chosen = noted = 0.0
    steps = tokens = 0

    while scheduler.has_requests() or under_way:
        counts = steps > SKIPPED
        if scheduler.has_requests():
            begun = time.perf_counter()
            step = scheduler.schedule()
            chosen += (time.perf_counter() - begun) * counts
            under_way.append((step, draw(scheduler, step, random)))
            if len(under_way) < 2 and step.num_scheduled_tokens:
                continue

        scheduled, produced = under_way.popleft()
        begun = time.perf_counter()
        scheduler.update_from_output(scheduled, produced)
        noted += (time.perf_counter() - begun) * counts
        tokens += len(scheduled.num_scheduled_tokens) * counts
        steps += 1
    return 1e6 * chosen / tokens, 1e6 * noted / tokens


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--caching", action="store_true", help="of prefixes")
    given = parser.parse_args()

    prepare_process()  # before the first import of vLLM
    from coupler_rollout_vllm.compat.scheduler import scheduler_class
    from coupler_rollout_vllm.scheduler import scheduler

    with tempfile.TemporaryDirectory() as folder:
        write_shape(Path(folder), "tiny")
        config = configuration(folder, given.requests, given.caching)
    kinds = {"vllm": scheduler_class(config), "coupler": scheduler}
    rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    for _ in range(given.rounds):
        for name, kind in kinds.items():
            rounds[name].append(measure(kind, config, given.requests))

    for name, found in rounds.items():
        chosen, noted = zip(*found, strict=True)
        print(
            f"RESULT {name}: us a token, to choose what runs {spread(chosen)}, to note what was "
            f"sampled {spread(noted)}"
        )


if __name__ == "__main__":
    main()
