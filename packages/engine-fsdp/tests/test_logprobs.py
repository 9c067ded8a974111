from __future__ import annotations

import pytest
import torch

from coupler.engine_kit.sampling_mask import CUT
from coupler.testing.memory import peak_bytes
from coupler_engine_fsdp.logprobs import token_logprobs, top_ids

R, H, V = 29, 16, 1003
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def on_device():
    with torch.device(DEVICE):
        yield


def of_targets(*given, **more):
    """Return what needs no other ids."""
    return token_logprobs(*given, **more)[:3]


def naive(hidden, weight, bias, targets, temperature, entropy, kept=None, squares=False):
    logits = torch.nn.functional.linear(hidden, weight, bias)
    if kept is not None:
        left = (kept[:, :, None] == torch.arange(V)).any(1) | (kept < 0).all(1, keepdim=True)
        logits = logits.where(left, -1e30)
    log_p = (logits if temperature is None else logits / temperature[:, None]).log_softmax(-1)
    p = log_p.exp()
    return (
        log_p.gather(1, targets[:, None]).squeeze(1),
        -(p * log_p).sum(-1) if entropy else None,
        p.square().sum(-1) if squares else None,
    )


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
@pytest.mark.parametrize(
    ("entropy", "squares"), [(False, False), (True, False), (False, True), (True, True)]
)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_values_and_gradients_equal_those_of_the_full_logits(
    chunk, entropy, squares, scaled, with_bias, masked
) -> None:
    hidden, weight, bias, targets = inputs(with_bias)
    temperature = torch.rand(R) + 0.5 if scaled else None
    kept = kept_ids(targets) if masked else None
    leaves = [leaf for leaf in (hidden, weight, bias) if leaf is not None]
    slopes = torch.randn(3, R)

    def run(function, *arguments):
        found = function(*arguments)
        outputs = zip(found, slopes, strict=True)
        total = sum((out * slope).sum() for out, slope in outputs if out is not None)
        return *found, torch.autograd.grad(total, leaves)

    double = [
        x.double() if x is not None and x.is_floating_point() else x for x in (hidden, weight, bias)
    ]
    exact = None if temperature is None else temperature.double()
    true = run(naive, *double, targets, exact, entropy, kept, squares)
    ours = run(
        of_targets, hidden, weight, bias, targets, temperature, entropy, chunk, kept, squares
    )

    assert [out is None for out in ours] == [False, not entropy, not squares, False]
    for mine, other, limit in zip(ours[:3], true[:3], (1e-5, 1e-5, 1e-7), strict=True):
        if mine is not None:
            torch.testing.assert_close(mine.double(), other, atol=limit, rtol=1e-5)
    for mine, other in zip(ours[3], true[3], strict=True):
        assert (mine - other).abs().max() <= 1e-5 * other.abs().max()


@pytest.mark.parametrize("masked", [False, True])
def test_a_row_that_is_not_finite_reaches_no_other_row(masked) -> None:
    hidden, weight, bias, targets = inputs(True)
    kept = kept_ids(targets) if masked else None
    clean = of_targets(hidden, weight, bias, targets, None, True, 1, kept, True)
    with torch.no_grad():
        hidden[3] = torch.nan
    dirty = of_targets(hidden, weight, bias, targets, None, True, 1, kept, True)
    keep = torch.arange(R) != 3
    for mine, other in zip(dirty, clean, strict=True):
        assert mine[3].isnan()
        assert torch.equal(mine[keep], other[keep])


def test_no_rows_give_a_gradient_of_zero() -> None:
    _, weight, _, _ = inputs(False)
    hidden = torch.zeros(0, H, requires_grad=True)
    nobody = torch.zeros(0, dtype=torch.int64)
    found = of_targets(hidden, weight, None, nobody, None, True, want_squares=True)
    sum(out.sum() for out in found).backward()
    assert hidden.grad.shape == (0, H) and not weight.grad.any()


def test_only_a_tile_of_the_logits_is_kept() -> None:
    """Saved for the backward pass: inputs and a few numbers per row."""
    hidden, weight, bias, targets = inputs(True)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        of_targets(hidden, weight, bias, targets, torch.ones(R), True, want_squares=True)
    own = sum(
        x.numel()
        for x in saved
        if x.data_ptr() not in {y.data_ptr() for y in (hidden, weight, bias)}
    )
    assert own <= 6 * R


def test_a_weight_that_does_not_train_has_no_gradient() -> None:
    """As under an adapter: it takes no memory, and the states' gradient is the same."""
    peaks, grads = [], []
    for trains in (True, False):
        hidden, weight, _, targets = inputs(False)
        out, *_ = of_targets(hidden, weight.requires_grad_(trains), None, targets, None, False)
        peaks.append(peak_bytes(out.sum().backward))
        grads.append(hidden.grad)
    assert torch.equal(*grads) and grads[0].any()
    assert peaks[0] - peaks[1] >= weight.nbytes


def test_bf16_is_computed_in_fp32() -> None:
    hidden, weight, _, targets = (x.detach() if x is not None else None for x in inputs(False))
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    got, entropy, squares = of_targets(hidden, weight, None, targets, None, True, want_squares=True)
    want, _, _ = naive(hidden.double(), weight.double(), None, targets, None, False)
    assert got.dtype == entropy.dtype == squares.dtype == torch.float32
    assert (got - want).abs().max() < (
        0.05 if DEVICE == "cpu" else 1e-4
    )  # a CPU rounds products to bf16


