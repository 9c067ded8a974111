"""Define the options of a run. A default, its bounds and its help live here, once.

The text under a field is what ``coupler config explain`` shows, alone: a sentence that
needs no neighbour. Bounds are the field's metadata, ``ge`` and ``le``, both of which
are allowed values. A unit is part of the name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from coupler.data.options import DataConfig
from coupler.interfaces import NO_EFFECT, InFlight, no_effect
from coupler.rewards.options import JudgeConfig, RewardConfig, RewardModelConfig


class Job(StrEnum):
    """The kinds of runs. The values are the names of the commands."""

    TRAIN = "train"
    SFT = "sft"
    EVAL = "eval"


# The sections that each job needs, and those that it may have.
JOBS = {
    Job.TRAIN: ("engine", "rollout", "algorithm"),
    Job.SFT: ("engine", "algorithm"),
    Job.EVAL: ("engine", "rollout"),
}
OF_EPISODES = ("environment", "reward_model.engine", "judge.rollout")
MAY_HAVE = {
    Job.TRAIN: ("critic.engine", "eval.rollout", "teacher.engine", *OF_EPISODES),
    Job.SFT: ("rollout", "reward_model.engine", "judge.rollout"),
    Job.EVAL: OF_EPISODES,
}


@dataclass
class ModelConfig:
    """The model to train or to evaluate."""

    path: str = ""
    """The model's folder in Hugging Face layout, its name on the Hub as ORG/NAME or
    ORG/NAME@REVISION, or a function "pkg.mod:name" that returns a folder."""
    trust_remote_code: bool = False
    """Run Python code that the model's folder brings."""


@dataclass
class CriticModelConfig:
    """The model that the critic starts from."""

    path: str = ""
    """The critic's model folder; empty takes model.path. A value head in the folder is
    loaded, else the head is new."""


@dataclass
class CriticConfig:
    """The critic of an algorithm that needs ``values``.

    Options that ``critic.engine`` does not set are as in ``engine``.
    """

    engine: Any = None
    """The backend that trains the critic; the policy's if none is chosen."""
    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    warmup_steps: int = field(default=0, metadata={"ge": 0})
    """The first steps of the run train only the critic, this many of them."""
    optimizer_steps_per_batch: int = field(default=0, metadata={"ge": 0})
    """Optimizer steps that the critic takes on each batch; 0 takes as many as the
    policy."""


@dataclass
class TeacherModelConfig:
    """The folder of a teacher."""

    path: str = ""
    """The folder of a teacher with the policy's tokenizer, in Hugging Face layout, or a
    function "pkg.mod:name" or "file.py:name" that returns one; empty has none."""
    trust_remote_code: bool = False
    """Run Python code that the teacher's folder brings."""


@dataclass
class TeacherConfig:
    """The models that an algorithm learns from which needs ``teacher_logprobs`` or
    ``teacher_top_logprobs``.

    Options that ``teacher.engine`` does not set are as in ``engine``.
    """

    engine: Any = None
    """The backend that computes the teacher's log-probs; the policy's if none is
    chosen."""
    model: TeacherModelConfig = field(default_factory=TeacherModelConfig)
    models: dict[str, str] = field(default_factory=dict)
    """Several teachers in place of one, a folder by name; the column ``teacher`` of a
    row names its own."""
    prompt: str = ""
    """A text file with {prompt} and other columns of a row, such as {answer}, which
    teachers read in place of the prompt; without a teacher's model the policy is its
    own teacher."""
    top_k: int = field(default=64, metadata={"ge": 1})
    """The most likely tokens at each position that an algorithm which learns a
    teacher's distribution gets."""


@dataclass
class SamplingConfig:
    """The sampling of completions in training."""

    max_tokens: int = field(default=256, metadata={"ge": 1})
    """The longest completion, in tokens; one that reaches it was truncated."""
    temperature: float = field(default=1.0, metadata={"ge": 0})
    """Logits are divided by this, in the rollout and in the policy; it must be above 0
    in training."""
    top_p: float = field(default=1.0, metadata={"ge": 1e-6, "le": 1})
    """Training samples among the fewest tokens that together have this probability, out
    of the sampling.top_k most likely ones, which it needs below 1; for evaluation set
    eval.top_p."""
    top_k: int = field(default=0, metadata={"ge": 0, "le": 500_000})
    """Training samples among this many most likely tokens, and the engine's log-probs
    are over the same ones; 0 stands for all of them. Rollout and engine must support
    it."""
    stop: list[str] = field(default_factory=list)
    """Texts that end a completion, each one token of the tokenizer; the end of a turn
    always does."""


