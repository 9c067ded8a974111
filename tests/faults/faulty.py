"""Collect backends that have one fault each, with the values that a fault can take."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, make_dataclass, replace
from itertools import product
from typing import Any

from coupler.builtin import plugin as builtin
from coupler.plugins import Backend
from coupler.testing.toy_config import BACKENDS

# Makes the class of a backend from the values of its fault.
Make = Callable[..., type]
# The name of a backend without a fault, which both the kit and a run must accept.
HONEST = "honest"
LIKE = {
    "engine": "toy",
    "rollout": "toy",
    "algorithm": "toy",
    "transport": "inproc",
    "sharding": "stream",
    "tracker": "jsonl",
    "environment": "toy",
}
# What the faulty backends can do beyond those they are made from.
MORE = {"engine": {"memory:offload"}, "rollout": {"memory:sleep"}}


@dataclass(frozen=True, slots=True)
class Case:
    """One backend with one fault."""

    kind: str
    fault: str
    values: tuple[tuple[str, Any], ...] = ()
    make: Make = field(repr=False, compare=False, default=object)

    @property
    def name(self) -> str:
        """Return a name that the command line and pytest take."""
        parts = [self.fault, *(f"{key}_{value}" for key, value in self.values)]
        return "__".join(parts).replace(".", "p").replace("-", "m").replace("/", "_")

    def backend(self) -> Backend:
        """Build the class, and return the record of the backend."""
        module = sys.modules[__name__]
        cls = self.make(**dict(self.values))
        cls.__name__ = cls.__qualname__ = f"{self.kind}__{self.name}"
        setattr(module, cls.__name__, cls)

        every = (*builtin.coupler_backends(), *BACKENDS)
        like = next(b for b in every if (b.kind, b.name) == (self.kind, LIKE[self.kind]))
        named = [("name", str, field(default=self.name))]
        config = make_dataclass(f"{cls.__name__}Config", named, bases=(like.config,))
        config.__module__ = __name__
        setattr(module, config.__name__, config)
        assert not callable(like.capabilities)
        return replace(
            like,
            name=self.name,
            target=f"{__name__}:{cls.__name__}",
            config=config,
            capabilities=like.capabilities | MORE.get(self.kind, set()),
        )


CASES: list[Case] = []


def fault(kind: str, /, **values: tuple[Any, ...]) -> Callable[[Make], Make]:
    """Declare a fault: a function that returns a class, once for every combination of
    ``values``.
    """

    def declare(make: Make) -> Make:
        for chosen in product(*values.values()):
            found = tuple(zip(values, chosen, strict=True))
            CASES.append(Case(kind, make.__name__, found, make))
        return make

    return declare


def every(kind: str = "") -> Iterator[Case]:
    """Yield every case of a kind, or of all kinds."""
    import tests.faults.faulty_engines
    import tests.faults.faulty_environments
    import tests.faults.faulty_others
    import tests.faults.faulty_rollouts  # noqa: F401 - they declare cases

    yield from (case for case in CASES if kind in ("", case.kind))


def __getattr__(name: str) -> type:
    """Make a class that another process names, where nobody asked for its backend."""
    kind, _, rest = name.partition("__")
    for case in every(kind) if kind in LIKE else ():
        if rest in (case.name, f"{case.name}Config"):
            case.backend()
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# The option of a run that selects a backend. Trackers and environments are left
# to the kit.
KIND_OPTIONS = {
    "engine": "engine",
    "rollout": "rollout",
    "algorithm": "algorithm",
    "transport": "sync.transport",
    "sharding": "sync.manager",
}
