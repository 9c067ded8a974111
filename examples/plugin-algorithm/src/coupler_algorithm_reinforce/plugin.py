"""Declare what Coupler reads when it lists plugins: imports the standard library and
coupler only.
"""

from dataclasses import dataclass

from coupler import Backend, hookimpl


@dataclass
class ReinforceConfig:
    name: str = "reinforce"
    scale: float = 1.0  # Factor of every advantage.


@hookimpl
def coupler_backends():
    yield Backend(
        kind="algorithm",
        name="reinforce",
        target="coupler_algorithm_reinforce.algorithm:Reinforce",
        config=ReinforceConfig,
        capabilities=frozenset({"job:train"}),
    )
