"""Start or join the Ray cluster of a run, look at it, and take bundles of it."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from coupler.config.schema import RayConfig
from coupler.errors import PlacementError
from coupler.executors.placement import Node, Role, Share
from coupler.system.imports import Late

if TYPE_CHECKING:
    import ray
    import ray._private.state
    import ray.exceptions
    import ray.util.scheduling_strategies
    from ray.util.placement_group import PlacementGroup
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
else:
    ray = Late("ray", "coupler-core[ray]")

# limit of taking bundles that are free
START_S = 120.0
# under way in one actor: all requests that a sampler has out
MAX_CALLS = 1 << 16


@dataclass(frozen=True, slots=True)
class Slot:
    """The resources of one worker."""

    # the first of its bundles
    bundle: int
    # the address of its node
    node: str
    # UUIDs, of all its bundles
    devices: tuple[str, ...]


def connect(config: RayConfig, num_cpus: int) -> bool:
    """Join ``config.address``, or start a cluster on this machine.

    Args:
        num_cpus: logical CPUs of a cluster that is started.

    Returns:
        Whether the cluster is ours to stop.

    Raises:
        PlacementError: there is no cluster at the address, or it does not let us in.
    """
    if ray.is_initialized():
        return False

    common: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    if not config.address:
        ray.init(
            "local",
            num_cpus=num_cpus,
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
            **common,
        )
        return True

    try:
        ray.init(address=config.address, **common)
    except (ConnectionError, RuntimeError, ray.exceptions.RayError, ValueError) as error:
        raise PlacementError(
            f"ray.address={config.address} cannot be joined: {str(error).splitlines()[0]}\n"
            "  if it runs:  set RAY_AUTH_TOKEN_PATH to the file with its token; "
            "RAY_AUTH_MODE=disabled if it has none\n"
            "  if not:      leave ray.address empty to start Ray here"
        ) from None
    return False


def nodes() -> list[Node]:
    """Return the nodes that are alive."""
    # the public functions add all nodes up
    free = ray._private.state.available_resources_per_node()

    return [
        Node(
            f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})",
            node["Resources"],
            free.get(node["NodeID"], {}),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def take(shares: Sequence[Share], num_cpus_per_worker: int, gpus: bool) -> PlacementGroup:
    """Reserve all bundles of all shares, on as few nodes as they fit on.

    Raises:
        PlacementError: they did not become ours within ``START_S``.
    """
    bundles = [s.bundle(num_cpus_per_worker, gpus) for s in shares for _ in range(s.num_bundles)]
    group = ray.util.placement_group(bundles, strategy="PACK")
    if not group.wait(timeout_seconds=START_S):
        ray.util.remove_placement_group(group)
        listed = ", ".join(f"node {n.name}: {n.free.get('CPU', 0):g} CPUs free" for n in nodes())
        raise PlacementError(
            f"{len(bundles)} bundles were not granted within {START_S:g} s.\n  {listed}"
        )
    return group


def slots(
    group: PlacementGroup, shares: Sequence[Share], gpus: bool, deadline_s: float
) -> dict[str, list[Slot]]:
    """Return the slot of each worker, by role.

    Neighbours in index are neighbours on a node.

    Raises:
        PlacementError: the devices of one worker are on several nodes.
    """
    address = {n["NodeID"]: n["NodeManagerAddress"] for n in ray.nodes()}
    where: dict[int, str] = ray.util.placement_group_table(group)["bundles_to_node_id"]

    devices: dict[int, tuple[str, ...]] = dict.fromkeys(where, ())
    if gpus:
        probe = ray.remote(_devices)
        asked = [
            probe.options(num_cpus=0, num_gpus=1, scheduling_strategy=in_bundle(group, b)).remote()
            for b in where
        ]
        devices = dict(zip(where, ray.get(asked, timeout=deadline_s), strict=True))

    first = {node: i for i, node in reversed(list(enumerate(where.values())))}
    found: dict[str, list[Slot]] = {}
    start = 0
    for share in shares:
        mine = sorted(
            range(start, start + share.num_bundles), key=lambda b: (first[where[b]], devices[b])
        )
        start += share.num_bundles
        here = [Slot(b, address[where[b]], devices[b]) for b in mine]
        found |= {
            role.name: [_together(role, here, i) for i in range(role.count)] for role in share.roles
        }
    return found


def _together(role: Role, bundles: list[Slot], index: int) -> Slot:
    mine = bundles[index * role.devices : (index + 1) * role.devices]
    if len({slot.node for slot in mine}) > 1:
        raise PlacementError(
            f"{role.name} {index} takes {role.devices} devices of one node, and the cluster "
            f"gave it some of {' and '.join(sorted({slot.node for slot in mine}))}.\n"
            "  try:  as many devices a worker as divide those of every node"
        )
    return replace(mine[0], devices=tuple(device for slot in mine for device in slot.devices))


def create(
    host: type, group: PlacementGroup, slot: Slot, num_cpus: int, runtime_env: dict[str, Any]
) -> Any:
    """Return an actor class of ``host`` in a slot.

    It reserves no GPU. The bundle has it, and all workers of the bundle see it.
    """
    return ray.remote(host).options(  # type: ignore[attr-defined]
        num_cpus=num_cpus,
        num_gpus=0,
        max_concurrency=MAX_CALLS,
        scheduling_strategy=in_bundle(group, slot.bundle),
        runtime_env=runtime_env,
    )


def in_bundle(group: PlacementGroup, bundle: int) -> PlacementGroupSchedulingStrategy:
    return ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
        group, placement_group_bundle_index=bundle
    )


def _devices() -> tuple[str, ...]:
    """Return the UUIDs of the GPUs that Ray gave this task."""
    given = [str(i) for i in ray.get_gpu_ids()]
    query = ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"]
    listed = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout
    uuids = dict(line.split(", ") for line in listed.strip().splitlines())
    return tuple(uuids.get(i, i) for i in given)