@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0])
def test_sums_of_squares_are_those_of_a_softmax_in_float64(scale) -> None:
    """From an even distribution, whose sum is 1 / V, to one with a probability of 1."""
    hidden, weight, _, targets = (x.detach() if x is not None else None for x in inputs(False))
    _, _, found = of_targets(
        scale * hidden, weight, None, targets, None, False, 1, want_squares=True
    )
    want = (scale * hidden.double() @ weight.double().t()).softmax(-1).square().sum(-1)
    torch.testing.assert_close(found.double(), want, rtol=2e-5, atol=0)
    if not scale:
        torch.testing.assert_close(found, torch.full((R,), 1 / V), rtol=1e-6, atol=0)
    assert found.max() <= 1 + 1e-6


def some_ids(targets):
    """Twelve different ids of each row. The target is one of them in some rows, and the
    last ones of every third row are none.
    """
    ids = torch.stack([torch.randperm(V)[:12] for _ in range(R)])
    at_target = (ids == targets[:, None]).any(1)
    ids[::2, 5] = torch.where(at_target, ids[:, 5], targets)[::2]
    ids[::3, 9:] = -1
    return ids


@pytest.mark.parametrize("chunk", [1, 3 * R * 128, 2**21])
@pytest.mark.parametrize(("entropy", "squares"), [(False, False), (True, True)])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_logprobs_of_ids_and_their_gradient_equal_those_of_the_full_logits(
    chunk, entropy, squares, scaled, with_bias, masked
) -> None:
    hidden, weight, bias, targets = inputs(with_bias)
    ids = some_ids(targets)
    temperature = torch.rand(R) + 0.5 if scaled else None
    kept = torch.cat([kept_ids(targets), ids, targets[:, None]], 1) if masked else None
    leaves = [leaf for leaf in (hidden, weight, bias) if leaf is not None]
    slopes, each = torch.randn(3, R), torch.randn(R, 12)

    double = [
        x.double().detach().requires_grad_() if x is not None else x for x in (hidden, weight, bias)
    ]
    logits = torch.nn.functional.linear(*double)
    if kept is not None:
        left = (kept[:, :, None] == torch.arange(V)).any(1)
        logits = logits.where(left, -1e30)
    log_p = (logits if temperature is None else logits / temperature.double()[:, None]).log_softmax(
        -1
    )
    p = log_p.exp()
    want = [
        log_p.gather(1, targets[:, None]).squeeze(1),
        -(p * log_p).sum(-1),
        p.square().sum(-1),
        log_p.gather(1, ids.clamp(min=0)).where(ids >= 0, CUT),
    ]
    given = (hidden, weight, bias, targets, temperature, entropy, chunk, kept, squares)
    got = token_logprobs(*given, ids)
    assert (got[3][ids < 0] == CUT).all()

    def total(found):
        outs = zip(found[:3], slopes, (True, entropy, squares), strict=True)
        return sum((out * s).sum() for out, s, used in outs if used) + (found[3] * each).sum()

    for out, true, used in zip(got, want, (True, entropy, squares, True), strict=True):
        assert (out is not None) == used
        if used:
            torch.testing.assert_close(out.double(), true, atol=2e-5, rtol=1e-5)
    grads = torch.autograd.grad(total(got), leaves)
    exact = torch.autograd.grad(total(want), [x for x in double if x is not None])
    for grad, true in zip(grads, exact, strict=True):
        off = (grad.double() - true).abs().max() / true.abs().max()
        assert off < 1e-5


@pytest.mark.parametrize("chunk", [1, 2**21])
@pytest.mark.parametrize("masked", [False, True])
def test_the_most_likely_ids_are_those_of_the_full_logits(chunk, masked) -> None:
    hidden, weight, bias, targets = inputs(True)
    kept = kept_ids(targets) if masked else None
    found = top_ids(hidden, weight, bias, 40, chunk, kept)
    log_p = naive_logits(hidden, weight, bias, kept)
    values, want = log_p.topk(40, 1)
    likely = values > -1e20
    assert (found == want)[likely].all() and likely[:, 0].all()
    assert [len(row.unique()) for row in found] == [40] * R


def naive_logits(hidden, weight, bias, kept):
    logits = torch.nn.functional.linear(hidden, weight, bias)
    if kept is None:
        return logits
    left = (kept[:, :, None] == torch.arange(V)).any(1) | (kept < 0).all(1, keepdim=True)
    return logits.where(left, -1e30)


def test_more_ids_than_there_are_end_in_none() -> None:
    hidden, weight, bias, _ = inputs(False)
    found = top_ids(hidden, weight[:5], bias, 8)
    assert (found[:, 5:] == -1).all()
    assert (found[:, :5].sort(1).values == torch.arange(5)).all()


def test_probabilities_of_all_ids_add_up_to_1_in_bf16() -> None:
    """The terms of a row's gradient cancel, which bf16 would not let them."""
    hidden, weight, bias, targets = inputs(False)
    hidden, weight = (x.detach().bfloat16().requires_grad_() for x in (hidden, weight[:64]))
    targets = targets % 64
    ids = torch.arange(64).expand(R, 64)
    found = token_logprobs(hidden, weight, bias, targets, ids=ids)[3]
    assert (found.exp().sum(1) - 1).abs().max() < 1e-5
    found.exp().sum().backward()
    assert hidden.grad.abs().max() < 1e-4
