"""Refuse a plan whose options contradict each other.

The messages say which values nearby do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from coupler.config.options import SECTIONS, section
from coupler.config.schema import Job, Offload, RouterReplay, RunConfig
from coupler.data.prompts import Limit
from coupler.errors import ConfigError
from coupler.interfaces import EngineConfig
from coupler.plugins.manager import Plugins
from coupler.run.demonstration_check import check_demonstrations
from coupler.run.opinion_checks import check_opinions
from coupler.system.reads import original
from coupler.system.words import ceil_div, either

if TYPE_CHECKING:
    from coupler.run.plan import Plan


FREES_MEMORY = {"engine": "memory:offload", "rollout": "memory:sleep"}
# Capability of an engine, and of a rollout.
ROUTES = "output:routed_experts"
# Column of an algorithm, and output of an engine.
SQUARES = "sum_pi_squared"


def check(plan: Plan, config: RunConfig, plugins: Plugins) -> None:
    """Refuse numbers of the plan that do not fit together.

    Raises:
        ConfigError: they do not.
    """
    _check_steps(plan, config)
    _check_engines(plan, config, plugins)
    check_opinions(config, plugins, plan.job)
    if config.offload is Offload.TRUE and (reason := no_turns(config, plugins)):
        raise ConfigError(reason)


def _check_steps(plan: Plan, config: RunConfig) -> None:
    sequences, number = plan.sequences_per_step, plan.optimizer_steps_per_batch
    critic = config.critic.optimizer_steps_per_batch
    if critic and sequences % critic:
        raise ConfigError(
            f"critic.optimizer_steps_per_batch={critic} does not divide the {sequences} "
            "sequences of a step.\n"
            f"  try:  critic.optimizer_steps_per_batch=0, which is as many as the policy's {number}"
        )

    if sequences % number:
        divisors = [d for d in range(1, sequences + 1) if sequences % d == 0]
        near = sorted(sorted(divisors, key=lambda d: abs(d - number))[:2])
        prompts = sorted(
            _nearest_multiples(plan.prompts_per_step, _step_of(number, plan.samples_per_prompt))
        )
        raise ConfigError(
            f"optimizer_steps_per_batch={number} does not divide the {sequences} sequences of "
            "a step.\n"
            f"  try:  optimizer_steps_per_batch={either(near)}, or "
            f"prompts_per_step={either(prompts)}"
        )


def _check_engines(plan: Plan, config: RunConfig, plugins: Plugins) -> None:
    longest = plan.max_tokens_per_sequence
    for path, kind in SECTIONS.items():
        engine = section(config, path)
        if kind != "engine" or not engine:
            continue

        # A classifier has a tokenizer of its own. What is too long for it is invalid.
        room = None if path == "reward_model.engine" else micro_batch_room(engine, path)
        if room and longest > room.tokens:
            keys = "data.max_prompt_tokens + sampling.max_tokens"
            if config.environment:
                keys = "environment.max_tokens, or the prompt and environment.max_turns answers,"
            raise ConfigError(
                f"{room.name} is less than one sequence can have: "
                f"{keys} = {longest}.\n"
                f"  try:  {room.fix.format(ceil_div(longest, room.ranks))}"
            )

        able = plugins.get("engine", engine.name).capabilities_of(engine)
        if engine.ranks > 1 and "world:1" in able:
            raise ConfigError(
                f"{path}={engine.name} runs on one rank.\n  try:  {path}.ranks=1, or another engine"
            )


def no_turns(config: RunConfig, plugins: Plugins) -> str:
    """Say why a chosen backend cannot give its memory to others, or nothing."""
    if config.eval.rollout:
        return (
            f"offload=true and eval.rollout={config.eval.rollout.name}: the rollout of "
            "evaluations keeps its memory, and takes no turns.\n"
            "  try:  offload=false, or no eval.rollout"
        )

    for path, kind in SECTIONS.items():
        wanted, inner = FREES_MEMORY.get(kind), section(config, path)
        if not wanted or not inner:
            continue
        if wanted not in plugins.get(kind, inner.name).capabilities_of(inner):
            return (
                f"offload=true needs {path}={inner.name} to free device memory, which it "
                f"cannot ({wanted}).\n"
                f"  try:  offload=false, or another {path}"
            )
    return ""


def check_columns(config: RunConfig, plugins: Plugins, needs: frozenset[str], job: Job) -> None:
    """Refuse columns that a run wants and cannot have.

    Raises:
        ConfigError: there is such a column.
    """
    check_demonstrations(config, needs, job)
    _check_routes(config, plugins, needs, job)
    _check_squares(config, plugins, needs)


def _check_routes(config: RunConfig, plugins: Plugins, needs: frozenset[str], job: Job) -> None:
    """Refuse a replay of routes that nobody records, or that nobody can replay."""
    mode = config.router_replay
    if mode is RouterReplay.DISABLED:
        return

    for path in ("engine", *(["rollout"] if mode is RouterReplay.R3 and job is Job.TRAIN else [])):
        inner = section(config, path)
        if ROUTES not in plugins.get(path, inner.name).capabilities_of(inner):
            raise ConfigError(
                f"router_replay={mode} needs {path}={inner.name} to say which experts tokens "
                f"go to, which it does not ({ROUTES}).\n"
                f"  try:  router_replay=disabled, or another {path}"
            )

    if job is not Job.TRAIN:
        raise ConfigError(
            f"router_replay={mode} is of training on samples.\n  try:  router_replay=disabled"
        )

    one_step = config.optimizer_steps_per_batch * config.epochs_per_batch == 1
    if mode is RouterReplay.R2 and (one_step or "old_logprobs" not in needs):
        raise ConfigError(
            "router_replay=R2 records routes in the pass for old log-probs, and there is "
            "none: it takes optimizer_steps_per_batch or epochs_per_batch above 1 and an "
            "algorithm that needs old_logprobs.\n"
            "  try:  router_replay=disabled: one step trains with the weights that would be "
            "recorded"
        )


def _check_squares(config: RunConfig, plugins: Plugins, needs: frozenset[str]) -> None:
    """Refuse an algorithm that needs sums which the engine does not compute."""
    engine, wanted = config.engine, f"output:{SQUARES}"
    able = plugins.get("engine", engine.name).capabilities_of(engine)
    if SQUARES in needs and wanted not in able:
        raise ConfigError(
            f"algorithm={config.algorithm.name} as it is set reads {SQUARES}, which "
            f"engine={engine.name} does not compute ({wanted}).\n"
            "  try:  another engine, or another baseline"
        )


def micro_batch_room(engine: EngineConfig, path: str) -> Limit | None:
    """Return how long a sequence may be for the engine of the section ``path``.

    The answer is None where the engine sets no limit.
    """
    engine = original(engine)
    name, tokens, ranks = *engine.micro_batch_limit, engine.ranks_per_sequence
    if not tokens:
        return None

    option, each = f"{path}.{name}=", f" on each of {ranks} ranks" if ranks > 1 else ""
    return Limit(tokens * ranks, f"{option}{tokens}{each}", f"{option}{{}}", ranks)


def _step_of(number: int, samples: int) -> int:
    """Return the smallest number of prompts whose samples ``number`` divides."""
    return next(p for p in range(1, number + 1) if p * samples % number == 0)


def _nearest_multiples(value: int, step: int) -> set[int]:
    return {max(value // step, 1) * step, ceil_div(value, step) * step}
