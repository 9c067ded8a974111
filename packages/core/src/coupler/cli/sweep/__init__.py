"""Run a command once for each combination of swept values: ``--multirun``.

Hydra's own sweeper chooses the combinations, and its own launcher starts them.
``space.py`` reads and checks the values, ``search.py`` leads Hydra, ``one_run.py``
makes one run in a process of its own, and ``summary.py`` tells what came of all.
"""

from coupler.cli.sweep.command import sweep

__all__ = ["sweep"]
