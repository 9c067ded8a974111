"""Trackers: where the numbers of a run go. Console, JSON lines and TensorBoard come with core."""
