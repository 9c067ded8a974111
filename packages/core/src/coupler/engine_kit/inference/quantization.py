"""Check the option by which a rollout quantises weights while it loads them."""

from __future__ import annotations

from collections.abc import Collection


def check_quantization(value: str, allowed: Collection[str], dtype: str, adapter_rank: int) -> None:
    """Refuse a quantisation that the rollout's other options exclude.

    Args:
        value: of ``rollout.quantization``.
        dtype: of ``rollout.dtype``, ``fp32`` among others.
        adapter_rank: of ``rollout.max_lora_rank``. 0 runs no adapter.

    Raises:
        ValueError: the sentence for the user.
    """
    given = f"rollout.quantization={value}"

    if value not in allowed:
        raise ValueError(
            f"{given} is none of {', '.join(allowed)}: set one of them, or leave it out."
        )
    if dtype == "fp32":
        raise ValueError(f"{given} starts from 16 bits: set rollout.dtype=bf16.")
    if adapter_rank:
        raise ValueError(
            f"{given} takes no adapter apart from the weights: set rollout.max_lora_rank=0, "
            "so that every sync brings the sum."
        )
