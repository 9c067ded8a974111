"""Define everything a plugin can be.

No signature mentions another plugin, Ray or torch. A batch has T packed tokens of B
sequences, and every token column is ``[T]``.
"""

from coupler.interfaces.algorithm import Aggregation, Algorithm, Controller
from coupler.interfaces.engine import (
    EVERYTHING,
    Columns,
    Engine,
    EngineConfig,
    FileHashes,
    Layout,
    Loss,
    Output,
    Part,
    Parts,
    Pending,
    StepInfo,
    StepResult,
)
from coupler.interfaces.environment import (
    Ended,
    Environment,
    EnvironmentConfig,
    Message,
    Outcome,
    Policy,
    Reply,
    Task,
)
from coupler.interfaces.model import Head, Model, Rank
from coupler.interfaces.options import NO_EFFECT, no_effect
from coupler.interfaces.rollout import (
    Completion,
    Finish,
    InFlight,
    Memory,
    Request,
    Rollout,
    RolloutConfig,
)
from coupler.interfaces.sharding import DeviceTurns, EngineSide, RolloutSide, ShardingManager
from coupler.interfaces.tracker import Tracker
from coupler.interfaces.weights import (
    LORA,
    Endpoint,
    Named,
    SendReceipt,
    Shapes,
    SyncReceipt,
    Transport,
    WeightUpdate,
    open_transport,
)

# The generation of these interfaces. Core accepts plugins of this one and the one
# before.
API = 1

__all__ = [
    "API",
    "EVERYTHING",
    "LORA",
    "NO_EFFECT",
    "Aggregation",
    "Algorithm",
    "Columns",
    "Completion",
    "Controller",
    "DeviceTurns",
    "Ended",
    "Endpoint",
    "Engine",
    "EngineConfig",
    "EngineSide",
    "Environment",
    "EnvironmentConfig",
    "FileHashes",
    "Finish",
    "Head",
    "InFlight",
    "Layout",
    "Loss",
    "Memory",
    "Message",
    "Model",
    "Named",
    "Outcome",
    "Output",
    "Part",
    "Parts",
    "Pending",
    "Policy",
    "Rank",
    "Reply",
    "Request",
    "Rollout",
    "RolloutConfig",
    "RolloutSide",
    "SendReceipt",
    "Shapes",
    "ShardingManager",
    "StepInfo",
    "StepResult",
    "SyncReceipt",
    "Task",
    "Tracker",
    "Transport",
    "WeightUpdate",
    "no_effect",
    "open_transport",
]
