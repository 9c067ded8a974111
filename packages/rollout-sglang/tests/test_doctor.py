"""What ``coupler doctor`` says of an installation of SGLang."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError

import pytest

from coupler.plugins.finding import Finding, Verdict
from coupler_rollout_sglang import doctor
from coupler_rollout_sglang.config import Mode, SGLangConfig

Installed = Callable[..., None]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Installed:
    """Pretend that these distributions and modules are there, and no others."""

    def make(versions: dict[str, str], modules: tuple[str, ...] = ()) -> None:
        def version(name: str) -> str:
            if name not in versions:
                raise PackageNotFoundError(name)
            return versions[name]

        wanted = ["torch==2.11.0", "sglang-kernel==0.4.5", "tqdm", 'cuda-x==1; extra == "x"']
        monkeypatch.setattr(doctor, "version", version)
        monkeypatch.setattr(doctor, "requires", lambda name: wanted)
        monkeypatch.setattr(doctor, "find_spec", lambda name: name in modules or None)
        monkeypatch.setattr(doctor, "gpu_is_visible", lambda: False)

    return make


def found(config: SGLangConfig | None = None) -> dict[str, Finding]:
    return {finding.name: finding for finding in doctor.findings(config or SGLangConfig())}


def test_without_sglang_it_says_what_to_install(installed: Installed) -> None:
    installed({})
    assert found()["sglang"].verdict is Verdict.PROBLEM
    assert "coupler-rollout-sglang[cuda]" in found()["sglang"].fix


def test_another_torch_than_the_kernels_were_built_for(installed: Installed) -> None:
    """Not an error by itself: the import tells."""
    installed({"sglang": "0.5.17", "torch": "2.13.0+cu130"})
    said = found()
    assert said["sglang's torch"].verdict is Verdict.WARNING
    assert said["sglang's torch"].text.startswith("2.13.0+cu130 is not ==2.11.0")
    assert said["sglang's sglang-kernel"].text == "==0.4.5 is not installed"
    assert said["sgl_kernel"].verdict is Verdict.PROBLEM


def test_the_same_torch_is_no_finding(installed: Installed) -> None:
    installed({"sglang": "0.5.17", "torch": "2.11.0+cu130"}, ("sgl_kernel",))
    said = found()
    assert "sglang's torch" not in said
    assert said["sgl_kernel"].text == "a stand-in without kernels: for tests on the CPU alone"


def test_kernels_that_do_not_load(installed: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    installed({"sglang": "0.5.17", "torch": "2.11.0", "sglang-kernel": "0.4.5"}, ("sgl_kernel",))
    # An entry of None makes an import fail.
    monkeypatch.setitem(__import__("sys").modules, "sgl_kernel", None)
    kernels = found()["sgl_kernel"]
    assert kernels.verdict is Verdict.PROBLEM
    assert kernels.text.startswith("sglang-kernel 0.4.5 does not load beside torch 2.11.0: ")


@pytest.mark.parametrize(
    ("backend", "modules", "verdict"),
    [
        ("fa3", ("sgl_kernel",), Verdict.OK),
        ("flashinfer", ("sgl_kernel",), Verdict.PROBLEM),
        ("flashinfer", ("sgl_kernel", "flashinfer"), Verdict.OK),
        ("mine", ("sgl_kernel",), Verdict.OK),
    ],
)
def test_an_attention_backend_has_its_module(
    installed: Installed, backend: str, modules: tuple[str, ...], verdict: Verdict
) -> None:
    installed({"sglang": "0.5.17", "torch": "2.11.0"}, modules)
    assert found(SGLangConfig(attention_backend=backend))["attention"].verdict is verdict


@pytest.mark.parametrize(
    "config",
    [
        SGLangConfig(python="/other/python"),
        SGLangConfig(mode=Mode.SERVER, server="http://host:1"),
    ],
)
def test_an_engine_elsewhere_is_not_judged_by_what_is_here(
    installed: Installed, config: SGLangConfig
) -> None:
    installed({})
    assert [finding.verdict for finding in doctor.findings(config)] == [Verdict.OK]
