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
from sglang.srt.sampling.sampling_params import TOP_K_ALL

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
        versions = [state.version] * len(logprobs)
        found: dict[str, Any] = {messages.VERSION_KEY: versions}
        has_top_k = info.need_top_k_sampling and not info.is_all_greedy

        if info.need_top_p_sampling or has_top_k:
            # The log-prob of a greedy row is among all tokens.
            greedy = info.top_ks == 1
            top_ks = info.top_ks.masked_fill(greedy, TOP_K_ALL)
            logprobs, ids = kept(logprobs, top_ks, info.top_ps)
            if has_top_k:
                found[messages.MASK_KEY] = _masks(ids, top_ks.tolist())

        tokens = logprobs.argmax(-1)
        if not info.is_all_greedy:
            sampled = _sampled(logprobs, info.sampling_seed, positions)
            tokens = torch.where(info.top_ks == 1, tokens, sampled)

        if return_logprob:
            self.output_logprob_processor.compute_logprobs(
                logprobs, top_logprobs_nums, token_ids_logprobs, tokens
            ).write_output_to(logits_output)
        self._sync_token_ids_across_tp(tokens, info)
        logits_output.customized_info = found
        return tokens.to(torch.int32)


def _masks(ids: torch.Tensor, top_ks: list[int]) -> list[list[int]]:
    """Return the ids that are left of each row, filled up to its ``top_k`` with -1.

    A row without ``top_k`` gets none.
    """
    widths = [0 if top_k == TOP_K_ALL else top_k for top_k in top_ks]
    widest = max(widths)
    rows = ids[:, :widest].tolist()
    return [row[:width] for row, width in zip(rows, widths, strict=True)]


def _sampled(
    logprobs: torch.Tensor, seeds: torch.Tensor | None, positions: torch.Tensor
) -> torch.Tensor:
    if seeds is None:
        return sample(logprobs)
    if logprobs.is_cuda:
        return multinomial_with_seed(logprobs, seeds, positions).view(-1)
    return sample_on_cpu(logprobs, seeds, positions)
