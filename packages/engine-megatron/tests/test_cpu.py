"""What stands in for CUDA: known by name, made for known versions of Megatron-Core, and gone afterwards."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from coupler.errors import CouplerError
from coupler.interfaces import Model, Rank
from coupler_engine_megatron import cpu
from coupler_engine_megatron.config import MegatronConfig
from coupler_engine_megatron.engine import MegatronEngine

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is replaced beside a GPU")
OF_TORCH = {"torch.cuda", "torch.cuda.random", "torch.cuda.nvtx", "Tensor", "Module"}
OF_MEGATRON = {
    "megatron.core.tensor_parallel.mappings",
    "megatron.core.tensor_parallel.random",  # its logger
    "megatron.core.transformer.moe.moe_utils",
    "megatron.core.transformer.moe.token_dispatcher",
    "megatron.core.transformer.multi_latent_attention",
}
ABSENT = object()


def places() -> Iterator[tuple[str, Any, str]]:
    """What is replaced: the owner's name, the owner, and which attribute."""
    for owner, attribute, _ in cpu._replacements():
        yield getattr(owner, "__name__", "") or owner.name, owner, attribute


def values(found: list[tuple[str, Any, str]]) -> list[Any]:
    return [owner.__dict__.get(attribute, ABSENT) for _, owner, attribute in found]


def test_it_is_known_what_is_replaced() -> None:
    """In these places only, and what is not there is what Transformer Engine would have brought."""
    found = list(places())
    assert {name for name, _, _ in found} == OF_TORCH | OF_MEGATRON
    absent = {attribute for name, owner, attribute in found if name in OF_MEGATRON and not hasattr(owner, attribute)}
    assert absent <= {"te_general_gemm", "TELinear"}


@pytest.mark.parametrize("failing", [False, True])
def test_everything_is_put_back(failing: bool) -> None:
    """After the last of several calls, in whatever thread, and after one that failed."""
    found = list(places())
    before, entered, go = values(found), threading.Event(), threading.Event()

    def beside() -> None:
        with cpu.cuda_as_cpu():
            entered.set()
            go.wait(30)

    other = threading.Thread(target=beside)
    other.start()
    assert entered.wait(30)
    with suppress(ZeroDivisionError), cpu.cuda_as_cpu(), cpu.cuda_as_cpu():
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        if failing:
            raise ZeroDivisionError
    during = values(found)
    assert all(now is not original for now, original in zip(during, before, strict=True)), "the other thread is inside"
    go.set()
    other.join()
    after = values(found)
    assert all(now is original for now, original in zip(after, before, strict=True))
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(2, device="cuda")


@pytest.mark.parametrize("version", ["0.15.3", "0.17.0", "0.160.0", "1.0"])
def test_another_megatron_is_refused_before_anything_is_replaced(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "version", lambda _: version)
    monkeypatch.setattr(cpu._Replaced, "enter", lambda _: pytest.fail("something was replaced"))
    with pytest.raises(CouplerError, match=rf"runs megatron-core 0\.16 without a GPU, not {version}"):
        MegatronEngine(MegatronConfig(), Model(str(tmp_path))).setup(Rank())


def test_this_megatron_is_known() -> None:
    cpu.check_version()
