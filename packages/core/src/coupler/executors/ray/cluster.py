"""Start or join the Ray cluster of a run, look at it, and take bundles of it."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from coupler.config.schema import RayConfig
from coupler.errors import PlacementError
from coupler.executors.placement import Node, Role, Share
from coupler.executors.ray.own import OwnCluster
from coupler.system.imports import Late
from coupler.system.processes import Process

if TYPE_CHECKING:
    import ray
    import ray._private.services
    import ray._private.state
    import ray.exceptions
    import ray.util.scheduling_strategies
    from ray.util.placement_group import PlacementGroup
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
else:
    ray = Late("ray", "coupler-core[ray]")

# limit of taking bundles that are free
TAKE_S = 15.0
# limit of asking every bundle for its devices, which starts a process in each
DEVICES_S = 120.0
# limit of a first answer from an address
ANSWER_S = 5.0
# limit of looking at a process of another node
LOOK_S = 20.0
# what HTTP/2, which Ray speaks, opens with: its preface, and settings that are empty
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
SETTINGS = 4
# under way in one actor: all requests that a sampler has out
MAX_CALLS = 1 << 16


@dataclass(frozen=True, slots=True)
class Slot:
    """The resources of one worker."""

    # the first of its bundles
    bundle: int
    # the address of its node, and Ray's name of that
    node: str
    node_id: str
    # UUIDs, of all its bundles
    devices: tuple[str, ...]


def connect(config: RayConfig, num_cpus: int, watch_s: float) -> OwnCluster | None:
    """Join ``config.address``, or start a cluster on this machine.

    Args:
        num_cpus: logical CPUs of a cluster that is started.
        watch_s: see :class:`OwnCluster`.

    Returns:
        The cluster, if it is ours to stop.

    Raises:
        PlacementError: there is no cluster at the address, or it does not let us in.
    """
    if ray.is_initialized():
        return None
    if not config.address:
        return OwnCluster(num_cpus, watch_s)

    try:
        check_answers(config.address)
        ray.init(address=config.address, log_to_driver=False, configure_logging=False)
    except (OSError, RuntimeError, ray.exceptions.RayError, ValueError) as error:
        raise PlacementError(
            f"ray.address={config.address} cannot be joined: {str(error).splitlines()[0]}\n"
            "  if it runs:  set RAY_AUTH_TOKEN_PATH to the file with its token; "
            "RAY_AUTH_MODE=disabled if it has none\n"
            "  if not:      leave ray.address empty to start Ray here"
        ) from None
    return None


def check_answers(address: str) -> None:
    """Connect to an address, since Ray itself waits for minutes where nothing answers.

    Raises:
        OSError: nothing listens there, or what listens does not speak as Ray does.
        ValueError: it is no address.
    """
    if os.environ.get("RAY_USE_TLS") == "1":
        return
    at = ray._private.services.canonicalize_bootstrap_address_or_die(address)
    host, _, port = at.rpartition(":")
    said, end = b"", time.monotonic() + ANSWER_S

    try:
        with socket.create_connection((host.strip("[]"), int(port)), ANSWER_S) as to:
            to.sendall(PREFACE)
            while len(said) < 4:
                to.settimeout(max(end - time.monotonic(), 0.001))
                if not (got := to.recv(4 - len(said))):
                    raise ConnectionError("it closed the connection")
                said += got
    except TimeoutError:
        raise ConnectionError(f"{at} did not answer within {ANSWER_S:g} s") from None
    except OSError as error:
        raise ConnectionError(f"{at}: {error.strerror or error}") from None
    if said[3] != SETTINGS:
        raise ConnectionError(f"what listens at {at} is no Ray")


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
        PlacementError: they did not become ours within ``TAKE_S``.
    """
    bundles = [s.bundle(num_cpus_per_worker, gpus) for s in shares for _ in range(s.num_bundles)]
    group = ray.util.placement_group(bundles, strategy="PACK")

    if not group.wait(timeout_seconds=TAKE_S):
        ray.util.remove_placement_group(group)
        asked = " + ".join(_amounts(bundle) for bundle in bundles)
        listed = ", ".join(f"node {n.name}: {_amounts(n.free)} free" for n in nodes())
        raise PlacementError(
            f"the cluster did not grant the run {len(bundles)} bundles within {TAKE_S:g} s: "
            f"{asked}.\n"
            f"  there is:  {listed or 'no node'}\n"
            "  try:  the same command once other runs on this cluster have ended"
        )
    return group


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{resources[kind]:g} {kind}s" for kind in ("GPU", "CPU") if kind in resources)


def slots(group: PlacementGroup, shares: Sequence[Share], gpus: bool) -> dict[str, list[Slot]]:
    """Return the slot of each worker, by role.

    Neighbours in index are neighbours on a node.

    Raises:
        PlacementError: the devices of one worker are on several nodes, or a bundle does
            not say which devices it has.
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
        try:
            devices = dict(zip(where, ray.get(asked, timeout=DEVICES_S), strict=True))
        except ray.exceptions.RayError as error:
            raise PlacementError(
                f"a bundle did not say which GPU it has: {str(error).strip().splitlines()[-1]}\n"
                "  try:  nvidia-smi on every node of the cluster"
            ) from None

    first = {node: i for i, node in reversed(list(enumerate(where.values())))}
    found: dict[str, list[Slot]] = {}
    start = 0
    for share in shares:
        mine = sorted(
            range(start, start + share.num_bundles), key=lambda b: (first[where[b]], devices[b])
        )
        start += share.num_bundles
        here = [Slot(b, address[where[b]], where[b], devices[b]) for b in mine]
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


async def on_node(slot: Slot, look: Callable[[Process], Any], process: Process) -> Any:
    """Call ``look`` for a process of a slot's node, and return what it returned.

    On another node a task of Ray calls it. None says that the node did not answer.
    """
    if slot.node == ray.util.get_node_ip_address():
        return look(process)

    where = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(slot.node_id, soft=False)
    asked = ray.remote(look).options(num_cpus=0, scheduling_strategy=where).remote(process)
    try:
        return await asyncio.wait_for(answer_of(asked), LOOK_S)
    except (TimeoutError, ray.exceptions.RayError):
        return None


async def answer_of(ref: Awaitable[Any]) -> Any:
    return await ref


def _devices() -> tuple[str, ...]:
    """Return the UUIDs of the GPUs that Ray gave this task."""
    given = [str(i) for i in ray.get_gpu_ids()]
    query = ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"]
    listed = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout
    uuids = dict(line.split(", ") for line in listed.strip().splitlines())
    return tuple(uuids.get(i, i) for i in given)
