"""The plan is arithmetic on the configuration, and contradictions name values that
work.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest

from coupler.config.compose import compose
from coupler.config.schema import Job
from coupler.errors import ConfigError, PluginError
from coupler.interfaces import InFlight
from coupler.plugins.manager import Plugins
from coupler.run.plan import Plan, make_plan
from coupler.system.reads import track

NEEDED = [
    "engine=toy", "rollout=toy", "algorithm=toy", "model.path=/m", "data.source=x.jsonl",
    "reward.target=a:b",
    "data.max_prompt_tokens=100", "sampling.max_tokens=28",
]  # fmt: skip


def planned(
    *overrides: str, num_rows: int | None = None, job: Job = Job.TRAIN, **known: frozenset[str]
) -> Plan:
    plugins = Plugins.load()
    return make_plan(
        compose(plugins, [*NEEDED, *overrides], job=job).config, num_rows, plugins, job=job, **known
    )


def test_arithmetic() -> None:
    plan = planned(
        "prompts_per_step=64", "samples_per_prompt=8", "optimizer_steps_per_batch=4", "steps=117",
        "engine.max_tokens_per_gpu=1024", num_rows=7488,
    )  # fmt: skip
    assert plan.sequences_per_step == 512
    assert plan.sequences_per_optimizer_step == 128
    assert plan.optimizer_steps == 468
    assert plan.max_tokens_per_sequence == 128
    assert plan.max_micro_batches == 16  # 8 sequences of 128 tokens fit into 1024
    assert plan.steps_per_epoch == 117
    text = plan.render()
    assert "64 prompts x 8 samples = 512 sequences" in text
    assert "4 optimizer steps of 128 sequences per step (steps 2-4 are off-policy)" in text
    assert "117 steps = 468 optimizer steps; 117 steps per epoch, 1 epochs" in text
    assert "toy -> inproc (full) -> toy" in text


@pytest.mark.parametrize(
    ("epochs", "rows", "steps"), [(1.1, 100, 11), (2.2, 50, 11), (1, 100, 10), (1.101, 100, 12)]
)
def test_a_part_of_an_epoch_is_no_step_more(epochs: float, rows: int, steps: int) -> None:
    plan = planned(f"epochs={epochs}", "prompts_per_step=10", num_rows=rows, job=Job.SFT)
    assert plan.steps == steps


def test_epochs_over_a_batch_are_more_steps_of_the_same_size() -> None:
    plan = planned(
        "prompts_per_step=64", "optimizer_steps_per_batch=2", "epochs_per_batch=3", "steps=10"
    )
    assert (plan.sequences_per_optimizer_step, plan.optimizer_steps) == (256, 60)
    assert (
        "6 optimizer steps of 256 sequences per step, in 3 epochs (steps 2-6 are off-policy)"
        in plan.render()
    )
    with pytest.raises(
        ConfigError, match=r"^epochs_per_batch=2 is of coupler train, for batches of samples"
    ):
        planned("epochs_per_batch=2", job=Job.SFT)


def test_what_is_not_known_is_not_printed() -> None:
    assert "epoch" not in planned().render()
    assert "off-policy" not in planned().render()


def test_supervised() -> None:
    plan = planned("prompts_per_step=32", "optimizer_steps_per_batch=2", job=Job.SFT)
    assert plan.sequences_per_step == 32
    assert plan.roles == ("policy (engine toy)",)
    assert plan.weights == ""
    assert "off-policy" not in plan.render()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ([], "policy constant"),
        (["engine.schedule=cosine"], "policy cosine over 40 optimizer steps"),
        (
            ["engine.schedule=cosine", "engine.total_steps=70"],
            "policy cosine over 70 optimizer steps",
        ),
        (
            ["engine.schedule=linear", "engine.warmup_steps=4"],
            "policy linear over 40 optimizer steps, warm-up over 4",
        ),
        (
            ["engine.schedule=wsd", "engine.decay_steps=3", "engine.warmup_ratio=0.1"],
            "policy wsd over 40 optimizer steps, warm-up over 4",
        ),
        (["engine.warmup_steps=90"], "policy constant, warm-up over 90"),
    ],
)
def test_a_schedule_ends_with_the_run(options: list[str], text: str) -> None:
    for job in (Job.TRAIN, Job.SFT):
        lines = (
            planned("steps=20", "optimizer_steps_per_batch=2", *options, job=job)
            .render()
            .splitlines()
        )
        (line,) = [
            line.partition("  ")[2].strip() for line in lines if line.startswith("learning rate")
        ]
        assert line == text


def test_the_critic_s_schedule_ends_after_the_critic_s_steps() -> None:
    """The policy's after its own, which begin when the critic has been alone."""
    options = [
        "steps=20",
        "optimizer_steps_per_batch=2",
        "engine.schedule=cosine",
        "critic.warmup_steps=5",
    ]
    options += ["engine@critic.engine=toy", "critic.optimizer_steps_per_batch=4"]
    plan = planned(*options, needs=frozenset({"values"}))
    assert plan.optimizer_steps == 30
    assert (
        "policy cosine over 30 optimizer steps; critic cosine over 80 optimizer steps"
        in plan.render()
    )
    assert "20 steps = 40 optimizer steps" in planned(*options[:2]).render()
    alone = planned(*options, "critic.warmup_steps=20", needs=frozenset({"values"}))
    assert dict(alone.rates) == {"critic": "cosine over 80 optimizer steps"}


