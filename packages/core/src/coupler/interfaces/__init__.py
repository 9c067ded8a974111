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
    "Endpoint",
    "Engine",
    "EngineConfig",
    "EngineSide",
    "FileHashes",
    "Finish",
    "Head",
    "InFlight",
    "Layout",
    "Loss",
    "Memory",
    "Model",
    "Named",
    "Output",
    "Part",
    "Parts",
    "Pending",
    "Rank",
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
    "Tracker",
    "Transport",
    "WeightUpdate",
    "no_effect",
    "open_transport",
]
