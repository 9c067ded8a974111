"""Backend: everything core may know about a plugin's class before importing it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, make_dataclass
from enum import StrEnum
from functools import cache
from typing import Any

from coupler.interfaces import API
from coupler.system.imports import resolve


class Kind(StrEnum):
    ENGINE = "engine"
    ROLLOUT = "rollout"
    ALGORITHM = "algorithm"
    TRANSPORT = "transport"
    SHARDING = "sharding"
    TRACKER = "tracker"


VOCABULARY = frozenset(
    {
        "weights:full",  # (checkpoint name, whole tensor): every engine yields it, every rollout loads it
        "weights:lora",  # engine: sends an adapter apart from the weights beneath it; rollout: runs it upon them
        "place:process",  # transport: sender and receiver share one process
        "place:host",  # transport: processes of one host
        "place:cluster",  # transport: processes of hosts that reach each other's ports
        "device:shared",  # transport: from GPU to GPU, where both sides use the same one
        "device:apart",  # transport: from GPU to GPU, where each side has its own
        "memory:offload",  # engine: offload and onload free device memory
        "memory:sleep",  # rollout: sleep and wake free device memory
        "in_flight:abort",
        "in_flight:recompute",
        "in_flight:stale_kv",
        "sampling:top_p",  # rollout: Request.top_p
        "model:toy",  # works in NumPy, on the toy model folder of coupler.testing, not on transformers' folders
        "model:moe",  # engine, rollout: mixtures of experts too, with one tensor per expert in the checkpoint
        "workers:remote",  # rollout: its model workers are other processes, which place:process does not reach
        "needs:ref_logprobs",  # algorithm: a column that core adds, as in Algorithm.needs, known before it is imported
        "needs:old_logprobs",
        "needs:values",  # trains a critic: its engine declares output:values
        "output:values",  # engine: models with Head.VALUE, Output("values")
        "output:base_logprobs",  # engine: trains an adapter, whose absence is the reference model
        "output:sum_pi_squared",  # engine: Output("sum_pi_squared")
        "output:routed_experts",  # engine: Output("routed_experts"), and replays that column; rollout: returns it
        "job:train",  # algorithm: what it is for; both where it names neither
        "job:sft",
        "world:1",  # engine: one rank only
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One name that users can select, for example ``engine=acme``.

    Example:
        ``Backend(kind="engine", name="acme", target="coupler_acme.engine:AcmeEngine", config=AcmeConfig,
        capabilities=frozenset({"weights:full"}))``
    """

    kind: str  # a Kind
    name: str
    target: str  # "package.module:Class", imported only in the process that runs it
    config: type = None  # type: ignore[assignment] - see __post_init__
    """A dataclass with a field ``name`` that defaults to ``name``; its module imports
    nothing heavy. A transport, a sharding manager or a tracker without options leaves it
    out, and gets one."""
    api: int = API
    capabilities: frozenset[str] | Callable[[Any], frozenset[str]] = frozenset()
    tested: Mapping[str, str] = field(default_factory=dict)  # distribution -> versions, such as {"torch": ">=2.11,<3"}

    def __post_init__(self) -> None:
        """Make the configuration class of a backend that has no options.

        Raises:
            TypeError: the kind needs one: its configuration travels to other processes.
        """
        if self.config is None and self.kind in (Kind.ENGINE, Kind.ROLLOUT, Kind.ALGORITHM):
            raise TypeError(f"the backend {self.kind}={self.name} has no config class")
        if self.config is None:
            object.__setattr__(self, "config", _config_class(self.name))

    def capabilities_of(self, config: Any) -> frozenset[str]:
        """The capabilities under this configuration."""
        return self.capabilities(config) if callable(self.capabilities) else self.capabilities

    def load(self) -> type:
        """Import the class."""
        return resolve(self.target)


@cache
def _config_class(name: str) -> type:
    """Make a configuration class that holds a backend's name."""
    return make_dataclass(f"{name.title()}Config", [("name", str, name)], namespace={"__module__": __name__})
