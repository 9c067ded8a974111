"""Announce the faulty backends that the environment names."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable

from tests.faults.faulty import every

from coupler.plugins import Backend, hookimpl


@hookimpl
def coupler_backends() -> Iterable[Backend]:
    names = set(json.loads(os.environ.get("COUPLER_FAULTS", "[]")))
    for case in every():
        if f"{case.kind}={case.name}" in names:
            yield case.backend()
