"""Backend holds what core knows about the class of a plugin before importing it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, make_dataclass
from enum import StrEnum
from functools import cache
from typing import Any

from coupler.errors import PluginError
from coupler.interfaces import (
    API,
    Algorithm,
    Engine,
    Environment,
    Rollout,
    ShardingManager,
    Tracker,
    Transport,
)
from coupler.system.imports import load_subclass


class Kind(StrEnum):
    ENGINE = "engine"
    ROLLOUT = "rollout"
    ALGORITHM = "algorithm"
    TRANSPORT = "transport"
    SHARDING = "sharding"
    TRACKER = "tracker"
    ENVIRONMENT = "environment"


BASES = (Engine, Rollout, Algorithm, Transport, ShardingManager, Tracker, Environment)
CLASSES: Mapping[str, type] = dict(zip(Kind, BASES, strict=True))

# these have options of their own
_CONFIGURED = (Kind.ENGINE, Kind.ROLLOUT, Kind.ALGORITHM, Kind.ENVIRONMENT)

VOCABULARY = frozenset(
    {
        # Every engine yields pairs of a checkpoint name and a whole tensor, and every
        # rollout loads them.
        "weights:full",
        # An engine sends an adapter apart from the weights beneath it, and a rollout
        # runs it upon them.
        "weights:lora",
        # A transport reaches within one process, or between processes of one host, or
        # between hosts that reach each other's ports.
        "place:process",
        "place:host",
        "place:cluster",
        # A transport sends from GPU to GPU: within the same one, or to another.
        "device:shared",
        "device:apart",
        # An engine frees device memory in offload, and a rollout in sleep.
        "memory:offload",
        "memory:sleep",
        # A rollout can do this with requests that run when weights arrive.
        "in_flight:abort",
        "in_flight:recompute",
        "in_flight:stale_kv",
        # A rollout obeys Request.top_p.
        "sampling:top_p",
        # A rollout obeys Request.top_k and returns Completion.sampling_mask. An engine
        # obeys the column sampling_mask.
        "output:sampling_mask",
        "input:sampling_mask",
        # The backend works in NumPy, on the toy model folder of coupler.testing alone.
        "model:toy",
        # The backend runs mixtures of experts too, from a tensor per expert on disk.
        "model:moe",
        # An engine trains adapters of experts: target_modules may name experts.
        "lora:experts",
        # A rollout serves the weights of the folder where Model.own_weights says so.
        "model:own_weights",
        # Model workers of a rollout are processes that place:process does not reach.
        "workers:remote",
        # An algorithm needs a column that core adds, as Algorithm.needs says once it is
        # imported. The engine of a critic declares output:values.
        "needs:ref_logprobs",
        "needs:old_logprobs",
        "needs:values",
        "needs:greedy_reward",
        "needs:data_source",
        "needs:demonstration",
        "needs:teacher_logprobs",
        "needs:teacher_top_logprobs",
        "needs:sum_pi_squared",
        "needs:turn",
        "needs:anchor",
        # An engine computes Output("values") of models with Head.VALUE or Head.SCORE.
        "output:values",
        # An engine trains an adapter. The model without it is the reference model.
        "output:base_logprobs",
        # An engine computes Output("sum_pi_squared").
        "output:sum_pi_squared",
        # An engine computes Output("top_ids") and Output("top_logprobs").
        "output:topk",
        # An engine computes and replays Output("routed_experts"). A rollout returns it.
        "output:routed_experts",
        # An algorithm is for these jobs, or for both where it names neither.
        "job:train",
        "job:sft",
        # Supervised training of an algorithm reads pairs of completions, or completions
        # with a label. Without either, it reads answers.
        "rows:pair",
        "rows:label",
        # An algorithm trains on some of the sampled rows, and joins them to units.
        "rows:select",
        # An algorithm trains a model with Head.SCORE, on an engine of output:values.
        "head:score",
        # An engine has one rank only.
        "world:1",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """Backend is one name that users can select, for example ``engine=acme``.

    Example:
        ``Backend(kind="engine", name="acme", target="coupler_acme.engine:AcmeEngine",
        config=AcmeConfig, capabilities=frozenset({"weights:full"}))``
    """

    kind: str
    """One of :class:`Kind`."""
    name: str
    target: str
    """``"package.module:Class"``, imported only in the process that runs it."""
    config: type = None  # type: ignore[assignment]  # __post_init__ makes it a class.
    """A dataclass with a field ``name`` that defaults to ``name``. Its module imports
    nothing heavy. A transport, a sharding manager or a tracker without options leaves
    it out, and gets one."""
    api: int = API
    capabilities: frozenset[str] | Callable[[Any], frozenset[str]] = frozenset()
    tested: Mapping[str, str] = field(default_factory=dict)
    """Versions by distribution, such as ``{"torch": ">=2.11,<3"}``."""
    serves: str = ""
    """A command that serves a model, with ``{folder}`` in the place of its folder."""

    def __post_init__(self) -> None:
        """Make the configuration class of a backend that has no options.

        Raises:
            TypeError: the kind needs one: its configuration travels to other processes.
        """
        if self.config is None and self.kind in _CONFIGURED:
            raise TypeError(f"the backend {self.kind}={self.name} has no config class")
        if self.config is None:
            object.__setattr__(self, "config", _config_class(self.name))

    def capabilities_of(self, config: Any) -> frozenset[str]:
        """Return the capabilities that hold under a configuration.

        Raises:
            PluginError: the plugin does not tell them.
        """
        who = f"{self.kind}={self.name}"
        try:
            found = self.capabilities(config) if callable(self.capabilities) else self.capabilities
        except Exception as error:  # a plugin's boundary
            text = f"{type(error).__name__}: {error}"
            raise PluginError(f"{who} cannot tell its capabilities: {text}") from error
        if not isinstance(found, Set) or not all(isinstance(name, str) for name in found):
            raise PluginError(f"{who}: its capabilities are no frozenset of texts: {found!r:.60}")
        return frozenset(found)

    def load(self) -> type:
        """Import the class.

        Raises:
            CouplerError: there is none, or it is not what this kind needs.
        """
        return load_subclass(self.target, CLASSES[self.kind])


@cache
def _config_class(name: str) -> type:
    """Make a configuration class that holds a backend's name."""
    return make_dataclass(
        f"{name.title()}Config", [("name", str, name)], namespace={"__module__": __name__}
    )
