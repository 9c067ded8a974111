"""Define the errors that a user can fix.

The command line prints them without a traceback, and ends with code 2.
"""

from traceback import extract_tb


class CouplerError(Exception):
    """A problem that the user can fix.

    The first line states the problem, the indented lines the remedy.
    """


class PluginError(CouplerError):
    """A plugin is missing, broken, duplicated or of another interface generation."""


class ConfigError(CouplerError):
    """A key is unknown, inert, of the wrong type or out of range.

    The message names it in full.
    """


class DataError(CouplerError):
    """A data file is empty or malformed, or a prompt exceeds its limit."""


class RewardError(CouplerError):
    """Too many reward calls raised, hung or returned no finite number."""


class WeightSyncError(CouplerError):
    """A rollout does not hold the weights that the engine published.

    Nothing sampled from it was used.
    """


class PeerLost(WeightSyncError):
    """The other side of a weight transfer went away. That side reports the cause."""


class PlacementError(CouplerError):
    """The cluster does not have what the plan needs."""


class WorkerFailed(CouplerError, RuntimeError):
    """An exception in the process of a worker. The message holds its traceback and its
    place.
    """


class WorkerDied(WorkerFailed):
    """The process of a worker ended. The message holds the reason and its last log
    lines.
    """


class ReplicaDied(CouplerError):
    """The inference engine behind one rollout replica ended.

    Only the tokens that it was sampling are lost.
    """


class TooFewDevices(CouplerError):
    """An engine has more ranks than this machine has devices. The message names the
    number that it needs.
    """


class WaitTimeout(CouplerError):
    """A named wait passed its deadline."""


def place_of(error: BaseException) -> str:
    """Return file and line that raised ``error``."""
    frame = extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}, line {frame.lineno}"
