"""Sample tokens in a model worker, with the log-probs of the distribution they are of.

SGLang's own sampler returns log-probs from before ``top_p``, has no seeds on the CPU
and cannot say which weights a token was sampled with. In release 0.5.17 one number in
2**32 of its seeded noise is infinite, so that one token in 28,000 of a vocabulary of
150,000 is any token.
"""
# pyright: reportMissingImports=false
# The environment that is type-checked has no SGLang: its torch may be another.

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.sampler import Sampler
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
        info, temperatures = sampling_info, sampling_info.temperatures
        found: dict[str, Any] = {messages.VERSION_KEY: [state.version] * len(logits)}
        has_top_k = info.need_top_k_sampling and not info.is_all_greedy
        greedy = info.top_ks == 1

        if info.need_top_p_sampling or has_top_k:
            # The log-prob of a greedy row is among all tokens.
            top_ks = info.top_ks.masked_fill(greedy, TOP_K_ALL)
            logits, ids = kept(
                _logprobs(logits, temperatures),
                top_ks,
                info.top_ps,
            )
            temperatures = torch.ones_like(temperatures)
            if has_top_k:
                found[messages.MASK_KEY] = _masks(ids, top_ks.tolist())

        tokens, logprobs = _draw(
            logits,
            temperatures,
            greedy,
            info.sampling_seed,
            positions,
        )
        if return_logprob:
            logits_output.next_token_logprobs = logprobs
            if any(top_logprobs_nums) or any(token_ids_logprobs):
                self.output_logprob_processor.compute_logprobs(
                    _logprobs(logits, temperatures),
                    top_logprobs_nums,
                    token_ids_logprobs,
                    tokens,
                ).write_output_to(logits_output)
        self._sync_token_ids_across_tp(tokens, info)
        logits_output.customized_info = found
        return tokens


def _logprobs(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits.float() / temperatures, dim=-1)


def _masks(ids: torch.Tensor, top_ks: list[int]) -> list[list[int]]:
    """Return the ids that are left of each row, filled up to its ``top_k`` with -1.

    A row without ``top_k`` gets none.
    """
    widths = [0 if top_k == TOP_K_ALL else top_k for top_k in top_ks]
    widest = max(widths)
    rows = ids[:, :widest].tolist()
    return [row[:width] for row, width in zip(rows, widths, strict=True)]


def _draw(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    greedy: torch.Tensor,
    seeds: torch.Tensor | None,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a token of each row, int32, and its log-prob."""
    if logits.is_cuda:
        # It needs Triton, which may be missing on the CPU.
        from coupler_rollout_sglang.worker.fused import draw

        if seeds is None:
            seeds = torch.randint(
                1 << 62,
                positions.shape,
                device=logits.device,
            )
        return draw(
            logits,
            temperatures,
            greedy,
            seeds,
            positions,
        )

    logprobs = _logprobs(logits, temperatures)
    sampled = sample(logprobs) if seeds is None else sample_on_cpu(logprobs, seeds, positions)
    tokens = torch.where(greedy, logprobs.argmax(-1), sampled)
    return tokens.to(torch.int32), logprobs.gather(-1, tokens[:, None])[:, 0]
