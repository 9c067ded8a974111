"""Write and read the messages that take the place of weights on the way to a model
worker. Every process may import it.
"""

from __future__ import annotations

import base64
import json
from dataclasses import asdict
from typing import Any

from coupler.interfaces import Endpoint, WeightUpdate

MARK = b"coupler-update:"
SAMPLER = "pytorch"
"""The name under which SGLang knows our sampler. It forces this one on the CPU, and
with deterministic kernels."""
LOADER = "coupler_rollout_sglang.worker.receiver.receive"
FACTS = "coupler_facts"
"""Name of no parameter, under which every worker says what it holds."""
ADAPTER = "policy"
"""The name under which SGLang knows our adapter."""
VERSION_KEY = "coupler_version"
"""Name under which the sampler reports the version of every token."""
MASK_KEY = "coupler_sampling_mask"
"""Name under which it reports the ids that every token was sampled among."""
ROUTES_KEY = "routed_experts"
"""Name under which SGLang reports the experts of every token that it was fed."""
TOPK = "num_experts_per_tok"
"""Name under which SGLang looks for the experts of a token in a model's
configuration."""

DIED_AT_START = (
    "SGLang died while it started.\n  look at:  its own lines above; too little free memory "
    "(rollout.gpu_memory_gib) is usual"
)


def payload(update: WeightUpdate | None) -> str:
    """Return the payload, in base64 as SGLang's HTTP interface has it.

    Without an update it asks for checksums of the weights.
    """
    fields = None if update is None else asdict(update)
    return base64.b64encode(MARK + json.dumps(fields).encode()).decode()


def text_of(data: bytes | str) -> str:
    """Return the JSON in a payload.

    Raises:
        ValueError: the payload is not one of ours.
    """
    raw = base64.b64decode(data) if isinstance(data, str) else bytes(data)
    if not raw.startswith(MARK):
        raise ValueError("this engine takes weights over Coupler's transports alone")
    return raw.removeprefix(MARK).decode()


def update_of(text: str) -> WeightUpdate | None:
    """Return the update in JSON, or None where it asks for checksums."""
    fields = json.loads(text)
    if fields is None:
        return None
    return WeightUpdate(
        **{**fields, "endpoints": tuple(Endpoint(**e) for e in fields["endpoints"])}
    )


def answers_of(message: str) -> list[Any]:
    """Return the answers of all model workers from the message of an update.

    Several schedulers' messages are joined into one text, and each has all answers.
    """
    found, _ = json.JSONDecoder().raw_decode(message)
    return found
