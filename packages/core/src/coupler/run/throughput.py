"""Count the arithmetic of training, and say how much of the GPUs it uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from coupler.batch import Batch
from coupler.config.schema import RunConfig
from coupler.errors import CouplerError
from coupler.executors.placement import make_shares
from coupler.metrics import Metric, Metrics
from coupler.run.plan import Plan
from coupler.system.files import read_json
from coupler.system.gpu import device_name

GATED = frozenset(
    {"llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "olmo2", "smollm3"}
)
"""Values of ``model_type`` whose layers are attention and a gated MLP."""

PEAKS = {
    "B200": 2250e12,
    "H200": 989.4e12,
    "H100 PCIe": 756e12,
    "H100": 989.4e12,
    "L40S": 362e12,
    "A100": 312e12,
}
"""Dense bf16 operations a second of NVIDIA's datasheets, by a part of the name."""

BACKWARD = 2  # in units of the forward pass, where all parameters are trained


@dataclass
class Throughput:
    """Measures the training of one step.

    Attributes:
        shape: the policy's config.json.
        num_devices: devices of the run.
        passes: how often a step trains each row.
        peak: operations a second of one device, 0 where that is not known.
    """

    shape: Mapping[str, Any]
    num_devices: int
    passes: int
    peak: float = 0.0
    flops: float = 0.0

    @classmethod
    def of_run(cls, config: RunConfig, plan: Plan, folder: Path) -> Throughput:
        """Take what the plan of a run and the folder of its policy say."""
        try:
            shape = read_json(folder / "config.json")
        except CouplerError:
            shape = {}

        shares = make_shares(plan.workers, plan.placement) if plan.placement else []
        num_devices = sum(share.num_bundles for share in shares) or plan.num_shards
        return cls(shape, num_devices, config.epochs_per_batch, peak_of(device_name()))

    def saw(self, batch: Batch) -> Batch:
        """Count the batch of a step, and return it."""
        self.flops = (1 + BACKWARD) * self.passes * forward_flops(self.shape, batch.lengths)
        return batch

    def metrics(self, measured: Metrics) -> Metrics:
        """Return tokens a second and device, and what is known of the arithmetic.

        Args:
            measured: the metrics of the step, with its times.
        """
        if "time/tokens_per_second" not in measured:
            return {}
        rate = measured["time/tokens_per_second"].value / self.num_devices
        found = {"time/tokens_per_second_per_gpu": Metric(rate)}

        if self.flops and (seconds := measured["time/train"].value):
            done = self.flops / seconds / self.num_devices
            found["time/train_tflops_per_gpu"] = Metric(done / 1e12)
            if self.peak:
                found["time/train_mfu"] = Metric(done / self.peak)
        return found


def forward_flops(shape: Mapping[str, Any], lengths: np.ndarray) -> float:
    """Count the operations of a forward pass over whole sequences of these lengths.

    Two for each weight that a token meets, the head's included, and four for each
    number of a head and each pair of tokens that sees each other, which are half of all
    pairs (appendix B of arXiv 2204.02311, there without the half). It is 0 for models
    of other families than :data:`GATED`.

    Args:
        shape: the content of config.json.
        lengths: tokens of each sequence [B].
    """
    if shape.get("model_type") not in GATED:
        return 0.0
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    kv_heads = shape.get("num_key_value_heads") or heads
    size = shape.get("head_dim") or hidden // heads
    attention = 2 * hidden * size * (heads + kv_heads)

    dense = 3 * hidden * shape["intermediate_size"]
    layers, sparse = shape["num_hidden_layers"], _sparse_layers(shape)
    weights = layers * attention + (layers - sparse) * dense + sparse * _of_experts(shape, dense)
    weights += hidden * shape["vocab_size"]

    tokens, pairs = float(lengths.sum()), float((lengths.astype(np.float64) ** 2).sum()) / 2
    return 2 * weights * tokens + 4 * layers * heads * size * pairs


def _sparse_layers(shape: Mapping[str, Any]) -> int:
    """Return how many layers have experts."""
    if not shape.get("num_experts_per_tok"):
        return 0
    every, dense = shape.get("decoder_sparse_step") or 1, shape.get("mlp_only_layers") or ()
    layers = range(shape["num_hidden_layers"])
    return sum((i + 1) % every == 0 and i not in dense for i in layers)


def _of_experts(shape: Mapping[str, Any], dense: int) -> int:
    """Return the weights that a token meets in a layer with experts."""
    if not shape.get("num_experts_per_tok"):
        return dense
    hidden = shape["hidden_size"]

    each = 3 * hidden * (shape.get("moe_intermediate_size") or shape["intermediate_size"])
    router = hidden * (shape.get("num_experts") or shape.get("num_local_experts") or 0)
    shared = 3 * hidden * (shape.get("shared_expert_intermediate_size") or 0)
    return shape["num_experts_per_tok"] * each + router + shared


def peak_of(name: str) -> float:
    """Return the peak of a GPU by its name, 0 for one that is not in the table."""
    return next((peak for part, peak in PEAKS.items() if part in name), 0.0)
