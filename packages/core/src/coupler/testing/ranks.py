"""Run engines on several ranks: one process per rank, driven by lines of JSON. Arrays
travel as ``.npz`` files.

A world of one rank runs in the test's own process, so that ``breakpoint()`` works in
the engine.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from coupler.batch import Batch
from coupler.engine_kit.rendezvous import keep_port
from coupler.errors import CouplerError, TooFewDevices, WaitTimeout
from coupler.interfaces import EVERYTHING, Engine, Layout, Output, Part, Rank, StepInfo
from coupler.metrics import Metric, Metrics, merge, read
from coupler.system.imports import resolve
from coupler.system.process_memory import resident_bytes
from coupler.testing.left_alone import generators, left_alone, read_only
from coupler.testing.memory import held_bytes, peak_bytes
from coupler.testing.subject import build

Arrays = dict[str, np.ndarray]
Wanted = str | tuple[str, int]  # an output's name, or that with its number of ids
# Slow to import. The last imports torchao if it is there, which touches a GPU.
PRELOADED = ("torch", "torch.distributed.fsdp", "transformers.modeling_utils")
SHARE_GPUS = "COUPLER_SHARE_GPUS"  # set by --coupler-share-gpus: each rank is a host to NCCL


class RankFailed(CouplerError):
    """A rank that raised or died. The message holds its traceback or its last lines."""


class RankHost:
    """Hold one engine in one process, with JSON and paths going in and out. An engine
    that writes to a batch fails.
    """

    def __init__(self, recipe: Mapping[str, Any], rank: Mapping[str, Any]) -> None:
        self.rank = Rank(**rank)
        self.engine: Engine = build(recipe)

    def setup(self) -> dict[str, Any]:
        layout = self.engine.setup(self.rank)
        return {"shard_of": layout.shard_of, "answers": layout.answers}

    def forward(self, batch: str, want: Sequence[Wanted], out: str) -> None:
        with left_alone(read_only(batch)) as given:
            done = self.engine.forward(given, _outputs(want))
        done.save(Path(out))

    def gradient(
        self, batch: str, want: Sequence[Wanted], loss: str, info: Mapping[str, Any], out: str
    ) -> dict[str, Any]:
        """Run one forward_backward and one step. Rank 0 writes the gradient between
        them.
        """
        with left_alone(read_only(batch)) as given:
            metrics = self.engine.forward_backward(
                given, _outputs(want), resolve(loss), StepInfo(**info)
            )
        self._write(self.engine.gradients(), out)
        step = self.engine.step()
        plain = {name: [m.total, m.weight, m.how] for name, m in read(metrics).items()}
        return {"metrics": plain, "step": [step.applied, step.grad_norm, step.lr]}

    def weights(self, out: str) -> list[str]:
        return self._write(self.engine.weights(), out)

    def adapter_weights(self, out: str) -> list[str]:
        return self._write(self.engine.adapter_weights(), out)

    def save(self, path: str, what: list[str]) -> None:
        self.engine.save(Path(path), frozenset(map(Part, what))).wait(60)

    def save_across(self, path: str, what: list[str], step: Mapping[str, Any]) -> dict[str, Any]:
        """Ask for a save, take a whole step, and only then wait for the save."""
        pending = self.engine.save(Path(path), frozenset(map(Part, what)))
        done = self.gradient(**step)
        pending.wait(60)
        return done

    def facts(self) -> dict[str, Any]:
        """Tell what calls must leave alone: the states of the process's random
        generators, by name, and its memory in bytes.
        """
        memory = resident_bytes() + self.engine.device_bytes()
        return {"generators": generators(), "bytes": memory}

    def memory(
        self, batch: str, want: Sequence[Wanted], loss: str, info: Mapping[str, Any]
    ) -> tuple[int, int]:
        """Take a step. Return the bytes that it took, and those that this process then
        holds.
        """
        given = read_only(batch)

        def train() -> None:
            self.engine.forward_backward(given, _outputs(want), resolve(loss), StepInfo(**info))
            assert self.engine.step().applied, "expected a step to be applied, it was skipped"

        return peak_bytes(train), held_bytes()

    def load(self, path: str, what: list[str]) -> None:
        self.engine.load(Path(path), frozenset(map(Part, what)))

    def move(self, times: int) -> int:
        """Move everything off the device and back, so often. Return the bytes by which
        this process grew, on the host or the device.
        """
        before = resident_bytes(), self.engine.device_bytes()
        for _ in range(times):
            self.engine.offload(EVERYTHING)
            self.engine.onload(EVERYTHING)
        return max(resident_bytes() - before[0], self.engine.device_bytes() - before[1])

    def _write(self, named: Any, out: str) -> list[str]:
        kept, names = {}, []
        for name, tensor in named:
            names.append(name)
            if self.rank.index == 0:
                kept[name] = as_array(tensor)
        if self.rank.index == 0:
            with Path(out).open("wb") as file:
                np.savez(file, allow_pickle=False, **kept)
        return names


def as_array(tensor: Any) -> np.ndarray:
    """Copy to NumPy what an engine yields, bfloat16 included."""
    if not isinstance(tensor, np.ndarray):
        tensor = tensor.detach().cpu()
        tensor = (tensor.float() if tensor.dtype.itemsize < 4 else tensor).numpy()
    return np.array(tensor)


def _outputs(names: Sequence[Wanted]) -> tuple[Output, ...]:
    pairs = ((name, 0) if isinstance(name, str) else name for name in names)
    return tuple(Output(name, k) for name, k in pairs)  # type: ignore[arg-type]


class World:
    """Drive all ranks of one engine. Data shards beyond those that a call gives are
    empty.

    Args:
        deterministic: so are all ranks. Libraries are told that once for a whole
            process, so one rank has its own too.
        apart: one rank has a process of its own, so that all tensors there are its.
    """

    def __init__(
        self,
        recipe: Mapping[str, Any],
        num_ranks: int,
        folder: Path,
        deadline_s: float = 240.0,
        deterministic: bool = False,
        apart: bool = False,
    ) -> None:
        self.num_ranks, self.folder, self.deadline_s = num_ranks, folder, deadline_s
        self.count = 0
        self.processes: list[_Process] = []
        port, self.kept = keep_port("127.0.0.1")
        rendezvous = f"127.0.0.1:{port}" if num_ranks > 1 else ""
        whole = Rank(world=num_ranks, rendezvous=rendezvous, deterministic=deterministic)
        ranks = [asdict(replace(whole, index=i)) for i in range(num_ranks)]

        if num_ranks == 1 and not (deterministic or apart):
            self.host = RankHost(recipe, ranks[0])
        else:
            self.processes = [
                _Process(recipe, rank, folder / f"rank-{i}.log") for i, rank in enumerate(ranks)
            ]

        found = self.call("setup", [{}] * num_ranks)[0]
        self.layout = Layout(tuple(found["shard_of"]), tuple(found["answers"]))

    def call(self, method: str, arguments: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Call a method of :class:`RankHost` on every rank, each with its arguments.

        Raises:
            RankFailed: a rank raised or died; the others are ended, since they may wait
                for it forever.
            TooFewDevices: the engine needs more devices than this machine has.
            WaitTimeout: no answer within the deadline.
        """
        if not self.processes:
            return [getattr(self.host, method)(**arguments[0])]
        try:
            for process, kwargs in zip(self.processes, arguments, strict=True):
                process.send({"method": method, "arguments": kwargs})
            return _gather(self.processes, method, time.monotonic() + self.deadline_s)
        except CouplerError:
            self.close()
            raise

    def forward(self, shards: Sequence[Batch], want: tuple[Wanted, ...]) -> list[Batch]:
        """Return one answer per given data shard, in order."""
        outs = [str(self._path(f"out-{i}")) for i in range(self.num_ranks)]
        batches = self._shared(shards)
        self.call(
            "forward",
            [{"batch": b, "want": want, "out": o} for b, o in zip(batches, outs, strict=True)],
        )
        answers = [i for i in range(self.num_ranks) if self.layout.answers[i]]
        answers.sort(key=lambda i: self.layout.shard_of[i])
        return [Batch.load(Path(outs[i])) for i in answers[: len(shards)]]

    def gradient(
        self,
        shards: Sequence[Batch],
        loss: str,
        want: tuple[Wanted, ...] = ("logprobs", "entropy"),
        index: int = 0,
    ) -> tuple[Arrays, Metrics, list[list[Any]]]:
        """Run one whole step. Return its gradient, the merged metrics and (applied,
        norm, lr) of every rank.
        """
        info = asdict(StepInfo(sum(s.num_tokens for s in shards), index))
        out = str(self._path("grads"))
        same = {"want": want, "loss": loss, "info": info, "out": out}
        answers = self.call("gradient", [{"batch": b, **same} for b in self._shared(shards)])
        answering = [a for a, counts in zip(answers, self.layout.answers, strict=True) if counts]
        metrics = merge({name: Metric(*m) for name, m in a["metrics"].items()} for a in answering)
        return _read(out), metrics, [a["step"] for a in answers]

    def memory(self, shards: Sequence[Batch], loss: str) -> tuple[int, int]:
        """Take a step. Return the bytes that it took, and those that are held after it,
        each of the rank that has most.
        """
        info = asdict(StepInfo(sum(s.num_tokens for s in shards), 0))
        same = {"want": ("logprobs",), "loss": loss, "info": info}
        answers = self.call("memory", [{"batch": b, **same} for b in self._shared(shards)])
        peaks, held = zip(*answers, strict=True)
        return max(peaks), max(held)

    def weights(self) -> Arrays:
        return self._streamed("weights")

    def adapter_weights(self) -> Arrays:
        """Return A and B of every adapted weight, B with its scale."""
        return self._streamed("adapter_weights")

    def _streamed(self, method: str) -> Arrays:
        out = str(self._path(method))
        names = self.call(method, [{"out": out}] * self.num_ranks)
        assert all(n == names[0] for n in names), f"{method}() yields other names on another rank"
        assert len(set(names[0])) == len(names[0]), f"{method}() yields a name twice"
        return _read(out)

    def save(self, path: Path, *what: Part) -> None:
        self.call("save", [{"path": str(path), "what": what}] * self.num_ranks)

    def save_across(self, path: Path, shards: Sequence[Batch], loss: str, index: int) -> None:
        """Save weights and optimizer, while the next step is taken already."""
        info = asdict(StepInfo(sum(s.num_tokens for s in shards), index))
        same = {"want": ("logprobs", "entropy"), "loss": loss, "info": info}
        same["out"] = str(self._path("grads"))
        what = (Part.PARAMS, Part.OPTIMIZER)
        steps = [{"batch": batch, **same} for batch in self._shared(shards)]
        self.call("save_across", [{"path": str(path), "what": what, "step": s} for s in steps])

    def facts(self) -> list[dict[str, Any]]:
        return self.call("facts", [{}] * self.num_ranks)

    def load(self, path: Path, *what: Part) -> None:
        self.call("load", [{"path": str(path), "what": what}] * self.num_ranks)

    def move(self, times: int = 1) -> int:
        """Move everything off the devices and back, so often. Return the bytes by which
        a rank grew, on its host or its device.
        """
        return max(self.call("move", [{"times": times}] * self.num_ranks))

    def close(self) -> None:
        for process in self.processes:
            process.close()
        if not self.processes:
            self.host.engine.close()
        self.kept.close()

    def _shared(self, shards: Sequence[Batch]) -> list[str]:
        empty = [shards[0].take([])] * (self.layout.num_shards - len(shards))
        paths = [self._path(f"shard-{i}") for i in range(self.layout.num_shards)]
        for shard, path in zip([*shards, *empty], paths, strict=True):
            shard.save(path)
        return [str(paths[i]) for i in self.layout.shard_of]

    def _path(self, name: str) -> Path:
        self.count += 1
        return self.folder / f"{self.count}-{name}.npz"


