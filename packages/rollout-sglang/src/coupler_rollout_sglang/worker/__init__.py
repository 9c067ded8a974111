"""Run inside SGLang's model workers: sample, and receive and load weights."""
