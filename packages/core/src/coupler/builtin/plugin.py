"""Core's own plugin: it takes the same road as everyone else's."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from coupler.config.schema import Devices, ExecutorName, Placement, RunConfig
from coupler.errors import PluginError
from coupler.plugins.backend import Backend, Kind
from coupler.plugins.hooks import hookimpl
from coupler.testing.toy_config import BACKENDS as TOY

FORMATS = ("weights:full", "weights:lora")  # a transport of ours carries named tensors, whatever they mean


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
class IpcConfig:
    name: str = "ipc"


@dataclass
class NcclConfig:
    name: str = "nccl"


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
        target="coupler.builtin.transports.inproc:InprocTransport",
        config=InprocConfig,
        capabilities=frozenset({*FORMATS, "place:process"}),
    )
    yield Backend(
        kind=Kind.TRANSPORT,
        name="tcp",
        target="coupler.builtin.transports.torch.tcp:TcpTransport",
        config=TcpConfig,
        capabilities=frozenset({*FORMATS, "place:host", "place:cluster"}),
    )
    yield Backend(
        kind=Kind.TRANSPORT,
        name="disk",
        target="coupler.builtin.transports.disk:DiskTransport",
        config=DiskConfig,
        capabilities=frozenset({*FORMATS, "place:process", "place:host"}),
    )
    yield Backend(
        kind=Kind.TRANSPORT,
        name="ipc",
        target="coupler.builtin.transports.torch.ipc:IpcTransport",
        config=IpcConfig,
        capabilities=frozenset({*FORMATS, "place:host", "device:shared"}),
    )
    yield Backend(
        kind=Kind.TRANSPORT,
        name="nccl",
        target="coupler.builtin.transports.torch.nccl:NcclTransport",
        config=NcclConfig,
        capabilities=frozenset({*FORMATS, "place:host", "place:cluster", "device:apart"}),
    )
    yield Backend(
        kind=Kind.SHARDING, name="stream", target="coupler.loop.weight_sync:StreamShardingManager", config=StreamConfig
    )
    yield Backend(
        kind=Kind.TRACKER,
        name="console",
        target="coupler.builtin.trackers.console:ConsoleTracker",
        config=ConsoleConfig,
    )
    yield Backend(
        kind=Kind.TRACKER, name="jsonl", target="coupler.builtin.trackers.jsonl:JsonlTracker", config=JsonlConfig
    )
    yield Backend(
        kind=Kind.TRACKER,
        name="tensorboard",
        target="coupler.builtin.trackers.tensorboard:TensorboardTracker",
        config=TensorboardConfig,
    )
    yield from TOY


@hookimpl(trylast=True)
def coupler_weight_path(
    engine: Backend, rollout: Backend, transports: Mapping[str, Backend], config: RunConfig
) -> tuple[str, str]:
    """Choose a format that all three share and a transport that reaches the rollout; whole tensors come last.

    Between processes with GPUs, a transport from device to device comes first.
    """
    offered, taken = engine.capabilities_of(config.engine), rollout.capabilities_of(config.rollout)
    reach, direct = _reach(config, remote="workers:remote" in taken)
    carried = {
        name: transport.capabilities_of(transport.config())
        for name, transport in transports.items()
        if config.sync.transport in ("", name)
    }
    formats = sorted(c for c in offered & taken if c.startswith("weights:"))
    for fmt in sorted(formats, key="weights:full".__eq__):
        for name, able in sorted(carried.items(), key=lambda item: direct not in item[1]):  # stable
            anywhere = reach in able and (config.sync.transport or not any(c.startswith("device:") for c in able))
            if fmt in able and (anywhere or direct in able):
                return fmt.removeprefix("weights:"), name
    lines = [
        f"no way to move weights from engine={engine.name} to rollout={rollout.name}; it needs {reach}.",
        f"  engine offers:  {_listing(offered)}",
        f"  rollout takes:  {_listing(taken)}",
        *(f"  transport {name} carries:  {_listing(able)}" for name, able in carried.items()),
    ]
    raise PluginError("\n".join(lines))


def _reach(config: RunConfig, *, remote: bool) -> tuple[str, str]:
    """How far a transport must reach, and between which devices it may, where there are GPUs."""
    ray = config.executor is ExecutorName.RAY
    if not (ray or remote):
        return "place:process", ""
    # under Ray, which nodes they get is not known yet; who names a transport knows it
    reach = "place:cluster" if ray and not config.sync.transport else "place:host"
    if not (config.ray.devices is Devices.GPU or (config.ray.devices is Devices.AUTO and gpu_is_visible())):
        return reach, ""
    return reach, "device:apart" if ray and config.ray.placement is Placement.DISJOINT else "device:shared"


def gpu_is_visible() -> bool:
    """Whether this process may use a GPU, as far as the driver's device file says."""
    return Path("/dev/nvidiactl").exists() and os.environ.get("CUDA_VISIBLE_DEVICES", "all") not in ("", "-1")


def _listing(capabilities: frozenset[str]) -> str:
    return ", ".join(sorted(c for c in capabilities if c.startswith(("weights:", "place:", "device:")))) or "nothing"
