"""Programs that play an episode: what they read, say and leave behind."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest

from coupler import Outcome
from coupler_agents.program.process import ProgramFailed, outcome_of, run


def play(code: str, timeout_s: float = 20.0) -> Outcome:
    command = [sys.executable, "-c", code]
    return asyncio.run(run(command, {"answer": "3"}, {"OPENAI_API_KEY": "a key"}, timeout_s))


def test_a_program_reads_the_row_and_says_the_reward() -> None:
    done = play(
        "import json, os, sys; row = json.load(sys.stdin); print('thinking')\n"
        "print(json.dumps({'reward': int(row['answer']), 'metrics': {'steps': 2, 'name': 'x'}}))\n"
        "assert os.environ['OPENAI_API_KEY'] == 'a key'"
    )
    assert done.reward == 3.0 and done.metrics == {"steps": 2.0}


@pytest.mark.parametrize("said", ["", "done", "true", "[1", '{"reward": "1"}', "1e400", "[" * 9999])
def test_other_words_leave_the_reward_to_its_target(said: str) -> None:
    assert outcome_of(f"0.5\n{said}" if said else "").reward is None


def test_a_program_that_fails_says_why() -> None:
    with pytest.raises(ProgramFailed, match="ended with code 3:\nno luck"):
        play("import sys; print('no luck', file=sys.stderr); sys.exit(3)")
    with pytest.raises(ProgramFailed, match="cannot be started"):
        asyncio.run(run(["/no/such/program"], {}, {}, 1.0))


def test_what_a_program_prints_is_bounded() -> None:
    assert play("print('x' * 10**7); print(0.25)").reward == 0.25


def test_a_program_that_hangs_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    child = tmp_path / "child"
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        play(
            "import subprocess, sys, time\n"
            "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
            f"open({str(child)!r}, 'w').write(str(child.pid)); time.sleep(60)",
            timeout_s=2.0,
        )
    assert time.monotonic() - start < 20
    pid = int(child.read_text())
    for _ in range(100):
        if not alive(pid):
            break
        time.sleep(0.05)
    assert not alive(pid), "a process of the program lives on"


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
