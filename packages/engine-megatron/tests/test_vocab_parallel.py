"""Log-probs, entropy and sums of squares over a shared vocabulary, against the formula
in float64.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import Arrays, on_ranks

from coupler.engine_kit.process_group import join
from coupler.interfaces import Rank
from coupler.testing.memory import peak_bytes
from coupler_engine_megatron.vocab_parallel import token_logprobs

ROWS, HIDDEN, VOCAB = 37, 24, 300


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Hidden states, weight, targets, temperatures, and slopes of log-probs, entropy
    and sums of squares.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    targets = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    temperature = torch.rand(ROWS, generator=generator) + 0.5
    hidden, weight = normal(ROWS, HIDDEN).to(dtype), (normal(VOCAB, HIDDEN) * 0.5).to(dtype)
    return hidden, weight, targets, temperature, normal(ROWS), normal(ROWS), normal(ROWS)


def kept_ids(targets: torch.Tensor) -> torch.Tensor:
    """1 to 9 ids of each row, the target's among them, or none at all."""
    generator = torch.Generator().manual_seed(1)
    kept = torch.stack([torch.randperm(VOCAB, generator=generator)[:9] for _ in targets])
    kept[torch.arange(9) >= torch.randint(1, 10, (ROWS, 1), generator=generator)] = -1
    kept[:, 0] = targets
    kept[::7] = -1
    return kept


def expected(masked: bool) -> Arrays:
    hidden, weight, targets, temperature, *slopes = inputs()
    hidden, weight = (x.double().requires_grad_() for x in (hidden, weight))
    logits = hidden @ weight.T / temperature.double()[:, None]
    if masked:
        kept = kept_ids(targets)
        left = (kept[:, :, None] == torch.arange(VOCAB)).any(1)
        logits = logits.where(left | (kept < 0).all(1, keepdim=True), -1e30)
    log_p = logits.log_softmax(-1)
    logprobs = log_p.gather(1, targets[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    outputs = {"logprobs": logprobs, "entropy": entropy, "squares": log_p.exp().square().sum(-1)}
    sum(
        output @ slope.double() for output, slope in zip(outputs.values(), slopes, strict=True)
    ).backward()
    found = {**outputs, "hidden": hidden.grad, "weight": weight.grad}
    return {name: tensor.detach().numpy() for name, tensor in found.items() if tensor is not None}


def computed(rank: Rank, tile: int = 0, width: int = VOCAB, masked: bool = False) -> Arrays:
    """What one rank gets, with ``width`` rows of the weight each; the gradient of
    ``hidden`` is summed over ranks.
    """
    join(rank, torch.device("cpu"))
    hidden, weight, targets, temperature, *slopes = inputs()
    first = rank.index * width
    hidden, part = hidden.requires_grad_(), weight[first : first + width].clone().requires_grad_()
    group = dist.group.WORLD
    assert group is not None
    kept = kept_ids(targets) if masked else None
    done = token_logprobs(hidden, part, targets, first, group, temperature, True, True, tile, kept)
    outputs = dict(zip(("logprobs", "entropy", "squares"), done, strict=True))
    torch.stack(
        [output @ slope for output, slope in zip(outputs.values(), slopes, strict=True)]
    ).sum().backward()
    assert hidden.grad is not None and part.grad is not None
    dist.all_reduce(hidden.grad)
    found = {**outputs, "hidden": hidden.grad, "weight": part.grad}
    return {name: tensor.detach().numpy() for name, tensor in found.items()}


def assert_close(got: Arrays, want: Arrays) -> None:
    for name, true in want.items():
        assert np.abs(got[name] - true).max() <= 5e-6 * np.abs(true).max(), name


@pytest.mark.parametrize(
    "tile", [0, ROWS * 128, ROWS * 256], ids=["whole", "three-tiles", "two-tiles"]
)
@pytest.mark.parametrize("masked", [False, True])
def test_one_rank_equals_the_formula(tile: int, masked: bool) -> None:
    assert_close(computed(Rank(), tile, masked=masked), expected(masked))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("width", [150, 200], ids=["even", "uneven"])
def test_two_ranks_equal_the_formula(tmp_path: Path, width: int, masked: bool) -> None:
    """Each has a part of the vocabulary; results are the same on both, and the weight's
    gradient is in its parts.
    """
    settings = {"tile": ROWS * 128, "width": width, "masked": masked}
    one, two = on_ranks("test_vocab_parallel:computed", 2, tmp_path, **settings)
    for name in ("logprobs", "entropy", "squares", "hidden"):
        np.testing.assert_array_equal(one[name], two[name])
    assert_close(
        {**one, "weight": np.concatenate([one["weight"], two["weight"]])}, expected(masked)
    )


def test_only_what_is_asked_for() -> None:
    join(Rank(), torch.device("cpu"))
    hidden, weight, targets, *_ = inputs()
    group = dist.group.WORLD
    assert group is not None
    logprobs, entropy, squares = token_logprobs(hidden, weight, targets, 0, group)
    assert entropy is None and squares is None
    want = (hidden.double() @ weight.double().T).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    np.testing.assert_allclose(logprobs.numpy(), want.numpy(), rtol=1e-5)


def test_no_rows_have_no_gradient() -> None:
    join(Rank(), torch.device("cpu"))
    hidden, weight, targets, *_ = inputs()
    weight = weight.requires_grad_()
    group = dist.group.WORLD
    assert group is not None
    logprobs, *_ = token_logprobs(hidden[:0], weight, targets[:0], 0, group)
    logprobs.sum().backward()
    assert logprobs.shape == (0,)
    assert weight.grad is not None and not weight.grad.any()


def test_a_weight_that_does_not_train_has_no_gradient() -> None:
    """As under an adapter: it takes no memory, and the states' gradient is the same."""
    join(Rank(), torch.device("cpu"))
    group = dist.group.WORLD
    assert group is not None
    peaks, grads = [], []
    for trains in (True, False):
        hidden, weight, targets, *_ = inputs()
        logprobs, *_ = token_logprobs(
            hidden.requires_grad_(), weight.requires_grad_(trains), targets, 0, group
        )
        peaks.append(peak_bytes(logprobs.sum().backward))
        grads.append(hidden.grad)
    assert torch.equal(*grads) and grads[0].any()
    assert peaks[0] - peaks[1] >= weight.nbytes
