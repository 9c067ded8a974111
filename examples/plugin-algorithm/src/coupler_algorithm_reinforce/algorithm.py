"""``algorithm=reinforce``: REINFORCE (Williams 1992); the baseline is the mean reward
of the rest of the batch.
"""

import numpy as np
import torch

from coupler import Algorithm, Metric


class Reinforce(Algorithm):
    def advantages(self, batch):
        reward = batch["reward"].astype(np.float64)
        baseline = (reward.sum() - reward) / max(len(reward) - 1, 1)
        advantage = self.config.scale * (reward - baseline)
        return batch.with_tokens(advantages=batch.spread(advantage).astype(np.float32))

    def loss(self, out, batch):
        mask = batch["loss_mask"]
        # what is outside the mask may be NaN
        logprobs = torch.where(mask, out["logprobs"], 0.0)
        losses = -torch.where(mask, batch["advantages"], 0.0) * logprobs
        return losses, {"reinforce/logprob": Metric(logprobs.detach().sum(), mask.sum())}
