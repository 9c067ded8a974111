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
from coupler_rollout_sglang.worker.distribution import kept, sample, sample_on_cpu


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
            sampled = _sampled(logprobs, info.sampling_seed, positions)
            tokens = torch.where(info.top_ks == 1, tokens, sampled)

        if return_logprob:
            self.output_logprob_processor.compute_logprobs(
                logprobs, top_logprobs_nums, token_ids_logprobs, tokens
            ).write_output_to(logits_output)
        self._sync_token_ids_across_tp(tokens, info)
        logits_output.customized_info = {messages.VERSION_KEY: [state.version] * len(tokens)}
        return tokens.to(torch.int32)


def _sampled(
    logprobs: torch.Tensor, seeds: torch.Tensor | None, positions: torch.Tensor
) -> torch.Tensor:
    if seeds is None:
        return sample(logprobs)
    if logprobs.is_cuda:
        return multinomial_with_seed(logprobs, seeds, positions).view(-1)
    return sample_on_cpu(logprobs, seeds, positions)
