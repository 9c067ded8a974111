"""Core's own plugin: it takes the same road as everyone else's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from coupler.config.schema import ExecutorName, RunConfig
from coupler.errors import PluginError
from coupler.plugins.backend import Backend, Kind
from coupler.plugins.hooks import hookimpl
from coupler.testing.toy_config import BACKENDS as TOY


@dataclass
class InprocConfig:
    name: str = "inproc"


@dataclass
class DiskConfig:
    name: str = "disk"


@dataclass
class TcpConfig:
    name: str = "tcp"


@dataclass
class StreamConfig:
    name: str = "stream"


@dataclass
class ConsoleConfig:
    name: str = "console"


@dataclass
class JsonlConfig:
    name: str = "jsonl"


@dataclass
class TensorboardConfig:
    name: str = "tensorboard"


@hookimpl
def coupler_backends() -> Iterable[Backend]:
    yield Backend(
        kind=Kind.TRANSPORT,
        name="inproc",
        target="coupler.transports.inproc:InprocTransport",
        config=InprocConfig,
        capabilities=frozenset({"weights:full", "place:process"}),
    )
    yield Backend(
        kind=Kind.TRANSPORT,
        name="tcp",
        target="coupler.transports.tcp:TcpTransport",
        config=TcpConfig,
        capabilities=frozenset({"weights:full", "place:host", "place:cluster"}),
    )
    yield Backend(
        kind=Kind.TRANSPORT,
        name="disk",
        target="coupler.transports.disk:DiskTransport",
        config=DiskConfig,
        capabilities=frozenset({"weights:full", "place:process", "place:host"}),
    )
    yield Backend(
        kind=Kind.SHARDING, name="stream", target="coupler.sharding:StreamShardingManager", config=StreamConfig
    )
    yield Backend(
        kind=Kind.TRACKER, name="console", target="coupler.tracking.console:ConsoleTracker", config=ConsoleConfig
    )
    yield Backend(kind=Kind.TRACKER, name="jsonl", target="coupler.tracking.jsonl:JsonlTracker", config=JsonlConfig)
    yield Backend(
        kind=Kind.TRACKER,
        name="tensorboard",
        target="coupler.tracking.tensorboard:TensorboardTracker",
        config=TensorboardConfig,
    )
    yield from TOY


@hookimpl(trylast=True)
def coupler_weight_path(
    engine: Backend, rollout: Backend, transports: Mapping[str, Backend], config: RunConfig
) -> tuple[str, str]:
    """Choose a format that all three share and a transport that reaches the rollout; whole tensors come last."""
    offered, taken = engine.capabilities_of(config.engine), rollout.capabilities_of(config.rollout)
    reach = "place:host" if "workers:remote" in taken else "place:process"
    if config.executor is ExecutorName.RAY:  # which nodes they get is not known yet; who names a transport knows it
        reach = "place:host" if config.sync.transport else "place:cluster"
    carried = {
        name: transport.capabilities_of(transport.config())
        for name, transport in transports.items()
        if config.sync.transport in ("", name)
    }
    formats = sorted(c for c in offered & taken if c.startswith("weights:"))
    for fmt in sorted(formats, key="weights:full".__eq__):
        for name, able in carried.items():
            if {fmt, reach} <= able:
                return fmt.removeprefix("weights:"), name
    lines = [
        f"no way to move weights from engine={engine.name} to rollout={rollout.name}; it needs {reach}.",
        f"  engine offers:  {_listing(offered)}",
        f"  rollout takes:  {_listing(taken)}",
        *(f"  transport {name} carries:  {_listing(able)}" for name, able in carried.items()),
    ]
    raise PluginError("\n".join(lines))


def _listing(capabilities: frozenset[str]) -> str:
    return ", ".join(sorted(c for c in capabilities if c.startswith(("weights:", "place:")))) or "nothing"
