"""Rewards in real processes: whatever a reward function does, every call gets its own
answer or a named reason.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from coupler.errors import ConfigError, CouplerError, DataError, RewardError
from coupler.metrics import values
from coupler.rewards import Invalid, Limits, RewardPool, check_reward, sandbox

REWARDS = """
import ctypes, math, os, signal, subprocess, sys, time
from coupler.rewards import Graded, Invalid

NAP = "76543.21"

def length(completion): return len(completion)
def keywords(completion, answer, row, prompt):
    return float(completion == answer == row["answer"] and prompt == "p")
def anything(**given): return len(given)
def whole(completion, row): return row["number"]

def odd(completion):
    match completion:
        case "raise": raise ValueError("no such luck")
        case "exit": sys.exit(3)
        case "nan": return math.nan
        case "inf": return math.inf
        case "none": return None
        case "text": return "1.0"
        case "list": return [1.0]
        case "invalid": return Invalid("not judged")
        case "true": return True
        case "graded": return Graded(0.25, "x")
        case "noise":
            os.write(1, b"[1.0, garbage\\n"); print("[2, 3]"); subprocess.run(["echo", "{}"])
            return 0.5
        case "stdin": return float(sys.stdin.read() == "")
        case "loop":
            while True: pass
        case "sleep": time.sleep(1000)
        case "c": ctypes.PyDLL(None).sleep(1000)  # holds the interpreter's lock
        case "die": os._exit(7)
        case "segv": os.kill(os.getpid(), signal.SIGSEGV)
        case "pid": return os.getpid()
        case "alarm":
            signal.signal(signal.SIGALRM, lambda *_: None); signal.alarm(1); signal.alarm(0)
            return 1.0
        case "child": subprocess.run(["sleep", "1000"])
        case "daemon":
            if not os.fork():
                os.setsid()
                if os.fork(): os._exit(0)
                os.execv("/bin/sleep", ["sleep", NAP])
            return 1.0
        case "daemon and parent":
            child = subprocess.Popen(["sleep", NAP], start_new_session=True)
            os.kill(os.getppid(), signal.SIGKILL); time.sleep(1000)
        case "junk":
            for fd in range(3, 20):
                try: os.write(fd, b"[1.0, '', 0.0, '', null]\\n")
                except OSError: continue
            return 1.0
        case "late exit":
            import threading
            threading.Thread(target=lambda: (time.sleep(0.05), os._exit(5))).start()
            return 1.0
        case "slow": time.sleep(0.3); return 1.0
        case "fork": os.fork(); return 1.0
        case "stop": os.kill(os.getpid(), signal.SIGSTOP)
        case "memory":
            kept = [bytearray(1 << 20) for _ in range(4000)]
            for block in kept: block[::4096] = b"x" * 256
            time.sleep(1000)
        case "threads":
            import threading
            for _ in range(60): threading.Thread(target=time.sleep, args=(1000,)).start()
            time.sleep(1000)
        case "flood":
            for _ in range(200): os.write(2, b"x" * (1 << 20))
            return 1.0
        case "beyond": return 1e39
        case "huge": return 10**400
        case "sly":
            class Sly(Exception):
                def __str__(self): raise KeyboardInterrupt
            raise Sly
        case "surrogate": return Graded(1.0, "\\ud800")
        case "long": return Graded(1.0, "x" * 10**7)
    return float(completion)

