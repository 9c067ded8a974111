"""Errors that a user can fix: printed without a traceback, exit code 2."""

from traceback import extract_tb


class CouplerError(Exception):
    """A problem the user can fix. The first line says what, the indented lines say what to do."""


class PluginError(CouplerError):
    """A plugin is missing, broken, duplicated or of another interface generation."""


class ConfigError(CouplerError):
    """A key is unknown, inert, of the wrong type or out of range; the message names it in full."""


class DataError(CouplerError):
    """A data file is empty or malformed, or a prompt exceeds its limit."""


class RewardError(CouplerError):
    """Too many reward calls raised, hung or returned no finite number."""


class WeightSyncError(CouplerError):
    """A rollout does not hold the weights that the engine published; nothing sampled from it was used."""


class PeerLost(WeightSyncError):
    """The other side of a weight transfer went away; why it did is for that side to say."""


class PlacementError(CouplerError):
    """The cluster does not have what the plan needs."""


class WorkerFailed(CouplerError, RuntimeError):
    """A worker's own exception, from its process; the message holds its traceback and where it happened."""


class WorkerDied(WorkerFailed):
    """The process of a worker ended; the message holds how, and its last log lines."""


class ReplicaDied(CouplerError):
    """The inference engine behind one rollout replica ended; what it was sampling is lost, and nothing else."""


class TooFewDevices(CouplerError):
    """An engine has more ranks than this machine has devices for them; the message says how many it needs."""


class WaitTimeout(CouplerError):
    """A named wait passed its deadline."""


def place_of(error: BaseException) -> str:
    """File and line that raised ``error``."""
    frame = extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}, line {frame.lineno}"
