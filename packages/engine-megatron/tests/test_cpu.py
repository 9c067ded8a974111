"""What stands in for CUDA: known by name, made for known versions of Megatron-Core, and
gone afterwards.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from coupler.config.schema import RunConfig
from coupler.errors import CouplerError
from coupler.interfaces import EngineConfig, Model, Rank
from coupler.plugins.finding import Finding
from coupler_engine_megatron import cpu
from coupler_engine_megatron.config import MegatronConfig
from coupler_engine_megatron.engine import MegatronEngine
from coupler_engine_megatron.plugin import coupler_doctor

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="nothing is replaced beside a GPU"
)
OF_TORCH = {"torch.cuda", "torch.cuda.random", "torch.cuda.nvtx", "Tensor", "Module"}
OF_MEGATRON = {
    "megatron.core.tensor_parallel.mappings",
    "megatron.core.tensor_parallel.random",  # its logger
    "megatron.core.transformer.moe.moe_utils",
    "megatron.core.transformer.moe.token_dispatcher",
    "megatron.core.transformer.multi_latent_attention",
}
ABSENT = object()
PLACES = [*cpu._replacements()] if not torch.cuda.is_available() else []


def values() -> list[Any]:
    return [owner.__dict__.get(attribute, ABSENT) for owner, attribute, _ in PLACES]


def test_it_is_known_what_is_replaced() -> None:
    """In these places only, and what is not there is what Transformer Engine would have
    brought.
    """
    assert cpu.replaced().keys() == OF_TORCH | OF_MEGATRON
    absent = {attribute for owner, attribute, _ in PLACES if not hasattr(owner, attribute)}
    assert absent <= {"te_general_gemm", "TELinear"}


def test_the_doctor_lists_it_for_a_run_of_this_engine_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def report(engine: EngineConfig) -> list[Finding]:
        return list(coupler_doctor(RunConfig(engine=engine)))

    lines = {finding.text for finding in report(MegatronConfig())}
    assert len(lines) == len(OF_TORCH | OF_MEGATRON)
    assert "on the CPU torch.cuda.nvtx has stand-ins for range_push, range_pop, mark" in lines
    assert report(EngineConfig()) == list(coupler_doctor(None)) == []
    monkeypatch.setattr(cpu, "version", lambda _: "0.17.0")
    (finding,) = report(MegatronConfig())
    assert (finding.verdict, finding.fix) == (
        "problem",
        "pip install 'megatron-core==0.16.*', or a GPU",
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert report(MegatronConfig()) == []


@pytest.mark.parametrize("failing", [False, True])
def test_everything_is_put_back(failing: bool) -> None:
    """After the last of several calls, in whatever thread, and after one that
    failed.
    """
    before, entered, go = values(), threading.Event(), threading.Event()

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
    during = values()
    assert all(now is not original for now, original in zip(during, before, strict=True)), (
        "the other thread is inside"
    )
    go.set()
    other.join()
    after = values()
    assert all(now is original for now, original in zip(after, before, strict=True))
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(2, device="cuda")


@pytest.mark.parametrize("version", ["0.15.3", "0.17.0", "0.160.0", "1.0"])
def test_another_megatron_is_refused_before_anything_is_replaced(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "version", lambda _: version)
    monkeypatch.setattr(cpu._Replaced, "enter", lambda _: pytest.fail("something was replaced"))
    with pytest.raises(
        CouplerError, match=rf"runs megatron-core 0\.16 without a GPU, not {version}"
    ):
        MegatronEngine(MegatronConfig(), Model(str(tmp_path))).setup(Rank())


def test_this_megatron_is_known() -> None:
    cpu.check_version()
