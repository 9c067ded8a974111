"""Coupler plugin: the Megatron-Core engine."""
