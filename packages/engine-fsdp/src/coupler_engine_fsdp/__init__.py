"""Coupler plugin: the PyTorch FSDP2 engine and the transformers rollout."""
