"""Tokens per second and the distance to the engine of a rollout in fp8 and in bf16.

    python benchmarks/quantized_rollout.py --rollout vllm --shape 1.5b
    python benchmarks/quantized_rollout.py --rollout sglang --shape 7b
    python benchmarks/quantized_rollout.py --rollout vllm --model FOLDER
    python benchmarks/quantized_rollout.py --rollout vllm --shape tiny --requests 8
    # anywhere, vLLM alone

A model in bf16 is pushed into the rollout, first in bf16 and then with
``rollout.quantization=fp8``, each in a process of its own. It has random weights, or
those of ``--model``, a Hugging Face folder. The output layer of random ones is
multiplied by 5, since they would make every token equally likely. KL is
``train_infer/kl`` (k3, nats per token) between transformers in bf16 and the rollout, on
the first 64 completions; a trained model has another KL than a random one. The row is
for a table: rollout, model, requests, tokens/s in bf16 and in fp8, their ratio, the
seconds of an update and the KL in bf16 and fp8.
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

import numpy as np
import torch
from rollout_vllm_throughput import WARM, make_requests
from shapes import SHAPES, write_shape

from coupler.interfaces import Completion, Model, Request
from coupler.metrics import merge
from coupler.plugins.manager import Plugins
from coupler.testing.edge import Served
from coupler.testing.subject import configured, parse_settings
from coupler.worker.train_infer import differences

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHARP = 5.0
COMPARED = 64
CACHE_GIB = 16.0
LIMIT_S = 1800.0


def make_model(folder: Path) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    if list(folder.glob("*.safetensors")):
        found = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, trust_remote_code=False
        )
        return found.to(DEVICE).eval()
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    with torch.device(DEVICE), torch.no_grad():
        made = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, trust_remote_code=False
        )
        made.get_output_embeddings().weight.mul_(SHARP)
    return made.eval()


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Be one side: push the weights, time the requests and compare log-probs."""
    plugins = Plugins.load()
    backend = plugins.get("rollout", args.rollout)
    cache = {"kv_cache_gib": CACHE_GIB} if DEVICE == "cuda" else {}
    given = parse_settings(args.settings).get("rollout", {})
    quantized = {"quantization": args.side.removeprefix("bf16")}
    config = configured(
        backend.config, {"dtype": "bf16", "prefix_caching": False, **cache, **given, **quantized}
    )
    served = Served(
        backend.load()(config, Model(str(args.folder))),
        plugins.get("transport", "ipc" if DEVICE == "cuda" else "tcp"),
    )
    served.edge.deadline_s = LIMIT_S

    try:
        model = make_model(args.folder)
        seconds = []
        for _ in range(3):
            begun = time.perf_counter()
            push = served.edge.push((n, t.detach()) for n, t in model.named_parameters())
            _, receipt = served.run(lambda push=push: push, LIMIT_S)
            seconds.append(time.perf_counter() - begun)
            assert (receipt.missing, receipt.unexpected) == ((), ()), receipt

        requests = make_requests(args.requests, model.config.vocab_size)
        generate(served, requests[:WARM])
        rates = []
        for _ in range(args.rounds):
            begun = time.perf_counter()
            done = generate(served, requests)
            tokens = sum(len(each.tokens) for each in done)
            rates.append(tokens / (time.perf_counter() - begun))
        pairs = list(zip(requests, done, strict=True))[:COMPARED]
        kl = merge(compared(model, *pair) for pair in pairs)["train_infer/kl"]
    finally:
        served.close()
    return {"rate": statistics.median(rates), "kl": kl.value, "update_s": min(seconds)}


def generate(served: Served, requests: list[Request]) -> list[Completion]:
    async def together() -> list[Completion]:
        return await asyncio.gather(*map(served.rollout.generate, requests))

    return served.run(together, LIMIT_S)


def compared(model: Any, request: Request, done: Completion) -> Any:
    """Return the differences of log-probs on one completion."""
    ids = torch.tensor([[*request.prompt, *done.tokens]], device=DEVICE)
    with torch.no_grad():
        logits = model(ids).logits[0, len(request.prompt) - 1 : -1].float()
    chosen = ids[0, len(request.prompt) :, None]
    own = logits.log_softmax(-1).gather(-1, chosen)[:, 0].cpu().numpy()
    return differences(own - np.array(done.logprobs, np.float32), len(own))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollout", choices=("vllm", "sglang"), required=True)
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", choices=("bf16", "fp8"), help="be one side")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder with weights")
    parser.add_argument("--folder", type=Path, help="of a side: where the model is")
    parser.add_argument("settings", nargs="*", help="rollout.KEY=VALUE")
    args = parser.parse_args()
    if args.side:
        print(json.dumps(measure(args)))
        return

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        if not args.model:
            write_shape(Path(folder), args.shape)
        for side in ("bf16", "fp8"):
            where = args.model or folder
            command = [sys.executable, __file__, f"--side={side}", f"--folder={where}"]
            command += [*sys.argv[1:]]
            done = subprocess.run(
                command, stdout=subprocess.PIPE, text=True, check=True, timeout=2 * LIMIT_S
            )
            found[side] = json.loads(done.stdout.splitlines()[-1])

    plain, fp8 = found["bf16"], found["fp8"]
    name = args.model.name if args.model else args.shape
    print(
        f"| {args.rollout} | {name} | {args.requests} | {plain['rate']:,.0f} | "
        f"{fp8['rate']:,.0f} | {fp8['rate'] / plain['rate']:.2f} | {plain['update_s']:.2f} | "
        f"{fp8['update_s']:.2f} | {plain['kl']:.2g} | {fp8['kl']:.2g} |"
    )


if __name__ == "__main__":
    main()