class _Template:
    """Keep a process that has imported an engine's class, and fork ranks from it, since
    imports take longest.
    """

    def __init__(self, target: str) -> None:
        self.socket, other = socket.socketpair()
        with other:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "coupler.testing.ranks", str(other.fileno()), target],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                pass_fds=[other.fileno()],
            )
        atexit.register(self.popen.kill)

    def start(self, log: Path) -> socket.socket:
        """Fork a rank that answers on the returned socket and logs to ``log``."""
        ours, other = socket.socketpair()
        with other, log.open("wb") as stderr:
            socket.send_fds(self.socket, [b"rank"], [other.fileno(), stderr.fileno()])
        return ours


_template = cache(_Template)  # one for each engine


class _Process:
    """The parent's view of one rank."""

    def __init__(self, recipe: Mapping[str, Any], rank: Mapping[str, Any], log: Path) -> None:
        self.log, self.index = log, rank["index"]
        self.socket = _template(recipe["target"]).start(log)
        self.lines = self.socket.makefile("rw", encoding="utf-8")
        self.pid = 0  # Its first line is the number.
        self.answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        self.send({"recipe": recipe, "rank": rank})

    def _listen(self) -> None:
        # These come where it was killed, or closed while it spoke.
        with contextlib.suppress(ConnectionResetError, ValueError):
            self.pid = int(self.lines.readline() or 0)
            for line in self.lines:
                self.answers.put(line)
        self.answers.put("")

    def send(self, message: Mapping[str, Any]) -> None:
        # Where it died, the empty answer tells that with its log.
        with contextlib.suppress(BrokenPipeError):
            self.lines.write(json.dumps(message) + "\n")
            self.lines.flush()

    def poll(self) -> dict[str, Any] | None:
        """Return the next answer, if there is one."""
        try:
            line = self.answers.get_nowait()
        except queue.Empty:
            return None
        if line:
            return json.loads(line)
        tail = self.log.read_text(errors="replace").splitlines()[-20:]
        return {"error": "\n".join(["the process ended; its last lines:", *tail])}

    def close(self) -> None:
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self.socket.shutdown(socket.SHUT_RDWR)


