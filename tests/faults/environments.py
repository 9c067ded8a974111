"""Environments with one fault each, for the conformance kit alone.

They are among the cases of ``backends``, where few of a sample are environments.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.faults import backends, run


def check(seed: int, cases: int) -> Iterator[str]:
    """Yield the faulty environments that the kit does not find."""
    yield from backends.check(seed, cases, "environment")


if __name__ == "__main__":
    run(check, 40)