@pytest.mark.parametrize("path", ["engine", "critic.engine"])
def test_a_schedule_that_does_not_fit_into_the_run(path: str) -> None:
    sets = [
        f"{path}.schedule=wsd",
        f"{path}.decay_steps=5",
        f"{path}.warmup_steps=16",
        "engine@critic.engine=toy",
    ]
    with pytest.raises(ConfigError) as error:
        planned("steps=20", *sets, needs=frozenset({"values"}))
    assert str(error.value) == (
        f"{path}.warmup_steps and {path}.decay_steps take 21 optimizer steps under "
        f"{path}.schedule=wsd, "
        f"and the run has 20.\n  try:  fewer of them, more steps, or {path}.total_steps"
    )


def test_reference_is_a_role_when_the_algorithm_needs_it() -> None:
    assert planned().roles == ("policy (engine toy)", "rollout (toy)")
    roles = planned(needs=frozenset({"ref_logprobs"})).roles
    assert roles == ("policy (engine toy)", "reference (engine toy)", "rollout (toy)")


def test_staleness() -> None:
    assert "take turns" in planned().render()
    assert (
        "at most 2 versions behind; what they sample during a sync: recompute"
        in planned("max_staleness=2").render()
    )


@pytest.mark.parametrize(
    ("overrides", "able", "how"),
    [
        ((), True, InFlight.DRAIN),  # nothing is in flight then
        (("max_staleness=1",), True, InFlight.RECOMPUTE),
        (("max_staleness=1",), False, InFlight.DRAIN),
        (("max_staleness=1", "sync.in_flight=drain"), True, InFlight.DRAIN),
        (("max_staleness=1", "sync.in_flight=abort"), True, InFlight.ABORT),
    ],
)
def test_what_a_sync_does_with_what_is_being_sampled(
    overrides: tuple[str, ...], able: bool, how: InFlight
) -> None:
    plugins = Plugins.load()
    config = compose(plugins, [*NEEDED, *overrides]).config
    if not able:
        toy = plugins.get("rollout", "toy")
        less = dataclasses.replace(
            toy, capabilities=toy.capabilities_of(config.rollout) - {"in_flight:recompute"}
        )
        get = plugins.get
        plugins.get = lambda kind, name: less if kind == "rollout" else get(kind, name)  # type: ignore[method-assign]
    assert make_plan(config, None, plugins).in_flight is how


def test_indivisible_batch_names_the_nearest_values() -> None:
    with pytest.raises(ConfigError) as error:
        planned("prompts_per_step=8", "samples_per_prompt=8", "optimizer_steps_per_batch=3")
    assert "optimizer_steps_per_batch=3 does not divide the 64 sequences" in str(error.value)
    assert "optimizer_steps_per_batch=2 or 4, or prompts_per_step=6 or 9" in str(error.value)
    for fix in ("optimizer_steps_per_batch=2", "optimizer_steps_per_batch=4"):
        planned("prompts_per_step=8", "samples_per_prompt=8", fix)
    for fix in ("prompts_per_step=6", "prompts_per_step=9"):
        planned("samples_per_prompt=8", "optimizer_steps_per_batch=3", fix)


