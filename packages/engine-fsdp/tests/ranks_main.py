"""The ranks of test_ranks.py: forked from one process that has imported everything,
since that takes longest.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.connection
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.fsdp._fully_shard._fsdp_param_group as gathering
from helpers import WANT, arrays, info, loss, make_batch, make_engine, parameter_bytes
from test_ranks import SETTINGS, STEPS

from coupler.batch import Batch
from coupler.errors import CouplerError
from coupler.interfaces import EVERYTHING, Rank
from coupler_engine_fsdp.engine import FSDPEngine
from coupler_engine_fsdp.weights import local

gathers = 0


def counted(*args: Any, gather: Callable[..., Any] = gathering.foreach_all_gather, **named: Any):
    """Gather the weights of a module, and count it."""
    global gathers
    gathers += 1
    return gather(*args, **named)


gathering.foreach_all_gather = counted


def main(job: dict, index: int) -> None:
    """Run every case in one process group and write what this rank saw."""
    rank = Rank(index=index, world=len(job["outs"]), rendezvous=job["rendezvous"])
    out = Path(job["outs"][index])
    out.mkdir()
    for name, (folder, settings) in job["cases"].items():
        engine = make_engine(Path(folder), rank, **{**SETTINGS, **settings})
        report = {
            "steps": [
                train(engine, rank, out / f"{name}-grads.npz" if i == 0 else None, i)
                for i in range(STEPS)
            ]
        }
        np.savez(out / f"{name}-weights.npz", **arrays(engine.weights()))
        np.savez(out / f"{name}-adapter.npz", **arrays(engine.adapter_weights()))
        if "save" in job:
            engine.save(made(Path(f"{job['save']}-{name}")), EVERYTHING).wait(60)
        report["steps"].append(hurt(engine, rank))
        report["too_long"] = too_long(engine, rank)
        states = [module._get_fsdp_state() for module in engine.modules]
        report["modules"] = sum(state._fsdp_param_group is not None for state in states)
        report["bytes"] = parameter_bytes(engine)
        (out / f"{name}.json").write_text(json.dumps(report))
    (out / "port.json").write_text(json.dumps(listening(int(job["rendezvous"].rpartition(":")[2]))))
    folder = Path(job["cases"]["sharded"][0])
    engine = make_engine(folder, rank, **SETTINGS)
    done = engine.forward(shard(make_batch(), rank), WANT)
    np.savez(out / "sharded-outputs.npz", logprobs=done["logprobs"])
    alone = make_engine(
        folder, **SETTINGS
    )  # a reference model of one rank inside the policy's group
    np.savez(out / "alone-outputs.npz", logprobs=alone.forward(make_batch(), WANT)["logprobs"])
    frozen = make_engine(folder, rank, frozen=True, **{**SETTINGS, "dtype": "bf16"})
    done = frozen.forward(shard(make_batch(), rank), WANT)
    np.savez(out / "frozen-outputs.npz", logprobs=done["logprobs"])
    (out / "frozen-bytes.json").write_text(json.dumps(parameter_bytes(frozen)))
    for name in ("still", "moved"):
        np.savez(out / f"{name}-weights.npz", **moved(folder, rank, moves=name == "moved"))
    continued(engine, rank, job)
    np.savez(out / "continued-weights.npz", **arrays(engine.weights()))
    torch.distributed.destroy_process_group()


def listening(port: int) -> list[str]:
    """Local addresses, in hexadecimal, on which ``port`` is open, to IPv4 and IPv6."""
    lines = [
        line.split()
        for kind in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]
    ]
    found = [local for _, local, _, state, *_ in lines if state == "0A"]
    return [
        address
        for address, _, number in (local.partition(":") for local in found)
        if int(number, 16) == port
    ]


def shard(batch: Batch, rank: Rank) -> Batch:
    """Nothing for rank 0, the rest over the others."""
    rows = [np.zeros(0, np.int64), *batch.partition(rank.world - 1)]
    return batch.take(rows[rank.index])


def train(
    engine: FSDPEngine, rank: Rank, grads: Path | None, index: int, seed: int | None = None
) -> list:
    batch = make_batch(seed=index if seed is None else seed)
    engine.forward(
        shard(batch, rank), WANT
    )  # leaves nothing gathered behind that the step would not change
    before = gathers
    engine.forward_backward(shard(batch, rank), WANT, loss, info(batch, index))
    during = gathers - before
    if grads:
        np.savez(grads, **arrays(engine.gradients()))
    result = engine.step()
    return [result.applied, result.grad_norm, during]


def moved(folder: Path, rank: Rank, moves: bool) -> dict[str, np.ndarray]:
    """The weights after steps between whose phases everything leaves its memory and
    comes back, as it leaves a GPU.
    """
    engine = make_engine(folder, rank, **SETTINGS)

    def move() -> None:
        if moves:
            engine._park(EVERYTHING)
            held = {local(tensor).untyped_storage().nbytes() for tensor in engine.named.values()}
            assert held == {0}, held
            engine._unpark(EVERYTHING)

    for index in range(STEPS):
        batch = shard(make_batch(seed=index), rank)
        move()
        engine.forward_backward(batch, WANT, loss, info(make_batch(seed=index), index))
        move()
        engine.step()
    return arrays(engine.weights())


def hurt(engine: FSDPEngine, rank: Rank) -> list:
    """A NaN on the last rank only."""
    batch = make_batch()
    before = arrays(engine.weights())

    def bad(out, columns):
        token_loss, metrics = loss(out, columns)
        return token_loss * (float("nan") if rank.index == rank.world - 1 else 1.0), metrics

    engine.forward_backward(shard(batch, rank), WANT, bad, info(batch))
    result = engine.step()
    assert all(
        np.array_equal(before[name], tensor) for name, tensor in arrays(engine.weights()).items()
    )
    return [result.applied, str(result.grad_norm)]


def too_long(engine: FSDPEngine, rank: Rank) -> str:
    """A sequence that exceeds the limit on rank 1 only."""
    length = 41 if rank.index == 1 else 5
    columns = {"tokens": np.zeros(length, np.int32), "loss_mask": np.zeros(length, bool)}
    try:
        engine.forward(Batch(np.array([length]), columns), WANT)
    except CouplerError as error:
        return str(error)
    return "nothing was raised"


def continued(engine: FSDPEngine, rank: Rank, job: dict) -> None:
    """Save after one step, or load; then take one more."""
    if "save" in job:
        train(engine, rank, None, 0)
        pending = engine.save(made(Path(job["save"])), EVERYTHING)
        train(engine, rank, None, 1, seed=7)  # what is saved is the state at the call
        pending.wait(60)
        return
    if "load" in job:
        engine.load(Path(job["load"]), EVERYTHING)
    train(engine, rank, None, 1, seed=7)


def made(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder


if __name__ == "__main__":
    fork = multiprocessing.get_context("fork")
    for job in json.loads(sys.argv[1]):
        ranks = [fork.Process(target=main, args=(job, i)) for i in range(len(job["outs"]))]
        for process in ranks:
            process.start()
        while running := [process.sentinel for process in ranks if process.is_alive()]:
            # the others would wait for one that died
            if any(process.exitcode for process in ranks):
                for process in ranks:
                    process.kill()
            multiprocessing.connection.wait(running)
        if any(process.exitcode for process in ranks):
            sys.exit(1)
