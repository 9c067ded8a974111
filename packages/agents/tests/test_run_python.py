"""Programs that run to their end, as rewards run them."""

from __future__ import annotations

import time

import pytest

from coupler_agents.sandbox import SandboxFailed, SandboxLimits, run_python
from coupler_agents.sandbox.parent import why_none

pytestmark = pytest.mark.skipif(bool(why_none()), reason=why_none())


def test_a_program_runs_to_its_end() -> None:
    ran = run_python(
        "import sys, atexit, threading, time\natexit.register(lambda: print('last'))\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()\n"
        "print(sys.stdin.read().upper(), __name__)\n"
        "open('out.bin', 'wb').write(b'\\0' + open('in/a.txt', 'rb').read())\n"
        "print('problem', file=sys.stderr)\nsys.exit(3)",
        stdin="héllo",
        files={"in/a.txt": "text"},
        fetch=["out.bin", "missing", "/dev/zero", "in"],
    )
    assert ran.stdout == "HÉLLO __main__\nthread\nlast\n"
    assert (ran.stderr, ran.code, ran.timed_out) == ("problem\n", 3, False)
    assert ran.files == {"out.bin": b"\0text"}


ENDS: dict[str, tuple[str, int, str]] = {
    "raises": ("def f():\n    1 / 0\nf()", 1, 'File "program.py", line 2, in f\n    1 / 0'),
    "no syntax": ("1 +", 1, "SyntaxError: invalid syntax"),
    "exits with a text": ("raise SystemExit('why')", 1, "why\n"),
    "exits at once": ("import os\nos._exit(5)", 5, ""),
    "is killed": ("import os\nos.kill(os.getpid(), 15)", 128 + 15, ""),
    "a child comes back": ("import os\nif os.fork(): os.wait()\nraise SystemExit(6)", 6, ""),
}


@pytest.mark.parametrize("name", ENDS)
def test_the_end_of_a_program(name: str) -> None:
    code, exit_code, stderr = ENDS[name]
    ran = run_python(code)
    assert ran.code == exit_code and stderr in ran.stderr
    assert "inside" not in ran.stderr and not ran.timed_out


def test_a_program_that_is_ended_keeps_what_it_wrote() -> None:
    begun = time.monotonic()
    ran = run_python(
        "open('a', 'w').write('1')\nprint('x', flush=True)\nwhile True: pass",
        timeout_s=1.0,
        fetch=["a"],
    )
    assert ran.timed_out and ran.stdout == "x\n" and ran.files == {"a": b"1"}
    assert time.monotonic() - begun < 10

    limits = SandboxLimits(memory_gib=0.25)
    ran = run_python(
        "import mmap, time\nm = mmap.mmap(-1, 400 << 20)\n"
        "for n in range(0, 400 << 20, 4096): m[n] = 1\ntime.sleep(9)",
        timeout_s=60.0,
        limits=limits,
    )
    assert "GiB of memory" in ran.ended and not ran.timed_out and ran.code == 137


def test_output_is_cut() -> None:
    limits = SandboxLimits(output_bytes=1000)
    ran = run_python("print('x' * 10**6)", limits=limits)
    assert ran.stdout.startswith("x" * 1000) and "bytes more" in ran.stdout
    assert len(ran.stdout) < 1100 and ran.code == 0


@pytest.mark.parametrize("name", ["", "/a", "../a", "a/../../b", "a\0"])
def test_a_file_outside_of_the_folder_is_one_sentence(name: str) -> None:
    with pytest.raises(SandboxFailed, match="leaves the folder of the program"):
        run_python("", files={name: "x"})
    with pytest.raises(SandboxFailed, match="is no text"):
        run_python("", files={"a": 1})  # type: ignore[dict-item]