def no_completion(text, answer): return 0
def too_much(completion, answer, tokenizer): return 0
constant = 3
"""
ROW = {"prompt": "p", "answer": "a"}


@pytest.fixture
def rewards(tmp_path: Path) -> str:
    path = tmp_path / "my_rewards.py"
    path.write_text(REWARDS)
    return str(path)


@contextmanager
def running(
    target: str,
    workers: int = 1,
    timeout_s: float = 20.0,
    limit: float = 1.0,
    limits: Limits | None = None,
) -> Iterator[RewardPool]:
    pool = RewardPool(target, workers, timeout_s, limit, limits)
    pool.start()
    try:
        yield pool
    finally:
        pool.close()


def scores(pool: RewardPool, completions: list[str]) -> list[float | Invalid]:
    async def all_of_them() -> list[float | Invalid]:
        return [
            scored.result
            for scored in await asyncio.gather(*(pool.score(c, "a", ROW) for c in completions))
        ]

    return asyncio.run(all_of_them())


def running_in_group(group: int) -> list[str]:
    """States of the processes of a group that are no zombies."""
    fields = (
        path.read_text().rpartition(") ")[2].split() for path in Path("/proc").glob("[0-9]*/stat")
    )
    return [f[0] for f in fields if int(f[2]) == group and f[0] != "Z"]


def test_each_call_gets_its_own_answer_in_order(rewards: str) -> None:
    with running(f"{rewards}:length", workers=3) as pool:
        assert scores(pool, ["x" * i for i in range(500)]) == list(range(500))


def test_functions_get_the_keywords_they_take(rewards: str) -> None:
    with running(f"{rewards}:keywords") as pool:
        assert scores(pool, ["a", "b"]) == [1.0, 0.0]
    with running(f"{rewards}:anything") as pool:
        assert scores(pool, ["a"]) == [4.0]


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        ("raise", "ValueError: no such luck"),
        ("exit", "SystemExit: 3"),
        ("nan", "returned nan"),
        ("inf", "returned inf"),
        ("none", "returned a NoneType, not a number"),
        ("text", "returned a str, not a number"),
        ("list", "returned a list, not a number"),
        ("invalid", "not judged"),
        ("beyond", "returned 1e+39, which is beyond float32"),
        ("huge", "returned a number beyond float32"),
        ("sly", "(its text cannot be had: KeyboardInterrupt)"),
    ],
)
def test_what_is_no_finite_number_is_invalid_and_never_zero(
    rewards: str, completion: str, reason: str
) -> None:
    with running(f"{rewards}:odd") as pool:
        assert scores(pool, ["1", completion, "2"]) == [1.0, Invalid(reason), 2.0]


def test_a_reward_may_say_what_it_read(rewards: str) -> None:
    scored = check_reward(f"{rewards}:odd", [("graded", "a", ROW), ("1", "a", ROW)], 20.0)
    assert [(s.result, s.answer) for s in scored] == [(0.25, "x"), (1.0, None)]


def test_prints_and_reads_do_not_touch_the_protocol(
    rewards: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with running(f"{rewards}:odd") as pool:
        assert scores(pool, ["noise", "1", "noise", "stdin", "true", "alarm"]) == [
            0.5,
            1.0,
            0.5,
            1.0,
            1.0,
            1.0,
        ]
    assert "garbage" in capfd.readouterr().err  # the user still sees them


@pytest.mark.parametrize("hang", ["loop", "sleep", "c", "child"])
def test_a_call_that_hangs_is_killed_and_costs_no_other_call(rewards: str, hang: str) -> None:
    with running(f"{rewards}:odd", timeout_s=0.5) as pool:
        start = time.monotonic()
        assert (
            scores(pool, ["pid"] + ["1"] * 100)[1:] == [1.0] * 100
        )  # the pool learns that it is quick: long messages
        outcome = scores(pool, ["1"] * 30 + [hang] + [str(i) for i in range(30)])
        assert outcome == [1.0] * 30 + [Invalid("took longer than 0.5 s")] + [
            float(i) for i in range(30)
        ]
        assert time.monotonic() - start < 10
        measured = values(pool.metrics())
        assert measured["reward/timeout_rate"] == pytest.approx(1 / 162)
        assert measured["time/reward_max"] == 0.5
        assert values(pool.metrics()) == {"time/reward_max": 0.0}, "of no calls there is no rate"


def test_where_a_call_hangs_is_shown(rewards: str) -> None:
    (hung,) = check_reward(f"{rewards}:odd", [("sleep", "", ROW)], 0.5)
    assert hung.timed_out
    assert "in odd" in hung.detail


def test_a_worker_that_dies_costs_one_call(rewards: str) -> None:
    with running(f"{rewards}:odd", workers=2) as pool:
        assert scores(pool, ["1", "die", "2", "segv", "3"]) == [
            1.0,
            Invalid("its process exited with code 7"),
            2.0,
            Invalid("its process was killed by SIGSEGV"),
            3.0,
        ]


def test_a_worker_killed_while_idle_costs_nothing(rewards: str) -> None:
    with running(f"{rewards}:odd") as pool:
        (pid,) = scores(pool, ["pid"])
        assert isinstance(pid, float)
        os.kill(int(pid), 9)
        time.sleep(0.2)
        assert scores(pool, ["4"]) == [4.0]


def test_the_loop_stays_responsive_while_a_call_hangs(rewards: str) -> None:
    async def longest_pause() -> float:
        hung = asyncio.create_task(pool.score("loop", "a", ROW))
        longest = 0.0
        while not hung.done():
            start = time.monotonic()
            await asyncio.sleep(0.01)
            longest = max(longest, time.monotonic() - start)
        return longest

    with running(f"{rewards}:odd", timeout_s=1.0) as pool:
        assert asyncio.run(longest_pause()) < 0.5


def test_a_cancelled_call_leaves_the_pool_working(rewards: str) -> None:
    async def cancel_one() -> float | Invalid:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pool.score("sleep", "a", ROW), 0.1)
        return (await pool.score("5", "a", ROW)).result

    with running(f"{rewards}:odd", timeout_s=1.0) as pool:
        assert asyncio.run(cancel_one()) == 5.0


def test_it_works_from_another_thread(rewards: str) -> None:
    outcome: list[list[float | Invalid]] = []
    with running(f"{rewards}:odd") as pool:
        thread = threading.Thread(target=lambda: outcome.append(scores(pool, ["alarm", "2"])))
        thread.start()
        thread.join(30)
    assert outcome == [[1.0, 2.0]]


def test_too_many_invalid_calls_stop_the_run_with_the_first_traceback(rewards: str) -> None:
    with running(f"{rewards}:odd", limit=0.01) as pool:
        assert [type(s) for s in scores(pool, ["raise"] * 2 + ["none"] * 2)] == [Invalid] * 4
        with pytest.raises(RewardError) as error:
            scores(pool, ["raise"])
    message = str(error.value)
    assert message.startswith("5 of 5 calls")
    assert "3 x ValueError: no such luck" in message
    assert "2 x returned a NoneType" in message
    assert 'raise ValueError("no such luck")' in message
    assert "worker.py" not in message


def test_one_per_cent_is_a_fraction_of_all_calls(rewards: str) -> None:
    with running(f"{rewards}:odd", limit=0.01) as pool:
        scores(pool, ["1"] * 500 + ["none"] * 5)  # 5 of 505 is below
        with pytest.raises(RewardError, match="6 of 506"):
            scores(pool, ["none"])


def test_a_reward_that_breaks_late_stops_the_run_soon(rewards: str) -> None:
    with running(f"{rewards}:odd", limit=0.1) as pool:
        scores(pool, ["1"] * 1000)
        with pytest.raises(RewardError, match=r"33 of 1033 calls .*33 of the last 64"):
            scores(pool, ["none"] * 33)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("no_completion", r"requires text, which nothing passes and does not take completion"),
        ("too_much", r"too_much\(completion, answer, tokenizer\) requires tokenizer"),
        ("constant", "is a int, not a function"),
        ("lenght", "has no 'lenght'"),
    ],
)
def test_a_wrong_signature_is_an_error_at_start(rewards: str, name: str, what: str) -> None:
    with pytest.raises(CouplerError, match=what):
        RewardPool(f"{rewards}:{name}", 2, 5.0, 0.01).start()


@pytest.mark.parametrize(
    ("source", "what"),
    [
        (
            "print('loading')\nimport no_such_module",
            r"(?s)ModuleNotFoundError: No module named.*stderr:  loading",
        ),
        (
            "import os; os.write(2, b'out of luck'); os._exit(9)",
            r"(?s)exited with code 9.*out of luck",
        ),
    ],
)
def test_a_reward_that_cannot_be_imported_is_an_error_at_start(
    tmp_path: Path, source: str, what: str
) -> None:
    (tmp_path / "broken.py").write_text(source)
    with pytest.raises(CouplerError, match=what):
        RewardPool(f"{tmp_path / 'broken.py'}:score", 1, 5.0, 0.01).start()


def test_a_reward_that_breaks_while_it_is_restarted_fails_every_call(rewards: str) -> None:
    with running(f"{rewards}:odd") as pool:
        Path(rewards).write_text("import no_such_module")
        with pytest.raises(CouplerError, match="no_such_module"):
            scores(pool, ["die", "1", "2"])


NAP = b"76543.21"


def naps() -> list[str]:
    """Processes that a reward started, wherever they are."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if NAP in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


