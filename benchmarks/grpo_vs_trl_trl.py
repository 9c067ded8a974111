"""The TRL side of grpo_vs_trl.py: one job, run by TRL's interpreter; prints one JSON
line.

Settings are the fastest that were found for TRL on a CPU: no reference model (beta 0),
one micro-batch for the whole step, no gradient checkpointing, no logging, saving or
tracking, fp32, sdpa attention (eager was slower at 48 tokens).
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from grpo_task import score
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter())


def main(settings: dict[str, Any]) -> None:
    torch.set_num_threads(settings["threads"])
    folder, rewards, lengths = Path(settings["folder"]), [], []

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        scores = [score(completion, "", {}) for completion in completions]
        rewards.append(sum(scores) / len(scores))
        lengths.append(sum(map(len, completion_ids)) / len(completion_ids))
        return scores

    sequences = settings["prompts_per_step"] * settings["samples_per_prompt"]
    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=sequences,
        gradient_accumulation_steps=1,
        num_generations=settings["samples_per_prompt"],
        max_completion_length=settings["max_tokens"],
        max_steps=settings["steps"],
        learning_rate=settings["lr"],
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        temperature=1.0,
        beta=0.0,
        loss_type="grpo",
        seed=settings["seed"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_num_workers=0,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
    )
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    trainer = GRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
    )
    clock = Clock()
    trainer.add_callback(clock)
    trainer.train()
    seconds = [end - start for start, end in zip(clock.ends, clock.ends[1:], strict=False)]
    print("\n" + json.dumps({"seconds": seconds, "rewards": rewards, "lengths": lengths}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
