"""The three jobs: build what a configuration names, run it, and leave a run folder behind."""

from coupler.jobs.evaluate import evaluate
from coupler.jobs.supervise import supervise
from coupler.jobs.train import train

__all__ = ["evaluate", "supervise", "train"]
