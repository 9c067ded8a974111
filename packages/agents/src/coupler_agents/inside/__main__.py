"""Fork an interpreter for each message of the host.

``python -s -P -m coupler_agents.inside OPTIONS`` runs in bubblewrap, with a socket as
its standard input. OPTIONS is JSON. The first message to the host is ``{"separate":
bool}``: whether interpreters have namespaces of their own, so that this process serves
more than one. A message of the host is ``{"fetch": names}`` with four descriptors: the
keeper's socket, and the program's socket, output and errors.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import site
import socket
import sys
from typing import Any

from coupler_agents.inside import keeper, walls
from coupler_agents.inside.bounds import Bounds

OPEN = 4
MAX_MESSAGE = 1 << 16


def main(options: dict[str, Any]) -> None:
    """Serve until the host closes its end of the socket."""
    control = socket.socket(fileno=os.dup(0))
    bounds = Bounds(**options["bounds"])
    try:
        if options["user"]:
            walls.become(options["user"])
        _set_path()
        for name in options["imports"]:
            importlib.import_module(name)
        separate = options["separate"] and _can_separate(bounds)
    # An imported module is the user's, and may raise anything.
    except BaseException as error:
        control.sendall(json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode())
        return

    terms = keeper.Terms(bounds, _mapped(), separate)
    for name in [name for name in sys.modules if name.startswith("coupler_agents")]:
        del sys.modules[name]
    gc.collect()
    gc.freeze()
    control.sendall(json.dumps({"separate": separate}).encode())
    _serve(control, terms)


def _set_path() -> None:
    """Let programs import their own files, and what is installed."""
    own = os.environ.pop("PYTHONPATH")
    rest = [path for path in sys.path if path != own]
    # Where this package is installed, its folder is that of all others.
    installed = [own] if own in site.getsitepackages() else []
    sys.path[:] = [keeper.FOLDER, *rest, *installed]


def _serve(control: socket.socket, terms: keeper.Terms) -> None:
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, MAX_MESSAGE, OPEN)
        if not message:
            return
        if not os.fork():
            control.close()
            os.close(0)
            life, *others = descriptors
            keeper.keep(socket.socket(fileno=life), others, json.loads(message)["fetch"], terms)
            os._exit(0)

        for descriptor in descriptors:
            os.close(descriptor)
        _reap()


def _can_separate(bounds: Bounds) -> bool:
    """Return whether the kernel lets a process of the sandbox make namespaces."""
    child = os.fork()
    if not child:
        try:
            walls.separate(bounds)
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def _mapped() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
    except ChildProcessError:
        return


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
