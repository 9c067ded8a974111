"""Render a plan for people: one line per fact."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coupler.config.schema import ExecutorName, Job
from coupler.executors.placement import make_shares
from coupler.system.terminal import in_columns
from coupler.system.words import count

if TYPE_CHECKING:
    from coupler.run.plan import Plan


def render(plan: Plan) -> str:
    """Return one line per fact, for the console and the log."""
    return in_columns(_lines(plan))


def _lines(plan: Plan) -> list[tuple[str, str]]:
    lines = [("step", _step(plan)), ("optimizer", _optimizer(plan))]

    if plan.max_tokens_per_sequence:
        most = plan.sequences_per_step * plan.max_tokens_per_sequence
        prompt, completion = plan.max_prompt_tokens, plan.max_completion_tokens
        text = (
            f"at most {prompt} + {completion} = {plan.max_tokens_per_sequence} per "
            f"sequence, {most} per step"
        )
        lines.append(("tokens", text))
    if plan.renderer:
        lines.append(("renderer", plan.renderer))
    if (rows := plan.max_rows_per_episode) > 1:
        text = f"dropped as the template does: up to {rows} rows per episode, and {rows} times "
        lines.append(("reasoning", f"{text}the tokens where each turn has some"))
    if plan.max_tokens_per_micro_batch:
        most = plan.max_micro_batches
        number = f"at most {most}" if most else "as many as it takes"
        text = f"{number} per optimizer step, of at most {plan.max_tokens_per_micro_batch} tokens"
        lines.append(("micro-batches", text))

    lines.append(("run", _run(plan)))
    if plan.rates:
        rates = "; ".join(f"{role} {rate}" for role, rate in plan.rates.items())
        lines.append(("learning rate", rates))
    if plan.job is Job.TRAIN:
        behind = f"rollouts run at most {count(plan.max_staleness, 'version')} behind; "
        behind += f"what they sample during a sync: {plan.in_flight}"
        lines.append(
            ("staleness", behind if plan.max_staleness else "0: sampling and training take turns")
        )

    lines.append(("layout", f"{count(plan.num_shards, 'data shard')}; {', '.join(plan.roles)}"))
    lines.append(("executor", _executor(plan)))
    if plan.weights:
        lines.append(("weights", plan.weights))
    return [*lines, ("trackers", ", ".join(plan.trackers) or "none"), ("folder", plan.run_dir)]


def _executor(plan: Plan) -> str:
    processes = count(sum(role.count for role in plan.workers), "process")
    if plan.executor is ExecutorName.TORCHRUN:
        return f"{plan.executor}: {processes}"
    if plan.placement is None:
        return f"{plan.executor}: one process"

    shares = "; ".join(
        f"{' and '.join(role.name for role in share.roles)} on {count(share.num_bundles, 'bundle')}"
        for share in make_shares(plan.workers, plan.placement)
    )
    return f"{plan.executor}: {processes}, {plan.placement}: {shares}"


def _step(plan: Plan) -> str:
    if plan.job is Job.SFT:
        return count(plan.prompts_per_step, "row")
    prompts = count(plan.prompts_per_step, "prompt")
    samples = count(plan.samples_per_prompt, "sample")
    return f"{prompts} x {samples} = {count(plan.sequences_per_step, 'sequence')}"


def _optimizer(plan: Plan) -> str:
    number, epochs = plan.optimizer_steps_per_batch * plan.epochs_per_batch, plan.epochs_per_batch
    each = count(plan.sequences_per_optimizer_step, "sequence")
    text = f"{count(number, 'optimizer step')} of {each} per step"
    text += f", in {epochs} epochs" if epochs > 1 else ""
    if number == 1 or plan.job is Job.SFT:
        return text
    return f"{text} ({'step 2 is' if number == 2 else f'steps 2-{number} are'} off-policy)"


def _run(plan: Plan) -> str:
    text = f"{count(plan.steps, 'step')} = {count(plan.optimizer_steps, 'optimizer step')}"
    if plan.steps_per_epoch is not None:
        text += (
            f"; {plan.steps_per_epoch:.3g} steps per epoch, "
            f"{plan.steps / plan.steps_per_epoch:.3g} epochs"
        )
    return text
