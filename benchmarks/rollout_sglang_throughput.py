"""Tokens per second of rollout=sglang against SGLang's own ``Engine.generate`` with the
same server arguments.

    python benchmarks/rollout_sglang_throughput.py --shape 0.5b
    python benchmarks/rollout_sglang_throughput.py --shape tiny --requests 32 --rounds 1
    # anywhere; on the CPU with PYTHONPATH=packages/rollout-sglang/tests/stand_in

The load is that of ``rollout_vllm_throughput.py``. SGLang's own side has its own
sampler, without seeds unless its kernels are deterministic, and its log-probs.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rollout_vllm_throughput import WARM, main, measured, through_coupler
from sides import serve

from coupler.interfaces import Request
from coupler_rollout_sglang.config import SGLangConfig


def own_engine(folder: Path, config: SGLangConfig) -> Any:
    """Start SGLang as rollout=sglang does, but with its own sampler."""
    from coupler_rollout_sglang.arguments import server_arguments
    from coupler_rollout_sglang.compat.version import prepare
    from coupler_rollout_sglang.host import has_gpu

    gpu = has_gpu()
    prepare(gpu=gpu)  # before the first import of SGLang
    arguments = server_arguments(config, str(folder), 1, False, gpu=gpu)
    for ours in ("sampling_backend", "custom_weight_loader"):
        del arguments[ours]
    from sglang.srt.entrypoints.engine import Engine

    return Engine(**arguments)


def through_sglang(folder: Path, config: SGLangConfig, requests: list[Request]) -> None:
    engine = own_engine(folder, config)
    prompts = [list(request.prompt) for request in requests]
    params = [
        {"max_new_tokens": r.max_tokens, "temperature": r.temperature, "ignore_eos": True}
        for r in requests
    ]
    engine.generate(input_ids=prompts[:WARM], sampling_params=params[:WARM], return_logprob=True)

    def generate() -> dict[str, float]:
        begun, cpu = time.perf_counter(), time.process_time()
        done = engine.generate(input_ids=prompts, sampling_params=params, return_logprob=True)
        return measured(sum(len(d["output_ids"]) for d in done), begun, cpu, len(requests))

    serve(generate)
    engine.shutdown()


if __name__ == "__main__":
    main(__doc__, __file__, SGLangConfig, {"coupler": through_coupler, "sglang": through_sglang})
