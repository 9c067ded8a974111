"""Packed sequences, how they are split, and where their tokens came from."""

from coupler.batch.batch import Batch

__all__ = ["Batch"]