@dataclass
class EvalConfig:
    """The sampling and scoring of held-out prompts."""

    every_steps: int = field(default=0, metadata={"ge": 0})
    """Evaluate after every so many training steps; 0 never does during training."""
    every_epochs: int = field(default=0, metadata={"ge": 0})
    """Evaluate supervised training after every so many epochs; 0 never does."""
    patience: int = field(default=0, metadata={"ge": 0})
    """Supervised training ends after this many evaluations in a row in which
    checkpoint.best_metric did not get better; 0 never ends it early."""
    data: DataConfig = field(default_factory=DataConfig)
    samples_per_prompt: int = field(default=1, metadata={"ge": 1})
    """Completions of each evaluated prompt. Above 1 the best of them is reported, too,
    and the majority where the reward says which answer it read."""
    temperature: float = field(default=0.0, metadata={"ge": 0})
    """Sampling temperature of evaluation; 0 is greedy."""
    top_p: float = field(default=1.0, metadata={"ge": 1e-6, "le": 1})
    """Evaluation samples among the fewest tokens that together have this probability;
    the rollout must support it."""
    max_tokens: int = field(default=0, metadata={"ge": 0})
    """The longest completion in evaluation, in tokens; 0 takes sampling.max_tokens."""
    at_start: bool = False
    """Evaluate before the first training step, too."""
    rollout: Any = None
    """The rollout of evaluations during training; that of the run if none is chosen."""


RESUMED = ("model", "optimizer", "extra")  # the parts that a run goes on from
HF_MODEL = "hf_model"


@dataclass
class CheckpointConfig:
    """The times of checkpoints, those that stay, and the start of a run."""

    every_steps: int = field(default=0, metadata={"ge": 0})
    """Write a checkpoint after every so many steps; 0 writes one only at the end."""
    every_epochs: int = field(default=0, metadata={"ge": 0})
    """Write a checkpoint of supervised training after every so many epochs."""
    resume: str = "auto"
    """The place where the run goes on: auto takes the last whole checkpoint of run_dir,
    disable takes none, and a folder is what an empty run_dir starts from."""
    reset_data: bool = False
    """Start the data from the beginning when the run is resumed; needed if the data
    changed."""
    asynchronous: bool = True
    """Let training go on while a checkpoint is written."""
    keep_last: int = field(default=2, metadata={"ge": 0})
    """Keep this many of the newest checkpoints; 0 keeps all."""
    keep_best: int = field(default=0, metadata={"ge": 0})
    """Also keep this many checkpoints with the best best_metric; the last one with a
    finite gradient is always kept."""
    best_metric: str = "eval/reward"
    """The metric that checkpoint.keep_best and eval.patience compare."""
    lower_is_better: bool = False
    """A lower checkpoint.best_metric is better, as of a loss; else a higher one is."""
    export: bool = True
    """Write the final model as a folder that AutoModelForCausalLM.from_pretrained
    loads."""
    contents: list[str] = field(default_factory=lambda: list(RESUMED))
    """Write these parts: model, optimizer, extra (where data, buffer and controller
    stood), and hf_model, each trained model as a Hugging Face folder."""
    load_contents: list[str] = field(default_factory=lambda: list(RESUMED))
    """Read these parts of a checkpoint: model, optimizer, extra. One that is left out
    starts anew."""
    hook: str = ""
    """Call this function, file.py:function, with the folder of each checkpoint once it
    is whole. If it fails, that is a warning."""
    deadline_s: float = field(default=1800.0, metadata={"ge": 0.001})
    """Seconds until a checkpoint must be on the disk."""


@dataclass
class RecordConfig:
    """Batches that are kept for ``coupler replay``."""

    every_steps: int = field(default=0, metadata={"ge": 0})
    """Keep the batch of every so many steps in record/ for coupler replay; 0 keeps
    none."""


