"""Start Ray for one run, watch it, and leave nothing of it behind."""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from filelock import FileLock, Timeout

from coupler.errors import PlacementError
from coupler.system.imports import Late
from coupler.system.log import get_logger
from coupler.system.processes import Process, end_all_of, watch_over

if TYPE_CHECKING:
    import ray
    import ray._private.worker
else:
    ray = Late("ray", "coupler-core[ray]")

log = get_logger(__name__)

PREFIX, LOCK = "coupler-ray-", "run.lock"
# where paths are short
SHORT = Path("/", "tmp")
# the sockets in a folder of Ray have 60 more characters, of 107 that the system takes
MAX_BASE = 24
SHUTDOWN_S = 10.0
# for what ends itself once its raylet has gone
ORPHANS_S = 3.0
# a folder is locked by its run soon after it was made
LOCKED_S = 60.0
USER_ERROR = 2


class OwnCluster:
    """A cluster of one node on loopback, in a folder of its own."""

    def __init__(self, num_cpus: int, watch_s: float) -> None:
        """Start it.

        Args:
            watch_s: a process of it that is stopped for so long ends the run.

        Raises:
            PlacementError: Ray did not start.
        """
        _clear_leftovers()
        self.folder = _make_folder()
        self.lock = FileLock(self.folder / LOCK)
        self.lock.acquire()
        self.watcher = watch_over(self.folder, ORPHANS_S)

        try:
            with _own_sigterm():
                ray.init(
                    "local",
                    num_cpus=num_cpus,
                    include_dashboard=False,
                    log_to_driver=False,
                    configure_logging=False,
                    _node_ip_address="127.0.0.1",
                    _temp_dir=str(self.folder),
                )
        # whatever keeps Ray from its start
        except Exception as error:
            self._end()
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise PlacementError(
                f"executor=ray could not start Ray on this machine: {first}\n"
                f"  look at:  {self.folder / 'session_latest' / 'logs'}\n"
                "  try:  the same command when the machine is less busy, executor=local, or "
                "ray.address of a cluster that runs"
            ) from None
        self.guard = Guard(self.folder, watch_s)

    def stop(self) -> None:
        """End every process of it, also one that hangs, and remove its folder."""
        self.guard.stop()
        self._end()
        self.lock.release()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _end(self) -> None:
        ending = threading.Thread(target=ray.shutdown, name="shutdown", daemon=True)
        ending.start()
        ending.join(SHUTDOWN_S)
        # Ray waits for a process that is stopped
        end_all_of(self.folder, 0.0 if ending.is_alive() else ORPHANS_S)
        ending.join(SHUTDOWN_S)

        assert self.watcher.stdin
        self.watcher.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.watcher.wait(SHUTDOWN_S)
        self.watcher.kill()


class Guard:
    """Ends this process with a sentence when Ray's own processes die or stop.

    Without them Ray ends it anyway: at once where the raylet died, and a minute after
    its GCS did, with exit code 1 and pages of text.
    """

    def __init__(self, folder: Path, watch_s: float) -> None:
        self.folder, self.watch_s = folder, watch_s
        node: Any = ray._private.worker._global_node
        self.children: dict[str, subprocess.Popen[bytes]] = {
            name: node.all_processes[name][0].process for name in ("raylet", "gcs_server")
        }

        self.stopping = threading.Event()
        self.ended, self.ending = os.pipe()
        self.thread = threading.Thread(target=self._watch, name="guard of Ray", daemon=True)
        # pidfds are of Linux
        if hasattr(os, "pidfd_open"):
            self.thread.start()

    def stop(self) -> None:
        """Watch no more, since the cluster is about to end."""
        self.stopping.set()
        os.close(self.ending)
        if self.thread.ident:
            self.thread.join()
        os.close(self.ended)

    def _watch(self) -> None:
        handles = {name: os.pidfd_open(child.pid) for name, child in self.children.items()}
        processes = {name: Process.of(child.pid) for name, child in self.children.items()}
        before: set[str] = set()

        with selectors.DefaultSelector() as selector:
            selector.register(self.ended, selectors.EVENT_READ)
            for name, handle in handles.items():
                selector.register(handle, selectors.EVENT_READ, name)
            while True:
                ready = {key.data for key, _ in selector.select(self.watch_s)}
                if self.stopping.is_set():
                    break
                for name in sorted(ready & self.children.keys()):
                    self._give_up(name, _ending_of(self.children[name]))

                stopped = {name for name, process in processes.items() if process.is_stopped()}
                for name in sorted(stopped & before):
                    self._give_up(name, "is stopped, by SIGSTOP or SIGTSTP")
                before = stopped

        for handle in handles.values():
            os.close(handle)

    def _give_up(self, name: str, how: str) -> NoReturn:
        # first of all, since Ray is about to end this process
        print(
            f"coupler: the {name} of Ray (pid {self.children[name].pid}, node 127.0.0.1) {how}, "
            "and the run cannot go on without it.\n"
            f"  log:  {self.folder / 'session_latest' / 'logs'}\n"
            "  try:  the same command, which goes on from the newest checkpoint",
            file=sys.stderr,
            flush=True,
        )
        end_all_of(self.folder, 0.0)
        os._exit(USER_ERROR)


def _ending_of(child: subprocess.Popen[bytes]) -> str:
    try:
        code = child.wait(0.1)
    except subprocess.TimeoutExpired:
        return "died"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


@contextlib.contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep what SIGTERM does. Ray's answer to it drains a node first."""
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)

    try:
        yield
    finally:
        if is_main and before is not None:
            signal.signal(signal.SIGTERM, before)


def _make_folder() -> Path:
    base = tempfile.gettempdir()
    try:
        return Path(tempfile.mkdtemp(prefix=PREFIX, dir=base if len(base) <= MAX_BASE else SHORT))
    except OSError as error:
        raise PlacementError(
            f"executor=ray cannot make a folder for Ray: {error}.\n"
            "  set:  TMPDIR to a short path of a folder that can be written"
        ) from None


def _clear_leftovers() -> None:
    """End what runs that were killed left behind, and remove their folders."""
    for base in {Path(tempfile.gettempdir()), SHORT}:
        for folder in base.glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError, Timeout):
                found = folder.lstat()
                is_new = time.time() - found.st_mtime < LOCKED_S
                if is_new or found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
                    continue

                # whose run holds the lock, goes on
                with FileLock(folder / LOCK, timeout=0):
                    if ended := end_all_of(folder, 0.0):
                        log.info(f"{len(ended)} processes of a run that was killed were ended")
                    shutil.rmtree(folder, ignore_errors=True)
