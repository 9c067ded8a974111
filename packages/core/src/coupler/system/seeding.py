"""Derive many named streams of random numbers from one seed.

No two roles, ranks or steps share random numbers, and no stream is global.
"""

from __future__ import annotations

import hashlib

import numpy as np


def derive(seed: int, *names: str | int) -> int:
    """Derive a 63-bit seed from ``seed`` and a path of names.

    The result is the same in every process and Python version.
    """
    text = "/".join(str(n) for n in (seed, *names))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def stream(seed: int, *names: str | int) -> np.random.Generator:
    """Return the NumPy generator of one named stream.

    Example:
        ``stream(seed, "data", epoch)``
    """
    return np.random.default_rng(derive(seed, *names))
