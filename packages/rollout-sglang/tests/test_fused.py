"""The kernel that samples on a GPU. Elsewhere Triton's interpreter runs it, which has
to be chosen before Triton is imported: in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETER = "TRITON_INTERPRET"
RUNS = DEVICE == "cuda" or INTERPRETER in os.environ
runs = pytest.mark.skipif(not RUNS, reason="runs in the interpreter's process")
PROBS = torch.tensor([0.4, 0.05, 0.3, 0.2, 0.05], device=DEVICE)
Draw = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(scope="module")
def draw() -> Iterator[Draw]:
    """The kernel with blocks so small that a row has several."""
    from coupler_rollout_sglang.worker import fused

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "BLOCK", 32)
        yield fused.draw


def numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


def flags(*values: bool) -> torch.Tensor:
    return torch.tensor(values, device=DEVICE)


@pytest.mark.skipif(RUNS or not find_spec("triton"), reason="they run here, or Triton is missing")
@pytest.mark.slow
def test_the_interpreter_runs_the_tests_below() -> None:
    command = [sys.executable, "-m", "pytest", "-rN", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(
        command, env={**os.environ, INTERPRETER: "1"}, capture_output=True, text=True, timeout=300
    )
    assert "6 passed" in done.stdout, done.stdout


@runs
def test_samples_follow_the_distribution(draw: Draw) -> None:
    count, temperature = (20_000 if DEVICE == "cuda" else 400), 0.5
    rows = (PROBS.log() * temperature + 3).repeat(count, 1)
    each = torch.arange(count, device=DEVICE)
    greedy = torch.zeros(count, dtype=torch.bool, device=DEVICE)
    temperatures = torch.full((count, 1), temperature, device=DEVICE)
    tokens, logprobs = draw(rows, temperatures, greedy, each, each)

    shares = torch.bincount(tokens.long(), minlength=5) / count
    assert (shares - PROBS).abs().max() < 4.5 * 0.5 / count**0.5
    assert (logprobs - PROBS.log()[tokens.long()]).abs().max() < 1e-5


@runs
def test_logprobs_and_greedy_rows_are_those_of_the_softmax(draw: Draw) -> None:
    logits = 3 * torch.randn(6, 301, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    # of a wider tensor, in bf16
    logits = torch.cat([logits, logits], -1).bfloat16()[:, :301]
    temperatures = torch.tensor([1.0, 1.0, 1.0, 0.5, 1.0, 2.0], device=DEVICE)
    greedy = flags(True, True, True, False, False, False)
    tokens, logprobs = draw(logits, temperatures, greedy, numbers(*range(6)), numbers(*[9] * 6))

    want = (logits.float() / temperatures[:, None]).log_softmax(-1)
    assert tokens[:3].tolist() == want[:3].argmax(-1).tolist()
    assert torch.allclose(logprobs, want.gather(-1, tokens[:, None].long())[:, 0], atol=1e-5)


@runs
def test_a_row_does_not_depend_on_its_neighbours(draw: Draw) -> None:
    logits = torch.randn(8, 100, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    rest = torch.ones(8, device=DEVICE), flags(*[False] * 8), numbers(*range(8)), numbers(*range(8))
    together, _ = draw(logits, *rest)
    alone = [draw(logits[i : i + 1], *(each[i : i + 1] for each in rest))[0] for i in range(8)]
    assert together.tolist() == torch.cat(alone).tolist()


@runs
def test_every_bit_of_a_seed_and_a_position_counts(draw: Draw) -> None:
    """64 rows of 1,024 equal logits seldom have a token twice."""
    seeds = numbers(0, *(1 << bit for bit in range(63)))
    for given in ((seeds, numbers(*[5] * 64)), (numbers(*[5] * 64), numbers(*range(64)))):
        rows = torch.zeros(64, 1024, device=DEVICE)
        tokens, _ = draw(rows, torch.ones(64, device=DEVICE), flags(*[False] * 64), *given)
        assert len(set(tokens.tolist())) > 50


@runs
def test_a_token_that_was_cut_off_is_never_sampled(draw: Draw) -> None:
    logits = torch.full((64, 500), -torch.inf, device=DEVICE)
    logits[:, 432] = 0.0
    given = torch.ones(64, device=DEVICE), flags(*[False] * 64), numbers(*range(64))
    tokens, logprobs = draw(logits, *given, numbers(*range(64)))
    assert set(tokens.tolist()) == {432} and not logprobs.any()


@runs
def test_a_logit_that_is_no_number_gives_no_logprob(draw: Draw) -> None:
    logits = torch.zeros(2, 50, device=DEVICE)
    logits[1, 7] = torch.nan
    given = torch.ones(2, device=DEVICE), flags(False, True), numbers(1, 2), numbers(1, 2)
    tokens, logprobs = draw(logits, *given)
    assert logprobs.isnan().tolist() == [False, True] and 0 <= tokens[1] < 50
