"""SGLang as inference engine: ``rollout=sglang``."""
