"""executor=ray, on two Ray nodes of this machine: the same numbers as executor=local,
and the root cause first.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from job_run import arguments, metrics, replayed, reproducible, run, write_inputs
from safetensors.numpy import load_file

from coupler.cli import main
from coupler.config.schema import Devices, Placement, RayConfig
from coupler.errors import ConfigError, PlacementError, WaitTimeout, WorkerDied, WorkerFailed
from coupler.executors.environment import token
from coupler.executors.placement import Role
from coupler.executors.waits import Waits
from coupler.interfaces import Rank
from coupler.testing.models import read_tensors, write_tokenizer, write_toy

PROBE = f"{Path(__file__).with_name('ray_worker.py')}:Probe"
TOY = ("engine=toy", "rollout=toy", "algorithm=toy", "steps=3", "prompts_per_step=2",
       "samples_per_prompt=4",
       "sampling.max_tokens=8", "data.max_prompt_tokens=64")  # fmt: skip


@pytest.fixture
def toy(tmp_path: Path) -> list[str]:
    """The command line of a job on the toy backends, without its run_dir."""
    write_inputs(tmp_path)
    write_toy(tmp_path / "toy")
    write_tokenizer(tmp_path / "toy")
    inputs = (
        f"data.source={tmp_path / 'rows.jsonl'}",
        f"reward.target={tmp_path / 'reward.py'}:score",
    )
    return ["train", *TOY, *inputs, f"model.path={tmp_path / 'toy'}"]


def probes(
    logs: Path,
    use: Callable[[Any, list[Any], list[Rank]], Awaitable[None]],
    spec: str = "",
    waits: Waits | None = None,
) -> None:
    """Two probes as ranks of a policy, each on another node; ``use`` gets executor,
    handles and ranks.
    """
    from coupler.executors.ray.executor import OnRay

    executor = OnRay(RayConfig(num_cpus_per_worker=3), waits or Waits(60.0, 60.0), logs)

    async def go() -> None:
        await executor.place([Role("policy", 2)])
        handles = [executor.spawn("policy", i, PROBE, spec) for i in range(2)]
        await use(
            executor,
            handles,
            await executor.locate(handles, [Rank(index=i, world=2) for i in range(2)]),
        )

    try:
        asyncio.run(go())
    finally:
        executor.close()


@pytest.mark.parametrize("staleness", [0, 1])
def test_the_toy_backends_give_the_same_numbers(
    cluster: str, toy: list[str], tmp_path: Path, staleness: int
) -> None:
    folders = [tmp_path / name for name in ("local", "ray")]
    for folder in folders:
        given = [
            f"executor={folder.name}",
            f"run_dir={folder}",
            f"max_staleness={staleness}",
            "strict=true",
        ]
        assert main([*toy, *given, "engine.lr=0.1"]) == 0
    local, ray = map(reproducible, folders)
    assert (folders[1] / "logs" / "policy-0.log").is_file()
    if staleness == 0:
        assert ray == local
    else:
        assert [line["step"] for line in ray] == [0, 1, 2, 3]
        assert all(
            line["staleness/violations"] == 0 and line["staleness/max"] <= 1 for line in ray[1:]
        )


def test_an_environment_plays_the_same_episodes(
    cluster: str, toy: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COUPLER_PLUGINS", "played_environments")
    folders = [tmp_path / name for name in ("local", "ray")]
    for folder in folders:
        played = ("environment=played", "environment.max_turns=2", "deterministic=true")
        assert main([*toy, *played, f"executor={folder.name}", f"run_dir={folder}"]) == 0
    local, ray = map(reproducible, folders)
    assert ray == local and local[-1]["conversation/completion_tokens"] > 0


def test_an_option_that_nothing_reads_is_found_in_other_processes(
    cluster: str, toy: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = [
        "executor=ray",
        f"run_dir={tmp_path / 'run'}",
        "strict=true",
        "engine.lr=0.1",
        "eval.temperature=0.5",
    ]
    assert main([*toy, *given]) == 2
    assert "coupler: you set eval.temperature, and nothing read it." in capfd.readouterr().err


def test_a_transformer_gives_the_same_numbers(cluster: str, model: Path, tmp_path: Path) -> None:
    options = ("algorithm.kl=none", "steps=2")
    local = run("train", model, tmp_path / "local" / "run", *options)
    ray = run("train", model, tmp_path / "ray" / "run", *options, "executor=ray")
    assert reproducible(ray) == reproducible(local)


@pytest.mark.slow
def test_megatron_gives_the_same_numbers(
    cluster: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One rank alone, and two that split every matrix, with whole weights for the
    rollout after each step.
    """
    options = ("engine=megatron", "algorithm.kl=none", "steps=2", "checkpoint.export=false")
    local = run("train", model, tmp_path / "local" / "run", *options)
    ray = run("train", model, tmp_path / "ray" / "run", *options, "executor=ray")
    assert reproducible(ray) == reproducible(local)
    split = ("executor=ray", "engine.ranks=2", "engine.tensor_parallel=2")
    kept = ("checkpoint.every_steps=1", "record.every_steps=1")
    two = run("train", model, tmp_path / "two" / "run", *options, *split, *kept)
    for a, b in zip(metrics(local)[1:], metrics(two)[1:], strict=True):
        for name in ("reward/mean", "loss", "train/grad_norm", "entropy", "batch/tokens"):
            assert b[name] == pytest.approx(a[name], rel=1e-3, abs=1e-6), name
    then, now, _ = replayed(two, 2, "train", capsys)["train/grad_norm"]  # by one rank
    assert now == pytest.approx(then, rel=1e-3)
    exported = []
    for folder in (local, two):
        assert main(["export", str(folder), "--out", str(folder / "out")]) == 0
        exported.append(load_file(folder / "out" / "model.safetensors"))
    assert exported[0].keys() == exported[1].keys()
    assert all(exported[0][name].shape == exported[1][name].shape for name in exported[0])


