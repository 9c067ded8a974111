"""Coupler plugin: vLLM as inference engine, in a process of its own."""
