"""The run's configuration. A default lives here, once; every unit is in a name."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from coupler.interfaces import NO_EFFECT, InFlight, no_effect


class Job(StrEnum):
    """What a run does; the names of the commands."""

    TRAIN = "train"
    SFT = "sft"
    EVAL = "eval"


JOBS = {  # the sections that each job needs
    Job.TRAIN: ("engine", "rollout", "algorithm"),
    Job.SFT: ("engine", "algorithm"),
    Job.EVAL: ("engine", "rollout"),
}


@dataclass
class ModelConfig:
    path: str = ""  # folder in Hugging Face layout, or "pkg.mod:function" or "file.py:function" that returns one
    trust_remote_code: bool = False  # run Python code that the folder brings


@dataclass
class CriticModelConfig:
    path: str = ""  # as model.path, which it is where this is empty; a value head in the folder is loaded


@dataclass
class CriticConfig:
    """The critic of an algorithm that needs ``values``. What ``critic.engine`` does not set is as in ``engine``."""

    engine: Any = None  # a backend of kind engine; the policy's where none is chosen
    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    warmup_steps: int = 0  # so many first steps train the critic only
    optimizer_steps_per_batch: int = 0  # 0: as many as the policy takes


@dataclass
class DataConfig:
    """Rows to train on or to evaluate."""

    source: str = ""  # FILE.jsonl, FILE.json, FILE.parquet, a folder of datasets, or "pkg.mod:function"
    args: dict[str, Any] = field(default_factory=dict)  # keyword arguments of a function source
    prompt_key: str = "prompt"  # a string, or a list of {role, content}
    answer_key: str = "answer"  # what the reward compares with; the target text in supervised training
    system_prompt: str = ""  # the first message of every prompt; needs a chat template
    max_prompt_tokens: int = 1024  # a longer prompt is an error, or dropped if drop_overlong
    drop_overlong: bool = False  # leave out what is too long, and say how many
    shuffle: bool = True  # in a new order every epoch
    limit: int = 0  # use the first n rows; 0 is all


@dataclass
class RewardConfig:
    target: str = ""  # "pkg.mod:function" or "file.py:function": (completion, answer, row) -> number | Graded | Invalid
    num_workers: int = no_effect(1)  # processes that score
    timeout_s: float = no_effect(10.0)  # per call; the process of a call that takes longer is killed
    max_invalid_fraction: float = no_effect(0.01)  # above it, and at least 5 calls, the run stops


@dataclass
class SamplingConfig:
    max_tokens: int = 256  # of a completion; one that has so many was truncated
    temperature: float = 1.0  # the logits are divided by it, of the policy too; above 0 in training
    top_p: float = 1.0  # below 1 the log-probs change meaning: refused; evaluation has eval.top_p
    stop: list[str] = field(default_factory=list)  # each one token of the tokenizer; end-of-turn is always there


@dataclass
class EvalConfig:
    every_steps: int = 0  # 0: never during training
    data: DataConfig = field(default_factory=DataConfig)
    samples_per_prompt: int = 1  # above 1: best of them, and the majority where the reward says what it read
    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0  # sample among the fewest tokens that together have so much; of rollouts that know it
    max_tokens: int = 0  # 0: as in sampling
    at_start: bool = False  # before the first step too


@dataclass
class CheckpointConfig:
    every_steps: int = 0  # 0: only at the end
    resume: str = "auto"  # the last whole one of run_dir; disable: none; or a folder that an empty run_dir starts from
    reset_data: bool = False  # a resumed run starts its data from the beginning: needed where the data changed
    asynchronous: bool = True  # training goes on while a checkpoint is written
    keep_last: int = 2  # 0 keeps all
    keep_best: int = 0  # so many more, by best_metric; where both end, the last step with a finite gradient stays
    best_metric: str = "eval/reward"  # higher is better
    export: bool = True  # write a folder that AutoModelForCausalLM.from_pretrained loads
    optimizer: bool = True  # its state is written too; without it, moments and schedule start anew
    deadline_s: float = 1800.0  # for one to be on the disk


@dataclass
class RecordConfig:
    every_steps: int = 0  # keep the batch of every so many steps in record/, for coupler replay; 0: none


@dataclass
class ProfileConfig:
    """Traces of torch.profiler, and on a GPU snapshots of its memory, of what engines do in some steps."""

    steps: list[int] = field(default_factory=list)  # optimizer steps of each trained role, from 0; none: no traces
    ranks: list[int] = field(default_factory=lambda: [0])  # of each trained role
    path: str = ""  # folder of the traces; empty: profile/ in run_dir


class OnSync(StrEnum):
    """What a sync does with requests that are being sampled: see :class:`~coupler.interfaces.InFlight`."""

    AUTO = "auto"  # recompute with max_staleness above 0, where the rollout can; else drain
    DRAIN = InFlight.DRAIN
    ABORT = InFlight.ABORT
    RECOMPUTE = InFlight.RECOMPUTE
    STALE_KV = InFlight.STALE_KV


@dataclass
class SyncConfig:
    manager: str = "stream"  # a backend of kind sharding
    transport: str = no_effect("")  # empty: the best that engine and rollout share
    deadline_s: float = no_effect(600.0)  # for one sync
    in_flight: OnSync = OnSync.AUTO  # abort, recompute and stale_kv need max_staleness > 0, where some are in flight
    self_test: bool = no_effect(True)  # push a permuted copy first, so that a push that changes nothing cannot pass
    max_mean_logprob_diff: float = no_effect(0.0)  # limit of the probe of every sync; 0: by dtype of the model


class ExecutorName(StrEnum):
    """Where workers live."""

    LOCAL = "local"  # one rank of each role in the process that runs the job
    RAY = "ray"  # one Ray actor per engine rank and per rollout replica


class Placement(StrEnum):
    """Which roles share devices."""

    COLOCATED = "colocated"  # rank i of every engine and replica i of the rollout share the devices of bundle i
    DISJOINT = "disjoint"  # rollouts have bundles of their own; engines share theirs


class Devices(StrEnum):
    """What a bundle of resources is."""

    AUTO = "auto"  # one GPU per bundle where the cluster has any, else the CPU
    GPU = "gpu"
    CPU = "cpu"


@dataclass
class RayConfig:
    """Read under ``executor=ray``."""

    address: str = ""  # of a cluster to join, host:port or auto; empty starts Ray on loopback for this run
    placement: Placement = Placement.COLOCATED
    devices: Devices = Devices.AUTO
    num_cpus_per_worker: int = 1  # logical CPUs that an engine rank or a rollout replica reserves


@dataclass
class WaitsConfig:
    """Waits for workers: every one has a name, and none is without end."""

    deadline_s: float = 7200.0  # of one call; above the longest step; what blocks the only thread cannot be ended
    heartbeat_s: float = 60.0  # what has been outstanding for longer is named on the console, so often


class RouterReplay(StrEnum):
    """Which experts tokens go to while the policy trains (a mixture of experts whose routers change their mind)."""

    DISABLED = "disabled"  # where the router sends them
    R2 = "R2"  # where the pass for old log-probs sent them
    R3 = "R3"  # where the rollout sent them


@dataclass
class RunConfig:
    """Everything a run is. ``engine``, ``rollout``, ``algorithm`` and ``trackers`` come from plugins."""

    engine: Any = None
    rollout: Any = None
    algorithm: Any = None
    trackers: list[str] = field(default_factory=lambda: ["console", "jsonl"], metadata=NO_EFFECT)  # writers of metrics
    model: ModelConfig = field(default_factory=ModelConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    eval: EvalConfig = field(default_factory=EvalConfig, metadata=NO_EFFECT)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig, metadata=NO_EFFECT)
    record: RecordConfig = field(default_factory=RecordConfig, metadata=NO_EFFECT)
    profile: ProfileConfig = field(default_factory=ProfileConfig, metadata=NO_EFFECT)
    sync: SyncConfig = field(default_factory=SyncConfig)
    executor: ExecutorName = field(default=ExecutorName.LOCAL, metadata=NO_EFFECT)
    ray: RayConfig = field(default_factory=RayConfig, metadata=NO_EFFECT)
    waits: WaitsConfig = field(default_factory=WaitsConfig, metadata=NO_EFFECT)
    run_dir: str = no_effect("runs/default")  # folder of the run; the same command in it goes on
    steps: int = no_effect(100)  # each samples a batch and trains on it
    prompts_per_step: int = 8  # supervised training: rows per step
    samples_per_prompt: int = 8  # completions of each prompt
    optimizer_steps_per_batch: int = 1  # each over an equal part of the batch's sequences
    epochs_per_batch: int = 1  # times that these steps are taken on the same batch
    max_staleness: int = 0  # 0 is synchronous; n lets rollouts run up to n versions behind
    max_skipped_steps: int = no_effect(3)  # so many steps in a row with a non-finite gradient stop the run
    max_rejected_factor: int = no_effect(10)  # dynamic sampling gives up after so many x prompts_per_step rejections
    router_replay: RouterReplay = RouterReplay.DISABLED
    offload: bool = no_effect(False)  # engine and rollout share a device and take turns on its memory
    seed: int = 0  # of every random stream: order of the data, sampling, new weights
    deterministic: bool = False  # two runs are equal but for time/*, without memory/*; slower, needs max_staleness=0
    strict: bool = no_effect(False)  # an option that you set and nothing reads is an error, not a warning
