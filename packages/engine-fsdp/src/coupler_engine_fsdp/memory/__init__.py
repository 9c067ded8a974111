"""Estimate the device memory of ``engine=fsdp`` and ``rollout=hf``."""
