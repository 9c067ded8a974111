"""The jobs: build what a configuration names, run it, and leave a run folder behind; or look into one."""

from coupler.jobs.evaluate import evaluate
from coupler.jobs.replay import Stage, export_run, replay
from coupler.jobs.sft import supervise
from coupler.jobs.train import train

__all__ = ["Stage", "evaluate", "export_run", "replay", "supervise", "train"]