def test_sequence_that_fits_no_micro_batch() -> None:
    with pytest.raises(
        ConfigError, match=r"engine.max_tokens_per_gpu=127 .* = 128\.\n  try:  .*=128"
    ):
        planned("engine.max_tokens_per_gpu=127")
    assert planned("engine.max_tokens_per_gpu=128").max_micro_batches == 64


def test_offload_needs_backends_that_can() -> None:
    with pytest.raises(ConfigError, match="offload=true needs engine=toy to free device memory"):
        planned("offload=true")


def test_weight_path() -> None:
    assert planned("sync.transport=disk").weights == "toy -> disk (full) -> toy"


def test_no_weight_path_lists_what_each_side_offers() -> None:
    plugins = Plugins.load()
    config = compose(plugins, NEEDED).config
    engine, rollout = plugins.get("engine", "toy"), plugins.get("rollout", "toy")
    ask = partial(plugins.call, "coupler_weight_path")
    with pytest.raises(PluginError) as error:
        ask(
            engine=plugins.get("algorithm", "toy"),
            rollout=rollout,
            transports=plugins.of("transport"),
            config=config,
        )
    assert "engine offers:  nothing" in str(error.value)
    assert "rollout takes:  weights:full" in str(error.value)
    assert "transport disk carries:" in str(error.value)
    found = ask(engine=engine, rollout=rollout, transports=plugins.of("transport"), config=config)
    assert found == ("full", "inproc")


@pytest.mark.parametrize(
    ("gpu", "options", "expected"),
    [
        (False, [], "tcp"),
        (False, ["sync.transport=disk"], "disk"),
        (True, [], "ipc"),
        (True, ["sync.transport=nccl"], "nccl"),
        (True, ["executor=ray"], "ipc"),
        (True, ["executor=ray", "ray.placement=disjoint"], "nccl"),
        (True, ["executor=ray", "ray.devices=cpu"], "tcp"),
        (False, ["executor=ray", "ray.devices=gpu"], "ipc"),
    ],
)
def test_remote_workers_are_reached_from_device_to_device(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, options: list[str], expected: str
) -> None:
    """Not through the process, and not through the host's memory where there are
    GPUs.
    """
    monkeypatch.setattr("coupler.builtin.weight_path.gpu_is_visible", lambda: gpu)
    plugins = Plugins.load()
    rollout = plugins.get("rollout", "toy")
    remote = dataclasses.replace(
        rollout, capabilities=frozenset({"weights:full", "workers:remote"})
    )
    found = plugins.call(
        "coupler_weight_path",
        engine=plugins.get("engine", "toy"),
        rollout=remote,
        transports=plugins.of("transport"),
        config=compose(plugins, [*NEEDED, *options]).config,
    )
    assert found == ("full", expected)


def test_planning_reads_no_option() -> None:
    plugins = Plugins.load()
    config, reads = track(compose(plugins, NEEDED).config)
    make_plan(config, 10, plugins)
    assert not reads.keys


def test_processes_and_bundles() -> None:
    plugins = Plugins.load()
    base = compose(
        plugins, [*NEEDED, "executor=ray", "rollout.replicas=3", "ray.placement=disjoint"]
    ).config
    text = make_plan(base, None, plugins, frozenset({"ref_logprobs"})).render()
    assert (
        "ray: 5 processes, disjoint: policy and reference on 1 bundle; rollout on 3 bundles" in text
    )
    assert "rollout (toy) x 3" in text
    assert "toy -> tcp (full) -> toy" in text
    assert "local: one process" in planned().render()


def test_an_engine_of_one_rank_is_not_given_two() -> None:
    with pytest.raises(
        ConfigError, match=r"engine=toy runs on one rank\.\n  try:  engine\.ranks=1"
    ):
        planned("executor=ray", "engine.ranks=2")


@pytest.mark.parametrize(
    "option", ["engine.ranks=2", "rollout.replicas=2", "rollout.python=/x", "engine.python=/x"]
)
def test_one_process_has_one_worker_per_role(option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option} needs .*set executor=ray"):
        planned(option)


def test_inproc_does_not_reach_other_processes() -> None:
    assert planned("executor=ray", "sync.transport=disk").weights == "toy -> disk (full) -> toy"
    with pytest.raises(PluginError, match="it needs place:host"):
        planned("executor=ray", "sync.transport=inproc")
