"""Work out which workers share resources, and whether a cluster has them.

This is arithmetic, without Ray.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coupler.config.schema import Placement

ROLLOUT, EVAL_ROLLOUT, JUDGE = "rollout", "eval_rollout", "judge"
# Roles whose workers are replicas, which a run can lose.
ROLLOUTS = (ROLLOUT, EVAL_ROLLOUT, JUDGE)
# Engines of models that never train.
REWARD_MODEL, TEACHER = "reward_model", "teacher"


@dataclass(frozen=True, slots=True)
class Role:
    """The workers of one role: ranks of an engine, or replicas of a rollout."""

    name: str
    count: int
    # of each worker, since a replica's model may be split over several on one node
    devices: int = 1

    @property
    def num_bundles(self) -> int:
        return self.count * self.devices


@dataclass(frozen=True, slots=True)
class Share:
    """Roles whose workers of the same index share a bundle.

    A bundle is one GPU or none, and CPUs for each of these workers. A worker of several
    devices has as many bundles, one after the other.
    """

    roles: tuple[Role, ...]

    @property
    def num_bundles(self) -> int:
        return max(role.num_bundles for role in self.roles)

    def bundle(self, num_cpus_per_worker: int, gpus: bool) -> dict[str, float]:
        """Return the resources of one bundle, as Ray names them."""
        cpus = {"CPU": float(num_cpus_per_worker * len(self.roles))}
        return cpus | {"GPU": 1.0} if gpus else cpus


@dataclass(frozen=True, slots=True)
class Node:
    """The resources of a node of the cluster, as Ray names them."""

    name: str
    total: Mapping[str, float]
    free: Mapping[str, float]


def make_shares(roles: Sequence[Role], placement: Placement) -> list[Share]:
    """Put all roles together, or engines and rollouts apart."""
    if placement is Placement.COLOCATED:
        return [Share(tuple(roles))]
    engines = tuple(role for role in roles if role.name not in ROLLOUTS)
    rollouts = tuple(role for role in roles if role.name in ROLLOUTS)
    return [Share(part) for part in (engines, rollouts) if part]


def shortage(
    shares: Sequence[Share], num_cpus_per_worker: int, gpus: bool, nodes: Sequence[Node]
) -> str:
    """Say what a cluster lacks. Empty if every bundle finds room on one node."""
    free = [dict(node.free) for node in nodes]

    for share in shares:
        need = share.bundle(num_cpus_per_worker, gpus)
        for _ in range(share.num_bundles):
            home = next(
                (f for f in free if all(f.get(kind, 0) >= amount for kind, amount in need.items())),
                None,
            )
            if home is None:
                return _describe(shares, num_cpus_per_worker, gpus, nodes)
            for kind, amount in need.items():
                home[kind] -= amount

    return ""


def _describe(
    shares: Sequence[Share], num_cpus_per_worker: int, gpus: bool, nodes: Sequence[Node]
) -> str:
    lines = []

    for kind in ("GPU", "CPU") if gpus else ("CPU",):
        amounts = [
            share.bundle(num_cpus_per_worker, gpus)[kind] * share.num_bundles for share in shares
        ]
        names = ["/".join(role.name for role in share.roles) for share in shares]
        who = " + ".join(f"{name} {amount:g}" for name, amount in zip(names, amounts, strict=True))
        free = sum(node.free.get(kind, 0) for node in nodes)
        total = sum(node.total.get(kind, 0) for node in nodes)
        listed = ", ".join(
            f"node {n.name} {n.free.get(kind, 0):g}/{n.total.get(kind, 0):g} free" for n in nodes
        )
        text = f"needs {sum(amounts):g} {kind}s ({who}), the cluster has {total:g}: {listed}"
        lines.append((sum(amounts) <= free, text))

    # what is short comes first, GPUs before CPUs
    (_, first), *rest = sorted(lines, key=lambda line: line[0])
    return "\n".join(
        [
            f"the run {first}.",
            *(f"  it also {text}" for _, text in rest),
            "  a bundle takes its share of one node",
            "  try:  fewer engine.ranks or rollout.replicas, ray.placement=colocated, or a "
            "larger cluster",
        ]
    )