def test_two_ranks_and_two_replicas_over_two_nodes(
    cluster: str, model: Path, tmp_path: Path
) -> None:
    """Ranks with sequences of their own and two replicas, then ranks that split each
    sequence.
    """
    options = ("algorithm.kl=none", "steps=2", "checkpoint.export=false")
    one = metrics(run("train", model, tmp_path / "one" / "run", *options))
    many = ("executor=ray", "engine.ranks=2", "ray.placement=disjoint")
    for size, replicas in ((1, 2), (2, 1)):
        # Together they have as much room as the one rank.
        split = (f"engine.sequence_parallel={size}", f"engine.max_tokens_per_gpu={256 // size}")
        given = (*options, *many, *split, f"rollout.replicas={replicas}")
        two = metrics(run("train", model, tmp_path / str(size) / "run", *given))
        for a, b in zip(one[1:], two[1:], strict=True):
            for name in ("reward/mean", "loss", "train/grad_norm", "entropy", "batch/tokens"):
                assert b[name] == pytest.approx(a[name], rel=1e-4, abs=1e-6), name


@pytest.mark.slow
def test_ranks_of_every_role_go_on_from_one_rank(
    cluster: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """PPO with a critic and a reference, stopped after its first checkpoint in one
    process, on two ranks each.
    """
    ppo = (
        "algorithm=ppo",
        "algorithm.kl=in_loss",
        "algorithm.kl_estimator=k3",
        "critic.engine.lr=3e-3",
    )
    one = run("train", model, tmp_path / "run", *ppo)
    two = tmp_path / "two"
    given = [*arguments("train", model, tmp_path, two), *ppo]
    assert main([*given, "steps=1"]) == 0
    ranks = ("executor=ray", "engine.ranks=2", "checkpoint.every_steps=1", "record.every_steps=1")
    assert main([*given, *ranks]) == 0
    assert [line["step"] for line in metrics(two)] == [0, 1, 2, 3]
    for a, b in zip(metrics(one)[1:], metrics(two)[1:], strict=True):
        for name in (
            "reward/mean",
            "loss",
            "kl_ref",
            "train/grad_norm",
            "critic/loss",
            "critic/grad_norm",
        ):
            assert b[name] == pytest.approx(a[name], rel=1e-3, abs=1e-6), name
    again = replayed(two, 3, "train", capsys)  # with one rank each
    for name in ("loss", "critic/loss", "train/grad_norm", "critic/grad_norm"):
        then, now, _ = again[name]
        assert now == pytest.approx(then, rel=1e-3, abs=1e-6), name
    assert main(["export", str(two), "--out", str(tmp_path / "out")]) == 0
    policies = [tmp_path / "out", two / "export", one / "export"]
    for folders in (policies, [two / "export_critic", one / "export_critic"]):
        first, *others = map(read_tensors, folders)
        for other in others:
            for name, tensor in first.items():
                np.testing.assert_allclose(tensor, other[name], atol=1e-3, err_msg=name)


def test_arguments_arrive_without_a_copy_and_workers_know_their_place(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(executor: Any, handles: list[Any], ranks: list[Rank]) -> None:
        column = executor.put(np.ones(1 << 20))
        for writeable, owns, total in await executor.each(handles, "look", [(column,), (column,)]):
            assert (writeable, owns, total) == (False, False, 1 << 20)
        assert ranks[0].rendezvous == ranks[1].rendezvous and ranks[0].rendezvous.startswith(
            f"{ranks[0].node}:"
        )
        assert len({executor.slots["policy"][i].bundle for i in range(2)}) == 2
        for found in await executor.each(handles, "environment", [(), ()]):
            assert (
                found["COUPLER_TEST"] == "1"
                and "RANK" not in found
                and found["CUDA_VISIBLE_DEVICES"] == ""
            )

    monkeypatch.setenv("COUPLER_TEST", "1")
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    probes(tmp_path, use)


def test_what_a_worker_raises_is_raised(cluster: str, tmp_path: Path) -> None:
    async def use(executor: Any, handles: list[Any], ranks: list[Rank]) -> None:
        with pytest.raises(ConfigError) as refused:
            await executor.each(handles, "refuse", [(), ()])
        assert str(refused.value).startswith(
            "engine.lr is odd.\n  try:  engine.lr=1\n  raised by:  policy rank "
        )
        with pytest.raises(ConfigError):
            await executor.call(handles[0], "refuse")
        with pytest.raises(WorkerFailed, match="SystemExit: 3"):
            await executor.call(handles[0], "stop")
        start = time.monotonic()
        with pytest.raises(WorkerFailed) as failed:
            await executor.each(handles, "fail", [(0,), (1,)])
        assert time.monotonic() - start < 10  # rank 0 is not waited for
        text = str(failed.value)
        assert text.startswith("Unknown: boom\n  raised by:  policy rank 1 (pid ")
        assert "node 127.0.0.1) in fail; log: " in text and "| one line before the end" in text
        assert 'raise Unknown("boom")' in text

    probes(tmp_path, use)
    with pytest.raises(ConfigError, match="is odd"):
        probes(tmp_path, use, "broken")


def test_a_killed_worker_is_the_cause(cluster: str, tmp_path: Path) -> None:
    async def use(executor: Any, handles: list[Any], ranks: list[Rank]) -> None:
        start = time.monotonic()
        with pytest.raises(WorkerDied) as died:
            await executor.each(handles, "die", [(0,), (1,)])
        assert time.monotonic() - start < 5
        text = str(died.value)
        assert (
            text.startswith("policy rank 1 (pid ")
            and ") died in die: " in text
            and "| dying soon" in text
        )
        with pytest.raises(WorkerDied):  # whatever else is waited for
            await executor.call(handles[0], "sleep", 60)

    probes(tmp_path, use)


@pytest.mark.parametrize("through", ["this process", "a task of its node"])
def test_a_stopped_worker_is_named_and_ended(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, through: str
) -> None:
    """As on another machine, whose processes a task looks at."""
    import ray

    if through != "this process":
        monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "192.0.2.9")
    waits = Waits(deadline_s=120.0, heartbeat_s=0.5)

    async def use(executor: Any, handles: list[Any], ranks: list[Rank]) -> None:
        process = executor.places[handles[1]].process
        os.kill(process.pid, signal.SIGSTOP)
        where = rf"policy rank 1 \(pid {process.pid}, node 127.0.0.1\)"
        with pytest.raises(WorkerDied, match=rf"^{where} is stopped, by SIGSTOP or SIGTSTP, "):
            await executor.each(handles, "sleep", [(60,), (60,)])
        end = time.monotonic() + 20
        while not process.has_ended() and time.monotonic() < end:
            await asyncio.sleep(0.1)
        assert process.has_ended()

    probes(tmp_path, use, waits=waits)


def test_a_worker_that_was_stopped_for_a_moment_goes_on(cluster: str, tmp_path: Path) -> None:
    async def use(executor: Any, handles: list[Any], ranks: list[Rank]) -> None:
        process = executor.places[handles[0]].process
        calling = asyncio.ensure_future(executor.each(handles, "sleep", [(6,), (6,)]))
        os.kill(process.pid, signal.SIGSTOP)
        await asyncio.sleep(2.5)
        os.kill(process.pid, signal.SIGCONT)
        assert await calling == [None, None]

    probes(tmp_path, use, waits=Waits(60.0, 1.0))


def answering(server: socket.socket, text: bytes | None) -> None:
    """Say ``text`` to whoever connects, or hang up, or stay silent where it is None."""
    held = []
    while True:
        try:
            held.append(server.accept()[0])
        except OSError:
            return
        if text is not None:
            held[-1].sendall(text)
            held.pop().close()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "did not answer within 5 s"),
        (b"", "closed the connection|reset by peer"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "is no Ray"),
        (b"SSH-2.0-x\r\n", "is no Ray"),
    ],
)
def test_a_listener_that_is_no_ray_is_soon_found(text: bytes | None, why: str) -> None:
    from coupler.executors.ray.cluster import check_answers

    with socket.create_server(("0.0.0.0", 0)) as server:
        threading.Thread(target=answering, args=(server, text), daemon=True).start()
        start = time.monotonic()
        with pytest.raises(ConnectionError, match=why):
            check_answers(f"127.0.0.1:{server.getsockname()[1]}")
        assert time.monotonic() - start < 10
        port = server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
    with pytest.raises(ConnectionError, match=f"{port}: Connection refused"):
        check_answers(f"127.0.0.1:{port}")


