"""Transports: carry named tensors from engine ranks to rollout workers, and know neither."""
