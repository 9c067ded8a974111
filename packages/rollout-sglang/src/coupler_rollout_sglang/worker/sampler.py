"""Sample tokens in a model worker, with the log-probs of the distribution they are of.

SGLang's own sampler returns log-probs from before ``top_p``, has no seeds on the CPU
and cannot say which weights a token was sampled with.
"""
# pyright: reportMissingImports=false
# The environment that is type-checked has no SGLang: its torch may be another.

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.sampler import Sampler, multinomial_with_seed

from coupler_rollout_sglang import messages
from coupler_rollout_sglang.worker import state


class CouplerSampler(Sampler):
    """Take the place of SGLang's sampler, which ``sampling_backend`` names."""

    def forward(
        self,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: list[int],
        token_ids_logprobs: list[Any],
        positions: torch.Tensor,
        **_: Any,
    ) -> torch.Tensor:
        """Return one token for each row, and write log-probs and versions to
        ``logits_output``.

        A greedy row has temperature 1 and ``top_k`` 1, as SGLang makes it.
        """
        logits = self._preprocess_logits(logits_output.next_token_logits, sampling_info)
        info = sampling_info
        logprobs = torch.log_softmax(logits.float() / info.temperatures, dim=-1)
        if info.need_top_p_sampling:
            logprobs = kept(logprobs, info.top_ps)

        tokens = logprobs.argmax(-1)
        if not info.is_all_greedy:
            sampled = choose(logprobs, info.sampling_seed, positions)
            tokens = torch.where(info.top_ks == 1, tokens, sampled)

        if return_logprob:
            self.output_logprob_processor.compute_logprobs(
                logprobs, top_logprobs_nums, token_ids_logprobs, tokens
            ).write_output_to(logits_output)
        self._sync_token_ids_across_tp(tokens, info)
        logits_output.customized_info = {messages.VERSION_KEY: [state.version] * len(tokens)}
        return tokens.to(torch.int32)


def kept(logprobs: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    """Leave the fewest tokens of each row that together have ``top_p``, [rows, tokens].

    What is left adds up to 1 again.
    """
    ordered, order = logprobs.sort(dim=-1, descending=True)
    probs = ordered.exp()
    ordered.masked_fill_(probs.cumsum(-1) - probs >= top_ps.view(-1, 1), -torch.inf)
    left = torch.empty_like(logprobs).scatter_(-1, order, ordered)
    whole = top_ps.view(-1, 1) >= 1
    return torch.where(whole, logprobs, torch.log_softmax(left, dim=-1))


def choose(
    logprobs: torch.Tensor, seeds: torch.Tensor | None, positions: torch.Tensor
) -> torch.Tensor:
    """Sample a token of each row, by its seed and position if there are seeds."""
    if seeds is None:
        noise = torch.empty_like(logprobs).exponential_()
        return (logprobs.exp() / noise.clamp_min_(torch.finfo(noise.dtype).tiny)).argmax(-1)
    if logprobs.is_cuda:
        return multinomial_with_seed(logprobs, seeds, positions).view(-1)

    noise = torch.empty_like(logprobs, dtype=torch.float64)
    generator = torch.Generator()
    for row, seed, position in zip(noise, seeds.tolist(), positions.tolist(), strict=True):
        generator.manual_seed(mixed(seed, position))
        row.exponential_(generator=generator)
    return (logprobs.double() - noise.log()).argmax(-1)


def mixed(seed: int, position: int) -> int:
    """Mix a seed and a position into 32 bits, as many as a generator on the CPU takes."""
    found = (seed + 0x9E3779B97F4A7C15 * (position + 1)) % 2**64
    found = (found ^ (found >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    found = (found ^ (found >> 27)) * 0x94D049BB133111EB % 2**64
    return (found ^ (found >> 31)) & 0xFFFFFFFF
