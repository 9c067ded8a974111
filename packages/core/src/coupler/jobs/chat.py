"""Talk to the model of a folder, for ``coupler chat``."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace

from coupler.config.compose import Composed
from coupler.errors import ConfigError, CouplerError
from coupler.executors.placement import ROLLOUT
from coupler.interfaces import Request
from coupler.jobs.build import Builder
from coupler.loop.rollout_group import RolloutGroup
from coupler.plugins.manager import Plugins
from coupler.run.opinion_checks import OWN_WEIGHTS
from coupler.system.seeding import derive
from coupler.worker.replica import RolloutSpec


def chat(composed: Composed, plugins: Plugins, lines: Iterable[str]) -> Iterator[str]:
    """Yield the answer to each line, sampled under ``eval.*``.

    All lines are one conversation, and an empty one starts another. Without a chat
    template, a line is continued as it stands, and forgotten.

    Raises:
        ConfigError: the rollout does not serve the weights of a folder.
        CouplerError: the conversation is longer than ``data.max_prompt_tokens``.
    """
    config = composed.config
    backend = plugins.get("rollout", config.rollout.name)
    if OWN_WEIGHTS not in backend.capabilities_of(config.rollout):
        raise ConfigError(
            f"rollout={config.rollout.name} does not load the weights of a folder.\n"
            f"  try:  --rollout NAME, of those with {OWN_WEIGHTS} in:  coupler plugins"
        )

    builder = Builder(composed, plugins)
    longest = config.data.max_prompt_tokens + builder.eval_request().max_tokens
    longest = min(longest, builder.codec.max_positions or longest)
    model = replace(builder.model, own_weights=True)
    spec = RolloutSpec(backend.target, config.rollout.for_run(longest), model)
    with closing(builder.executor), asyncio.Runner() as runner:
        rollouts = RolloutGroup(builder.executor, spec, builder.ranks(ROLLOUT, 1))
        runner.run(rollouts.setup())

        said: list[dict[str, str]] = []
        for turn, line in enumerate(lines):
            if not line.strip():
                said = []
                continue
            said.append({"role": "user", "content": line})
            done = runner.run(rollouts.generate(_request(builder, said, turn)))
            answer = builder.codec.decode(done.tokens)
            said.append({"role": "assistant", "content": answer})
            yield answer


def _request(builder: Builder, said: list[dict[str, str]], turn: int) -> Request:
    config, codec = builder.config, builder.codec
    prompt = tuple(said) if codec.tokenizer.chat_template else said[-1]["content"]
    ids = codec.prompt_ids(prompt, config.data.system_prompt)
    if len(ids) > config.data.max_prompt_tokens:
        raise CouplerError(
            f"the conversation has {len(ids)} tokens, above data.max_prompt_tokens="
            f"{config.data.max_prompt_tokens}.\n"
            "  try:  an empty line now and then, which starts another, or a larger limit"
        )

    stop = codec.stop_ids(config.sampling.stop)
    seed = derive(config.seed, "chat", turn)
    return replace(builder.eval_request(), prompt=ids, stop=stop, seed=seed)