@dataclass
class SamplesConfig:
    """Text that the policy wrote, kept for the eye."""

    every_steps: int = field(default=10, metadata={"ge": 0})
    """Write the samples of step 1 and of every so many steps to samples/, and print two
    of them; 0 writes none."""
    max_groups: int = field(default=8, metadata={"ge": 1})
    """Write at most so many prompt groups of a step to samples/."""


@dataclass
class ProfileConfig:
    """Traces of torch.profiler for chosen steps, and snapshots of a GPU's memory."""

    steps: list[int] = field(default_factory=list)
    """Trace these optimizer steps of each trained role, counted from 0; an empty list
    traces none."""
    ranks: list[int] = field(default_factory=lambda: [0])
    """Trace these ranks of each trained role."""
    path: str = ""
    """The folder for traces; empty means profile/ in run_dir."""


class OnSync(StrEnum):
    """The treatment of requests that are being sampled when a sync comes.

    :class:`~coupler.interfaces.InFlight` explains them.
    """

    # Recompute if max_staleness is above 0 and the rollout can, else drain.
    AUTO = "auto"
    DRAIN = InFlight.DRAIN
    ABORT = InFlight.ABORT
    RECOMPUTE = InFlight.RECOMPUTE
    STALE_KV = InFlight.STALE_KV


@dataclass
class SyncConfig:
    """The way of new weights from the engine to the rollouts."""

    manager: str = "stream"
    """The backend of kind sharding that moves the weights."""
    transport: str = no_effect("")
    """The transport that carries the weights; empty takes the best that engine and
    rollout share."""
    deadline_s: float = no_effect(600.0, ge=0.001)
    """Seconds that one weight sync may take."""
    in_flight: OnSync = OnSync.AUTO
    """The fate of requests that are being sampled during a sync. abort, recompute and
    stale_kv need max_staleness above 0, where some are."""
    self_test: bool = no_effect(True)
    """Push a permuted copy of the weights first, so that a push that changes nothing is
    found out."""
    max_mean_logprob_diff: float = no_effect(0.0, ge=0)
    """The largest mean difference of log-probs between engine and rollout after a sync;
    0 takes the limit of the least precise dtype of both."""
    max_sampling_z: float = no_effect(8.0, ge=0)
    """The largest distance, in standard deviations, between how surprising sampled
    tokens are and the entropy of their distribution, over several steps. A hidden top-p
    or repetition penalty exceeds it. 0 turns this check off."""


class ExecutorName(StrEnum):
    """The place where workers live."""

    LOCAL = "local"  # one rank of each role in the process that runs the job
    RAY = "ray"  # one Ray actor per engine rank and per rollout replica
    TORCHRUN = "torchrun"  # one engine rank in each process that torchrun has started


class Placement(StrEnum):
    """The roles that share devices."""

    COLOCATED = "colocated"  # rank i of every engine and replica i share bundle i
    DISJOINT = "disjoint"  # rollouts have bundles of their own, engines share theirs


class Devices(StrEnum):
    """The device of a bundle of resources."""

    AUTO = "auto"  # one GPU per bundle where the cluster has any, else the CPU
    GPU = "gpu"
    CPU = "cpu"


@dataclass
class RayConfig:
    """The Ray cluster of ``executor=ray``."""

    address: str = ""
    """The cluster to join, host:port or auto; empty starts Ray on loopback for this
    run."""
    placement: Placement = Placement.COLOCATED
    """The sharing of devices: all roles share them (colocated), or engines and rollouts
    each have their own (disjoint)."""
    devices: Devices = Devices.AUTO
    """The device of each worker: a GPU, the CPU, or a GPU wherever the cluster has any
    (auto)."""
    num_cpus_per_worker: int = field(default=1, metadata={"ge": 1})
    """Logical CPUs that each engine rank and each rollout replica reserves."""


@dataclass
class WaitsConfig:
    """Limits of waits for workers. Every wait has a name and an end."""

    deadline_s: float = field(default=7200.0, metadata={"ge": 0.001})
    """Seconds that one call of a worker may take; set it above the longest step. A call
    that blocks the only thread cannot be ended."""
    heartbeat_s: float = field(default=60.0, metadata={"ge": 0.001})
    """A call that lasts longer than this many seconds is named on the console, again
    and again at this interval."""