def test_a_wait_is_announced_and_ends(
    cluster: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    waits = Waits(deadline_s=6.0, heartbeat_s=0.5)

    async def use(executor: Any, handles: list[Any], ranks: list[Rank]) -> None:
        waits.deadline_s = 2.0
        with pytest.raises(WaitTimeout, match=r"waited 2 s for sleep of policy \[1\]"):
            await executor.each(handles, "sleep", [(0,), (60,)])

    waits.deadline_s = 60.0
    probes(tmp_path, use, waits=waits)
    assert "coupler: waiting 1 s for sleep of policy [1]" in capfd.readouterr().err
    assert "in sleep" in (tmp_path / "policy-1.log").read_text()  # its stack


@pytest.mark.parametrize("devices", [Devices.CPU, Devices.GPU])
def test_a_cluster_that_is_too_small_is_refused(
    cluster: str, tmp_path: Path, devices: Devices
) -> None:
    from coupler.executors.ray.executor import OnRay

    executor = OnRay(
        RayConfig(placement=Placement.DISJOINT, devices=devices), Waits(60.0, 60.0), tmp_path
    )
    roles = [Role("policy", 5), Role("rollout", 5)]
    with pytest.raises(PlacementError) as refused:
        asyncio.run(executor.place(roles))
    kind = f"{devices.value.upper()}s (policy 5 + rollout 5)"
    assert str(refused.value).startswith(
        f"the run needs 10 {kind}, the cluster has {8 if devices == 'cpu' else 0}: node "
    )
    executor.close()


def test_another_token_is_refused(cluster: str, toy: list[str], tmp_path: Path) -> None:
    environment = {**os.environ, "RAY_AUTH_TOKEN": token()[::-1], "RAY_NUM_REDIS_GET_RETRIES": "1"}
    command = [sys.executable, "-m", "coupler.cli", *toy, "executor=ray", f"ray.address={cluster}"]
    done = subprocess.run(
        [*command, f"run_dir={tmp_path / 'run'}"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr
    assert f"coupler: ray.address={cluster} cannot be joined: " in done.stderr


def test_ray_of_its_own_listens_on_loopback(toy: list[str], tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "coupler.cli",
        *toy,
        "executor=ray",
        "ray.devices=gpu",
        f"run_dir={tmp_path / 'r'}",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert (
        "coupler: the run needs 1 GPUs (policy/rollout 1), the cluster has 0: node 127.0.0.1 ("
        in done.stderr
    )
    assert "Traceback" not in done.stderr


def test_one_process_has_one_rank(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_inputs(tmp_path)
    assert main([*arguments("train", model, tmp_path, tmp_path / "run"), "engine.ranks=2"]) == 2
    assert (
        "coupler: engine.ranks=2 needs more than one process: set executor=ray"
        in capfd.readouterr().err
    )