def _gather(processes: list[_Process], method: str, end: float) -> list[Any]:
    """Return one result per rank. The first rank that fails is shown, since the others
    may only be waiting for it.
    """
    answers: dict[int, dict[str, Any]] = {}
    while len(answers) < len(processes):
        for process in processes:
            if process.index not in answers and (answer := process.poll()) is not None:
                answers[process.index] = answer
                if "too_few_devices" in answer:
                    raise TooFewDevices(answer["too_few_devices"])
                if "error" in answer:
                    raise RankFailed(
                        f"rank {process.index} of {len(processes)} failed in "
                        f"{method}:\n{answer['error']}"
                    )
        silent = [p.index for p in processes if p.index not in answers]
        if silent and time.monotonic() > end:
            raise WaitTimeout(f"ranks {silent} of {len(processes)} gave no answer to {method}.")
        time.sleep(0.002)

    return [answers[process.index]["result"] for process in processes]


def _read(path: str) -> Arrays:
    with np.load(path, allow_pickle=False) as file:
        return dict(file)


def main(number: int, target: str) -> None:
    """Fork a rank for each message on the socket of this number. End when its other end
    is closed.
    """
    on_cpu = not Path("/dev/nvidiactl").exists()  # what has touched a GPU cannot be forked
    for module in PRELOADED if on_cpu else PRELOADED[:-1]:
        with contextlib.suppress(ImportError):  # an engine may need none of them
            import_module(module)
    if on_cpu:
        with contextlib.suppress(Exception):  # the rank says what is wrong with it
            resolve(target)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the ranks

    with socket.socket(fileno=number) as control:
        while True:
            message, files, _, _ = socket.recv_fds(control, 16, 2)
            if not message:
                return
            if os.fork() == 0:
                control.close()
                serve(*files)
                os._exit(0)
            for file in files:
                os.close(file)


def serve(connection: int, log: int) -> None:
    """Serve one rank: lines of JSON in, one line out for each. Output that is printed
    goes to ``log``.
    """
    for stream in (1, 2):
        os.dup2(log, stream)
    lines = socket.socket(fileno=connection).makefile("rw", encoding="utf-8")

    def answer(value: Any) -> None:
        lines.write(json.dumps(value) + "\n")
        lines.flush()

    answer(os.getpid())
    first = json.loads(lines.readline())
    if SHARE_GPUS in os.environ:
        os.environ["NCCL_HOSTID"] = str(first["rank"]["index"])
    host: RankHost | None = None
    for line in lines:
        message = json.loads(line)
        try:
            host = host or RankHost(first["recipe"], first["rank"])
            answer({"result": getattr(host, message["method"])(**message["arguments"])})
        except TooFewDevices as error:
            answer({"too_few_devices": str(error)})
        # the test shows it; nothing here knows what an engine may raise
        except Exception:
            answer({"error": traceback.format_exc()})


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