def wait_for(what: object, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not what() and time.monotonic() < end:  # type: ignore[operator]
        time.sleep(0.05)
    assert what()  # type: ignore[operator]


def test_a_process_with_a_session_of_its_own_ends_with_the_pool(rewards: str) -> None:
    with running(f"{rewards}:odd") as pool:
        assert scores(pool, ["daemon", "1"]) == [1.0, 1.0]
        wait_for(naps)
    assert not naps()


def test_a_reward_that_kills_what_watches_it_leaves_nothing(rewards: str) -> None:
    with running(f"{rewards}:odd") as pool:
        assert scores(pool, ["1", "daemon and parent", "2"]) == [
            1.0,
            Invalid("its process killed the process that watches it"),
            2.0,
        ]
    assert not naps()


def test_a_killed_trainer_leaves_no_reward_process(rewards: str) -> None:
    code = (
        "import asyncio, time\n"
        "from coupler.rewards import RewardPool\n"
        f"pool = RewardPool({f'{rewards}:odd'!r}, 2, 20.0, 1.0)\n"
        "pool.start()\n"
        "asyncio.run(pool.score('daemon', 'a', {}))\n"
        "print('ready', flush=True)\n"
        "time.sleep(1000)\n"
    )
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert trainer.stdout
    assert trainer.stdout.readline() == b"ready\n"
    wait_for(naps)
    trainer.send_signal(signal.SIGKILL)
    trainer.wait(10)
    wait_for(lambda: not naps())


def test_what_a_reward_writes_into_the_pipe_of_answers_is_no_answer(rewards: str) -> None:
    with running(f"{rewards}:odd") as pool:
        assert scores(pool, ["7", "junk", "2", "3"]) == [
            7.0,
            Invalid("its process wrote into the pipe of its answers"),
            2.0,
            3.0,
        ]


def test_a_call_gets_a_second_try_where_an_earlier_one_ended_the_process(rewards: str) -> None:
    with running(f"{rewards}:odd") as pool:
        assert scores(pool, ["1", "late exit", "slow", "2"]) == [1.0, 1.0, 1.0, 2.0]


def test_a_call_that_forks_answers_once(rewards: str) -> None:
    with running(f"{rewards}:odd") as pool:
        assert scores(pool, ["fork", "2", "fork", "3", "4"]) == [1.0, 2.0, 1.0, 3.0, 4.0]


def test_a_reward_process_stays_within_its_memory_and_processes(rewards: str) -> None:
    limits = Limits(max_memory_gib=0.25, max_processes=40)
    with running(f"{rewards}:odd", limits=limits) as pool:
        first, memory, threads, last = scores(pool, ["1", "memory", "threads", "2"])
    assert (first, last) == (1.0, 2.0)
    assert isinstance(memory, Invalid)
    assert isinstance(threads, Invalid)
    assert "GiB of memory, above its limit" in memory.reason
    assert "processes and threads, above its limit" in threads.reason


def test_output_without_end_is_cut(rewards: str, capsys: pytest.CaptureFixture[str]) -> None:
    with running(f"{rewards}:odd") as pool:
        assert scores(pool, ["flood", "1"]) == [1.0, 1.0]
    written = capsys.readouterr().err
    assert len(written) < 4 << 20
    assert "bytes of this process's output are left out" in written


def test_an_answer_is_bounded_and_can_be_written(rewards: str) -> None:
    texts = [("long", "a", ROW), ("surrogate", "a", ROW)]
    long, odd = [s.answer or "" for s in check_reward(f"{rewards}:odd", texts, 20.0)]
    assert len(long) == 65_536
    assert odd == "?"


SANDBOXED = """
import os, socket
class Curious:
    sandbox = True
    def __call__(self, completion):
        match completion:
            case "write": open("THERE", "w")
            case "secret": return float("A_SECRET" in os.environ)
            case "net": socket.create_connection(("127.0.0.1", 1), 2)
            case "processes": return sum(name.isdigit() for name in os.listdir("/proc"))
            case "temporary": open("/tmp/x", "w").write("x")
        return 1.0
def plain(completion): return float("A_SECRET" in os.environ)
"""


@pytest.fixture
def curious(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("A_SECRET", "x")
    path = tmp_path / "curious.py"
    path.write_text(SANDBOXED.replace("THERE", str(tmp_path / "there")))
    return str(path)


needs_sandbox = pytest.mark.skipif(
    bool(sandbox.why_no_bubblewrap()), reason=sandbox.why_no_bubblewrap()
)


@needs_sandbox
def test_a_reward_that_asks_for_it_runs_in_the_sandbox(curious: str, tmp_path: Path) -> None:
    with running(f"{curious}:Curious") as pool:
        write, secret, net, processes, temporary = scores(
            pool, ["write", "secret", "net", "processes", "temporary"]
        )
    assert isinstance(write, Invalid)
    assert "Read-only file system" in write.reason
    assert isinstance(net, Invalid)
    assert (secret, temporary) == (0.0, 1.0)
    assert isinstance(processes, float)
    assert processes < 5
    assert not (tmp_path / "there").exists()


@needs_sandbox
def test_every_reward_runs_in_the_sandbox_where_it_is_required(curious: str) -> None:
    for mode, secret in (("require", 0.0), ("auto", 1.0), ("off", 1.0)):
        with running(f"{curious}:plain", limits=Limits(sandbox=mode)) as pool:
            assert scores(pool, ["x"]) == [secret]
    with running(f"{curious}:Curious", limits=Limits(sandbox="off")) as pool:
        assert scores(pool, ["secret"]) == [1.0]


def test_a_bwrap_that_fails_or_hangs_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    bwrap = tmp_path / "bwrap"
    for script, why in (
        ("echo bwrap: no permissions >&2; exit 1", "bwrap fails: bwrap: no permissions"),
        ("exec sleep 1000", "bwrap did not start Python within 2 s"),
    ):
        bwrap.write_text(f"#!/bin/sh\n{script}\n")
        bwrap.chmod(0o755)
        monkeypatch.setattr(sandbox, "version", lambda: "bubblewrap 0.8.0")
        assert sandbox.why_no_bubblewrap.__wrapped__() == why


def test_close_ends_the_processes_and_what_they_do(rewards: str) -> None:
    async def close_while_one_hangs() -> None:
        hung = asyncio.create_task(pool.score("child", "a", ROW))
        await asyncio.sleep(0.3)
        assert len(running_in_group(int(pid))) == 2
        pool.close()
        with pytest.raises(CouplerError, match="closed"):
            await hung

    with running(f"{rewards}:odd") as pool:
        (pid,) = scores(pool, ["pid"])
        assert isinstance(pid, float)
        start = time.monotonic()
        asyncio.run(close_while_one_hangs())
        assert time.monotonic() - start < 5
        assert not running_in_group(int(pid))


@pytest.mark.parametrize(("workers", "timeout_s"), [(0, 1.0), (1, 0.0)])
def test_no_workers_and_no_time_are_errors(workers: int, timeout_s: float) -> None:
    with pytest.raises(ConfigError, match=r"reward\.num_workers"):
        RewardPool("rewards:score", workers, timeout_s, 0.01)


def test_a_row_that_json_cannot_hold_is_an_error(rewards: str) -> None:
    with running(f"{rewards}:length") as pool, pytest.raises(DataError, match="JSON"):
        asyncio.run(pool.score("x", "a", {"when": object()}))


def test_check_reward_also_runs_inside_an_event_loop(rewards: str) -> None:
    async def check() -> list[float | Invalid]:
        return [
            s.result
            for s in check_reward(f"{rewards}:odd", [("1", "", ROW), ("raise", "", ROW)], 5.0)
        ]

    assert asyncio.run(check()) == [1.0, Invalid("ValueError: no such luck")]


def test_modules_are_found_as_the_parent_finds_them(
    rewards: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(rewards).parent))
    assert check_reward("my_rewards:length", [("abc", "", ROW)], 5.0)[0].result == 3.0
