"""Learn from a teacher's opinion of each sampled token: on-policy distillation.

``A_t = log p_teacher - log p_policy``, without gradient, is the estimate of the reverse
KL from what the policy sampled, as a reward of the token itself (K. Lu, "On-Policy
Distillation", https://thinkingmachines.ai/blog/on-policy-distillation; MOPD, arXiv
2601.02780). Both log-probs are at the sampling temperature.
"""

from __future__ import annotations

import numpy as np

from coupler.batch import Batch
from coupler_algos.config import Behaviour, PolicyConfig


def without_rewards(batch: Batch) -> Batch:
    """Add ``advantages`` [T] float32 of zeros: rewards are measured alone."""
    return batch.with_tokens(advantages=np.zeros(batch.num_tokens, np.float32))


def taught(config: PolicyConfig, batch: Batch) -> Batch:
    """Return ``advantages`` [T] float32 with those of the teacher.

    They are ``reward_coef * A + teacher_coef * (log p_teacher - log p_policy)``, and 0
    outside ``loss_mask``.
    """
    sampled_by = "old_logprobs"
    if config.behaviour is Behaviour.ROLLOUT:
        sampled_by = "rollout_logprobs"

    # Values outside the mask may be NaN.
    mask = batch["loss_mask"]
    columns = (batch["advantages"], batch["teacher_logprobs"], batch[sampled_by])
    reward, teacher, policy = (np.where(mask, c, 0).astype(np.float64) for c in columns)
    mixed = config.reward_coef * reward + config.teacher_coef * (teacher - policy)
    return batch.with_tokens(advantages=mixed.astype(np.float32))