class Offload(StrEnum):
    """Says what leaves a device that others need."""

    AUTO = "auto"
    TRUE = "true"
    FALSE = "false"


class RouterReplay(StrEnum):
    """The choice of experts for each token while a mixture of experts trains."""

    DISABLED = "disabled"  # where the router sends them
    R2 = "R2"  # where the pass for old log-probs sent them
    R3 = "R3"  # where the rollout sent them


@dataclass
class RunConfig:
    """All options of a run.

    Those of ``engine``, ``rollout``, ``algorithm`` and ``environment`` come from
    plugins.
    """

    engine: Any = None
    rollout: Any = None
    algorithm: Any = None
    environment: Any = None
    """The environment that plays the episodes; without one, each is one completion."""
    trackers: list[str] = field(default_factory=lambda: ["console", "jsonl"], metadata=NO_EFFECT)
    """The backends that write the run's metrics."""
    tracker: Any = field(default=None, metadata=NO_EFFECT)
    """The options of each tracker, as tracker.NAME.key."""
    model: ModelConfig = field(default_factory=ModelConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    eval: EvalConfig = field(default_factory=EvalConfig, metadata=NO_EFFECT)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig, metadata=NO_EFFECT)
    record: RecordConfig = field(default_factory=RecordConfig, metadata=NO_EFFECT)
    samples: SamplesConfig = field(default_factory=SamplesConfig, metadata=NO_EFFECT)
    profile: ProfileConfig = field(default_factory=ProfileConfig, metadata=NO_EFFECT)
    sync: SyncConfig = field(default_factory=SyncConfig)
    executor: ExecutorName = field(default=ExecutorName.LOCAL, metadata=NO_EFFECT)
    """The place of the workers: in the process that runs the job (local), each in a Ray
    actor (ray), or each in a process of torchrun, which sets it (torchrun)."""
    ray: RayConfig = field(default_factory=RayConfig, metadata=NO_EFFECT)
    waits: WaitsConfig = field(default_factory=WaitsConfig, metadata=NO_EFFECT)
    run_dir: str = no_effect("runs/default")
    """The folder of the run; the same command with the same folder goes on where it
    ended."""
    steps: int = no_effect(100, ge=1)
    """Training steps of the run; each samples a batch and trains on it."""
    epochs: float = no_effect(0.0, ge=0)
    """Passes of supervised training over its rows, which then decide about steps; 0
    leaves it to steps."""
    prompts_per_step: int = field(default=8, metadata={"ge": 1})
    """Prompts that each step samples; in supervised training, the rows of each step."""
    samples_per_prompt: int = field(default=8, metadata={"ge": 1})
    """Completions that are sampled of each prompt."""
    optimizer_steps_per_batch: int = field(default=1, metadata={"ge": 1})
    """Optimizer steps on each batch, each over an equal part of its sequences."""
    epochs_per_batch: int = field(default=1, metadata={"ge": 1})
    """Times that training goes over the same batch."""
    max_staleness: int = field(default=0, metadata={"ge": 0})
    """Versions that the sampling weights may be behind the trained ones; 0 is
    synchronous training."""
    max_skipped_steps: int = no_effect(3, ge=0)
    """The run stops after this many steps in a row with a non-finite gradient."""
    max_rejected_factor: int = no_effect(10, ge=1)
    """Dynamic sampling gives up when it has rejected this many times prompts_per_step
    groups."""
    router_replay: RouterReplay = RouterReplay.DISABLED
    """The experts of each token while a mixture of experts trains: the router's choice
    (disabled), that of the old log-probs (R2), or the rollout's (R3)."""
    offload: Offload = field(default=Offload.AUTO, metadata=NO_EFFECT)
    """Let roles on one GPU take turns on its memory: with all of it (true), with what
    their estimates say does not fit (auto, all where a backend cannot say what it
    takes), or not (false)."""
    seed: int = field(default=0, metadata={"ge": 0, "le": 2**63 - 1})
    """The seed of every random stream: the order of the data, sampling, new weights."""
    deterministic: bool = False
    """Make two runs equal in everything but time/*, and leave out memory/*; this is
    slower, and needs max_staleness=0."""
    strict: bool = no_effect(False)
    """Make an option that you set and nothing reads an error instead of a warning."""
