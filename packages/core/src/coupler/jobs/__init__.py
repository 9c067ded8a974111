"""Run the jobs of the command line.

A job builds what a configuration names, runs it and leaves a run folder behind, or it
looks into such a folder.
"""

from coupler.jobs.chat import chat
from coupler.jobs.evaluate import evaluate
from coupler.jobs.replay import Stage, export_run, last_step, replay
from coupler.jobs.sft import supervise
from coupler.jobs.show import show
from coupler.jobs.train import train

__all__ = [
    "Stage",
    "chat",
    "evaluate",
    "export_run",
    "last_step",
    "replay",
    "show",
    "supervise",
    "train",
]
