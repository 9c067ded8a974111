"""Check that shares of a model and of sequences fit the ranks and the model.

A plan asks before a device is taken, so that nothing here imports PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from math import gcd
from pathlib import Path
from typing import Any

from coupler.engine_kit.json_files import DamagedFile, read_json
from coupler.engine_kit.precision import Products
from coupler.errors import ConfigError
from coupler_engine_fsdp.config import FSDPConfig, OptimizerName


def read_heads(folder: Path) -> int:
    """Return the attention heads that a model folder names, or 0 if it names none.

    Setup says what is wrong with a folder that cannot be read.
    """
    try:
        return heads_of(read_json(folder / "config.json"))
    except DamagedFile:
        return 0


def heads_of(shape: dict[str, Any]) -> int:
    """Return the attention heads of a ``config.json``, or 0 if it names none."""
    text = shape.get("text_config")
    heads = (text if isinstance(text, dict) else shape).get("num_attention_heads")
    return heads if isinstance(heads, int) else 0


def problems(
    config: FSDPConfig, ranks: int, heads: int, path: str = "engine"
) -> Iterator[tuple[str, str]]:
    """Yield each size that does not fit, and a package that is missing, with a fix.

    Args:
        ranks: ranks of the engine.
        heads: attention heads of the model, or 0 if they are not known yet.
        path: the place of ``config`` in the run's configuration.
    """
    asked = {
        "adamw8bit": (config.optimizer == OptimizerName.ADAMW8BIT, f"optimizer={config.optimizer}"),
        "fp8": (config.precision == Products.FP8, f"precision={config.precision}"),
    }
    for extra, (wanted, setting) in asked.items():
        if wanted and find_spec("torchao") is None:
            install = f"pip install 'coupler-engine-fsdp[{extra}]'"
            yield f"{path}.{setting} needs torchao", install

    if config.fsdp_size and ranks % config.fsdp_size:
        yield (
            f"{path}.fsdp_size={config.fsdp_size} does not divide {path}.ranks={ranks}",
            "set it to a divisor, or to 0: all ranks share one copy",
        )

    key, size = f"{path}.sequence_parallel", config.sequence_parallel
    wrong = ""
    if ranks % size:
        wrong = f"{path}.ranks={ranks}"
    elif heads % size:
        wrong = f"the {heads} attention heads of the model"
    if wrong:
        common = gcd(ranks, heads)
        good = [str(k) for k in range(1, common + 1) if common % k == 0]
        either = " or ".join(filter(None, [", ".join(good[:-1]), good[-1]]))
        yield f"{key}={size} does not divide {wrong}", f"set it to {either}"


def check_layout(config: FSDPConfig, ranks: int, heads: int) -> None:
    """Refuse sizes that do not fit.

    Raises:
        ConfigError: the first of :func:`problems`.
    """
    for what, fix in problems(config, ranks, heads):
        raise ConfigError(f"{what}.\n  try:  {fix}")
