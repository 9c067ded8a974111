"""The TRL side of grpo_step_vs_trl_gpu.py: one job on one GPU. It prints a line a step,
and its answer at the end.

vLLM runs in the trainer's process, as ``vllm_mode="colocate"`` has it. There is no
reference model, one optimizer step a batch, fused AdamW, no logging and no saving.
Attention is FlashAttention 2 where transformers finds it, and sdpa elsewhere.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from grpo_task import score
from sides import ANSWER
from transformers import TrainerCallback
from transformers.utils import is_flash_attn_2_available
from trl import GRPOConfig, GRPOTrainer

GPU = torch.cuda.is_available()


class Steps(TrainerCallback):
    """Prints the end of each step, when the device has come to it."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        synchronized()
        print(f"step {state.global_step:>4}", flush=True)


class Timed(GRPOTrainer):
    """Keeps the seconds that each batch was sampled in, the weight sync included."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.sampling: list[float] = []

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        return timed(super()._generate_single_turn, self.sampling)(*args, **kwargs)


def synchronized() -> float:
    if GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """Return the function with its seconds appended to a list at each call."""

    def call(*args: Any, **kwargs: Any) -> Any:
        start = synchronized()
        found = function(*args, **kwargs)
        seconds.append(synchronized() - start)
        return found

    return call


def micro_batch(settings: dict[str, Any]) -> int:
    """Return the most sequences of one forward pass, in equal batches, whose tokens
    with padding are not above ``micro_tokens``.
    """
    sequences, longest = settings["prompts"] * settings["samples"], settings["longest"]
    return max(
        number
        for number in range(1, sequences + 1)
        if sequences % number == 0 and (number == 1 or number * longest <= settings["micro_tokens"])
    )


def configuration(settings: dict[str, Any], folder: Path) -> GRPOConfig:
    batch, vllm = micro_batch(settings), settings["rollout"] == "vllm"
    attention = "flash_attention_2" if GPU and is_flash_attn_2_available() else "sdpa"

    return GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=settings["prompts"] * settings["samples"] // batch,
        num_generations=settings["samples"],
        max_completion_length=settings["tokens"],
        max_steps=settings["steps"],
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        weight_decay=0.0,
        max_grad_norm=1.0,
        temperature=1.0,
        beta=0.0,
        num_iterations=1,
        loss_type="grpo",
        vllm_importance_sampling_correction=settings["correction"],
        use_vllm=vllm,
        vllm_mode="colocate",
        vllm_enable_sleep_mode=settings["mode"] == "offloaded",
        vllm_gpu_memory_utilization=settings["trl_memory"],
        vllm_max_model_length=settings["longest"],
        gradient_checkpointing=settings["checkpointing"],
        torch_compile=settings["compile"],
        bf16=GPU,
        use_cpu=not GPU,
        dataloader_num_workers=0,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        model_init_kwargs={"dtype": settings["dtype"], "attn_implementation": attention},
    )


def main(settings: dict[str, Any]) -> None:
    start, folder = time.perf_counter(), Path(settings["folder"])
    tokens: list[int] = []
    longest: list[int] = []
    syncs: list[float] = []

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        lengths = [len(ids) for ids in completion_ids]
        tokens.append(sum(lengths))
        longest.append(max(lengths))
        return [score(completion, "", {}) for completion in completions]

    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    config = configuration(settings, folder)
    trainer = Timed(
        model=str(folder / "model"),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
        callbacks=[Steps()],
    )
    if config.use_vllm:
        vllm = trainer.vllm_generation
        vllm.sync_weights = timed(vllm.sync_weights, syncs)
    print(f"started in {time.perf_counter() - start:.0f} s", flush=True)
    trainer.train()

    print(ANSWER + json.dumps(answer(trainer, tokens, longest, syncs)), flush=True)


def answer(
    trainer: Timed, tokens: list[int], longest: list[int], syncs: list[float]
) -> dict[str, Any]:
    """Return the numbers of each step, and what this process held in which dtype."""
    config, model = trainer.args, trainer.model
    phases = {"sample": trainer.sampling}
    rollout = str(model.dtype)
    if config.use_vllm:
        rollout = str(trainer.vllm_generation.llm.llm_engine.model_config.dtype)
        phases["of it sync"] = syncs

    moments = {
        str(value.dtype)
        for state in trainer.optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.ndim
    }
    computed = "bfloat16" if config.bf16 else model.dtype
    dtypes = (
        f"weights {', '.join({str(p.dtype) for p in model.parameters()})}, AdamW "
        f"{', '.join(moments)}, computed in {computed}, rollout {rollout}, "
        f"{model.config._attn_implementation} attention, micro-batches of "
        f"{config.per_device_train_batch_size} sequences"
    )
    peak = torch.cuda.max_memory_allocated() / 2**30 if GPU else 0.0
    return {
        "tokens": tokens,
        "longest": longest,
        "phases": phases,
        "process_gib": peak,
        "holds": "trainer and vLLM",
        "dtypes": dtypes.replace("torch.", ""),
    }


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
