"""Core's own plugin: it takes the same road as everyone else's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from coupler.builtin.weight_path import coupler_weight_path
from coupler.plugins.backend import Backend, Kind
from coupler.plugins.hooks import hookimpl

__all__ = ["coupler_backends", "coupler_weight_path"]

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
