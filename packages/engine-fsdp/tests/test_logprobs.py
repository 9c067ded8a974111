from __future__ import annotations

import pytest
import torch

from coupler_engine_fsdp.logprobs import token_logprobs

R, H, V = 29, 16, 1003
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def on_device():
    with torch.device(DEVICE):
        yield


def naive(hidden, weight, bias, targets, temperature, entropy, kept=None):
    logits = torch.nn.functional.linear(hidden, weight, bias)
    if kept is not None:
        left = (kept[:, :, None] == torch.arange(V)).any(1) | (kept < 0).all(1, keepdim=True)
        logits = logits.where(left, -1e30)
    log_p = (logits if temperature is None else logits / temperature[:, None]).log_softmax(-1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(
        -1
    ) if entropy else None


def inputs(with_bias: bool):
    torch.manual_seed(0)
    bias = torch.randn(V, requires_grad=True) if with_bias else None
    hidden, weight = torch.randn(R, H, requires_grad=True), torch.randn(V, H) / 2
    return hidden, weight.requires_grad_(), bias, torch.randint(0, V, (R,))


def kept_ids(targets):
    """1 to 40 ids of each row, the target's at any place among them, or none at all."""
    kept = torch.stack([torch.randperm(V)[:40] for _ in range(R)])
    kept[torch.arange(40) >= torch.randint(1, 41, (R, 1))] = -1
    kept.scatter_(1, torch.randint(0, 40, (R, 1)), targets[:, None])
    kept[3] = kept[17] = -1
    return kept


# the narrowest tiles; wider; one
@pytest.mark.parametrize("chunk", [1, 3 * R * 128, 2**21])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_values_and_gradients_equal_those_of_the_full_logits(
    chunk, entropy, scaled, with_bias, masked
) -> None:
    hidden, weight, bias, targets = inputs(with_bias)
    temperature = torch.rand(R) + 0.5 if scaled else None
    kept = kept_ids(targets) if masked else None
    leaves = [leaf for leaf in (hidden, weight, bias) if leaf is not None]
    slopes = torch.randn(2, R)

    def run(function, *arguments):
        logprobs, values = function(*arguments)
        total = (logprobs * slopes[0]).sum() + ((values * slopes[1]).sum() if entropy else 0)
        return logprobs, values, torch.autograd.grad(total, leaves)

    double = [
        x.double() if x is not None and x.is_floating_point() else x for x in (hidden, weight, bias)
    ]
    exact = None if temperature is None else temperature.double()
    true = run(naive, *double, targets, exact, entropy, kept)
    ours = run(token_logprobs, hidden, weight, bias, targets, temperature, entropy, chunk, kept)
    torch.testing.assert_close(ours[0].double(), true[0], atol=1e-5, rtol=1e-5)
    assert (ours[1] is None) == (not entropy)
    if entropy:
        torch.testing.assert_close(ours[1].double(), true[1], atol=1e-5, rtol=1e-5)
    for mine, other in zip(ours[2], true[2], strict=True):
        assert (mine - other).abs().max() <= 1e-5 * other.abs().max()


@pytest.mark.parametrize("masked", [False, True])
def test_a_row_that_is_not_finite_reaches_no_other_row(masked) -> None:
    hidden, weight, bias, targets = inputs(True)
    kept = kept_ids(targets) if masked else None
    clean, _ = token_logprobs(hidden, weight, bias, targets, None, True, 1, kept)
    with torch.no_grad():
        hidden[3] = torch.nan
    dirty, _ = token_logprobs(hidden, weight, bias, targets, None, True, 1, kept)
    assert dirty[3].isnan()
    keep = torch.arange(R) != 3
    assert torch.equal(dirty[keep], clean[keep])


def test_no_rows_give_a_gradient_of_zero() -> None:
    _, weight, _, _ = inputs(False)
    hidden = torch.zeros(0, H, requires_grad=True)
    logprobs, entropy = token_logprobs(
        hidden, weight, None, torch.zeros(0, dtype=torch.int64), None, True
    )
    (logprobs.sum() + entropy.sum()).backward()
    assert hidden.grad.shape == (0, H) and not weight.grad.any()


def test_only_a_tile_of_the_logits_is_kept() -> None:
    """Saved for the backward pass: inputs and a few numbers per row."""
    hidden, weight, bias, targets = inputs(True)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        token_logprobs(hidden, weight, bias, targets, torch.ones(R), True)
    own = sum(
        x.numel()
        for x in saved
        if x.data_ptr() not in {y.data_ptr() for y in (hidden, weight, bias)}
    )
    assert own <= 5 * R


def test_bf16_is_computed_in_fp32() -> None:
    hidden, weight, _, targets = (x.detach() if x is not None else None for x in inputs(False))
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    got, entropy = token_logprobs(hidden, weight, None, targets, None, True)
    want, _ = naive(hidden.double(), weight.double(), None, targets, None, False)
    assert got.dtype == entropy.dtype == torch.float32
    assert (got - want).abs().max() < (
        0.05 if DEVICE == "cpu" else 1e-4
    )  # a CPU rounds products to bf16
