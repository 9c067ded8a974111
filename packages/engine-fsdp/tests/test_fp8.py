"""Matrix products in fp8, emulated on the CPU."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    CONFIGS,
    WANT,
    arrays,
    info,
    loss,
    make_batch,
    make_engine,
    reference,
    worst,
    write_model,
)
from torch import nn
from transformers import Qwen2MoeConfig

from coupler import RunConfig
from coupler.errors import ConfigError
from coupler.interfaces import EVERYTHING, Head, Model, Output, Rank
from coupler_engine_fsdp import fp8
from coupler_engine_fsdp.config import FSDPConfig
from coupler_engine_fsdp.engine import FSDPEngine
from coupler_engine_fsdp.model import build
from coupler_engine_fsdp.plugin import coupler_validate

float8 = pytest.importorskip("torchao.float8")
Folder = Callable[[str], Path]
RECIPES = ["rowwise_with_gw_hp", "rowwise", "tensorwise"]
FP8: dict[str, Any] = {"precision": "fp8", "lr": 1e-2, "max_tokens_per_gpu": 64}
HALF = 2**-4
"""e4m3 has 3 bits of mantissa, so that rounding moves a number by this part at most."""


def converted(engine: FSDPEngine) -> list[str]:
    modules = engine.policy.causal.named_modules()
    return [name for name, module in modules if isinstance(module, float8.float8_linear.Float8Linear)]


def cosine(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> float:
    a, b = (np.concatenate([g[n].ravel() for n in want]).astype(np.float64) for g in (got, want))
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
