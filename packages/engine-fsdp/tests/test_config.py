from __future__ import annotations

import re
import subprocess
import sys

import pytest

from coupler.engine_kit.adamw import Schedule
from coupler_engine_fsdp.config import FSDPConfig
from coupler_engine_fsdp.plugin import coupler_backends


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_tokens_per_gpu", 0),
        ("lr", 0.0),
        ("eps", -1.0),
        ("fsdp_size", -1),
        ("sequence_parallel", 0),
        ("weight_decay", -0.1),
        ("beta2", 1.0),
        ("min_lr_ratio", 1.5),
        ("logits_tile", -1),
    ],
)
def test_a_value_out_of_range_is_named_in_full(key: str, value: float) -> None:
    with pytest.raises(ValueError, match=re.escape(f"engine.{key} must")):
        FSDPConfig(**{key: value})


def test_a_schedule_needs_room_for_its_parts() -> None:
    with pytest.raises(ValueError, match=r"engine\.total_steps must be at least 11"):
        FSDPConfig(schedule=Schedule.COSINE, warmup_steps=10, total_steps=10)
    with pytest.raises(ValueError, match=r"engine\.decay_steps"):
        FSDPConfig(schedule=Schedule.WSD, total_steps=100)
    FSDPConfig(schedule=Schedule.WSD, warmup_steps=10, total_steps=100, decay_steps=20)


def test_backends_are_listed_without_importing_torch() -> None:
    assert {(b.kind, b.name, b.config().name) for b in coupler_backends()} == {
        ("engine", "fsdp", "fsdp"),
        ("rollout", "hf", "hf"),
    }
    script = (
        "import sys, coupler_engine_fsdp.plugin; sys.exit(any(m in sys.modules for m in "
        "('torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
