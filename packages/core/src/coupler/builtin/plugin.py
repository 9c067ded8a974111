"""Declare core's own transports and trackers, as any plugin declares its backends."""

from __future__ import annotations

from collections.abc import Iterable

from coupler.builtin.weight_path import coupler_weight_path
from coupler.plugins.backend import Backend, Kind
from coupler.plugins.hooks import hookimpl

__all__ = ["coupler_backends", "coupler_weight_path"]

# Core's transports carry named tensors, whatever they mean.
FORMATS = ("weights:full", "weights:lora")


@hookimpl
def coupler_backends() -> Iterable[Backend]:
    yield Backend(
        kind=Kind.TRANSPORT,
        name="inproc",
        target="coupler.builtin.transports.inproc:InprocTransport",
        capabilities=frozenset({*FORMATS, "place:process"}),
    )
    yield Backend(
        kind=Kind.TRANSPORT,
        name="tcp",
        target="coupler.builtin.transports.torch.tcp:TcpTransport",
        capabilities=frozenset({*FORMATS, "place:host", "place:cluster"}),
    )
    yield Backend(
        kind=Kind.TRANSPORT,
        name="disk",
        target="coupler.builtin.transports.disk:DiskTransport",
        capabilities=frozenset({*FORMATS, "place:process", "place:host"}),
    )
    yield Backend(
        kind=Kind.TRANSPORT,
        name="ipc",
        target="coupler.builtin.transports.torch.ipc:IpcTransport",
        capabilities=frozenset({*FORMATS, "place:host", "device:shared"}),
    )
    yield Backend(
        kind=Kind.TRANSPORT,
        name="nccl",
        target="coupler.builtin.transports.torch.nccl:NcclTransport",
        capabilities=frozenset({*FORMATS, "place:host", "place:cluster", "device:apart"}),
    )

    yield Backend(
        kind=Kind.SHARDING,
        name="stream",
        target="coupler.loop.weight_sync:StreamShardingManager",
    )

    yield Backend(
        kind=Kind.TRACKER,
        name="console",
        target="coupler.builtin.trackers.console:ConsoleTracker",
    )
    yield Backend(
        kind=Kind.TRACKER,
        name="jsonl",
        target="coupler.builtin.trackers.jsonl:JsonlTracker",
    )
