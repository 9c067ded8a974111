"""Run inside vLLM's model workers: receive and load weights, give memory back."""
