"""The run's end of the socket to a process that plays episodes."""

from __future__ import annotations

import asyncio
import json
import socket
import sys

from coupler.conversation.workers.link import Link, Section
from coupler.conversation.workers.wire import Wire


def test_a_process_that_fails_as_it_ends_says_so_of_no_episode() -> None:
    """An episode that was cancelled is not waited for then."""

    async def story() -> Link:
        ours, theirs = socket.socketpair()
        control, watching = socket.socketpair()
        link = Link(sys.executable, Section("environment", "a:b", {}), print)
        link.wire, link.control = await Wire.open(ours), control
        link.leaving[7] = asyncio.get_running_loop().create_future()

        watching.send(json.dumps({"how": "ended with status 3"}).encode())
        process = await Wire.open(theirs)
        process.post({"failed": "SystemExit: 3"})
        process.close()
        await asyncio.wait_for(link._serve(), 30)
        assert link.leaving[7].done()

        link.wire.close()
        control.close()
        watching.close()
        return link

    assert str(asyncio.run(story()).died) == "the process of the episode ended with status 3"
