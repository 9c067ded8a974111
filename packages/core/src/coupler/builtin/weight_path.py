"""Choose how weights get from an engine to a rollout."""

from __future__ import annotations

from collections.abc import Mapping

from coupler.config.schema import Devices, ExecutorName, Placement, RunConfig
from coupler.errors import PluginError
from coupler.plugins.backend import Backend
from coupler.plugins.hooks import hookimpl
from coupler.system.gpu import gpu_is_visible


@hookimpl(trylast=True)
def coupler_weight_path(
    engine: Backend, rollout: Backend, transports: Mapping[str, Backend], config: RunConfig
) -> tuple[str, str]:
    """Choose a format that all three share and a transport that reaches the rollout.

    Whole tensors are the last choice. Between processes with GPUs, a transport from
    device to device is the first.
    """
    offered = engine.capabilities_of(config.engine)
    taken = rollout.capabilities_of(config.rollout)
    reach, direct = _reach(config, remote="workers:remote" in taken)
    carried = {
        name: transport.capabilities_of(transport.config())
        for name, transport in transports.items()
        if config.sync.transport in ("", name)
    }

    # both sorts are stable: the names decide where nothing else does
    formats = sorted(c for c in offered & taken if c.startswith("weights:"))
    for fmt in sorted(formats, key="weights:full".__eq__):
        for name, able in sorted(carried.items(), key=lambda item: direct not in item[1]):
            anywhere = reach in able and (
                config.sync.transport or not any(c.startswith("device:") for c in able)
            )
            if fmt in able and (anywhere or direct in able):
                return fmt.removeprefix("weights:"), name

    lines = [
        f"no way to move weights from engine={engine.name} to rollout={rollout.name}; "
        f"it needs {reach}.",
        f"  engine offers:  {_listing(offered)}",
        f"  rollout takes:  {_listing(taken)}",
        *(f"  transport {name} carries:  {_listing(able)}" for name, able in carried.items()),
    ]
    raise PluginError("\n".join(lines))


def _reach(config: RunConfig, *, remote: bool) -> tuple[str, str]:
    """Return how far a transport must reach.

    The second value names the devices between which it may carry. It is empty without
    GPUs.
    """
    ray = config.executor is ExecutorName.RAY
    if not (ray or remote):
        return "place:process", ""

    # Which nodes Ray gives is not known yet. Who names a transport knows it.
    reach = "place:cluster" if ray and not config.sync.transport else "place:host"
    found = config.ray.devices is Devices.AUTO and gpu_is_visible()
    if not (found or config.ray.devices is Devices.GPU):
        return reach, ""

    apart = ray and config.ray.placement is Placement.DISJOINT
    return reach, "device:apart" if apart else "device:shared"


def _listing(capabilities: frozenset[str]) -> str:
    shown = [c for c in capabilities if c.startswith(("weights:", "place:", "device:"))]
    return ", ".join(sorted(shown)) or "nothing"
