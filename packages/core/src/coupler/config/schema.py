"""The run's configuration. A default lives here, once; every unit is in a name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class ModelConfig:
    path: str = ""  # folder in Hugging Face layout: config, safetensors, tokenizer
    trust_remote_code: bool = False


@dataclass
class DataConfig:
    """Rows to train on or to evaluate. ``source`` is a file (.jsonl, .parquet), or ``pkg.mod:function`` that yields rows."""

    source: str = ""
    args: dict[str, Any] = field(default_factory=dict)  # keyword arguments of a function source
    prompt_key: str = "prompt"  # a string, or a list of {role, content}
    answer_key: str = "answer"  # what the reward compares with; the target text in supervised training
    system_prompt: str = ""
    max_prompt_tokens: int = 1024  # a longer prompt is an error, or dropped if drop_overlong
    drop_overlong: bool = False
    shuffle: bool = True
    limit: int = 0  # use the first n rows; 0 is all


@dataclass
class RewardConfig:
    target: str = ""  # "pkg.mod:function" or "file.py:function": (completion, answer, row) -> number | Invalid
    num_workers: int = 1
    timeout_s: float = 10.0  # per call; the process of a call that takes longer is killed
    max_invalid_fraction: float = 0.01  # above it, and at least 5 calls, the run stops


@dataclass
class SamplingConfig:
    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0  # below 1 the log-probs change meaning: refused in training
    stop: list[str] = field(default_factory=list)  # each must be one token of the tokenizer; end-of-turn is always there


@dataclass
class EvalConfig:
    every_steps: int = 0  # 0: never during training
    data: DataConfig = field(default_factory=DataConfig)
    samples_per_prompt: int = 1
    temperature: float = 0.0
    max_tokens: int = 0  # 0: as in sampling
    at_start: bool = False


@dataclass
class CheckpointConfig:
    every_steps: int = 0  # 0: only at the end
    export: bool = True  # write a folder that AutoModelForCausalLM.from_pretrained loads
    optimizer: bool = True


@dataclass
class SyncConfig:
    transport: str = ""  # empty: the best that engine and rollout share
    deadline_s: float = 600.0
    self_test: bool = True  # push a permuted copy first, so that a push that changes nothing cannot pass
    max_mean_logprob_diff: float = 0.0  # limit of the probe of every sync; 0: by dtype of the model


@dataclass
class RunConfig:
    """Everything a run is. ``engine``, ``rollout``, ``algorithm`` and ``trackers`` come from plugins."""

    engine: Any = None
    rollout: Any = None
    algorithm: Any = None
    trackers: list[str] = field(default_factory=lambda: ["console", "jsonl"])
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    run_dir: str = "runs/default"
    steps: int = 100
    prompts_per_step: int = 8  # supervised training: rows per step
    samples_per_prompt: int = 8
    optimizer_steps_per_batch: int = 1
    max_staleness: int = 0  # 0 is synchronous; n lets rollouts run up to n versions behind
    max_skipped_steps: int = 3  # so many steps in a row with a non-finite gradient stop the run
    max_rejected_factor: int = 10  # dynamic sampling gives up after so many times prompts_per_step rejected groups
    offload: bool = False  # engine and rollout share a device and take turns on its memory
    seed: int = 0
