"""Declare what Coupler reads when it lists plugins: imports the standard library and
coupler only.
"""

from dataclasses import dataclass

from coupler import Backend, hookimpl


@dataclass
class ShmConfig:
    name: str = "shm"


@hookimpl
def coupler_backends():
    yield Backend(
        kind="transport",
        name="shm",
        target="coupler_transport_shm.transport:ShmTransport",
        config=ShmConfig,
        capabilities=frozenset({"weights:full", "weights:lora", "place:process", "place:host"}),
    )
