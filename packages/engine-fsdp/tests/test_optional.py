"""Kernels of other packages are used where they work, and never needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from coupler_engine_fsdp.doctor import KERNELS, kernels
from coupler_engine_fsdp.optional import is_installed, is_usable


def test_a_kernel_that_cannot_be_imported_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """flash-attn-4 is installed without what it imports."""
    info = tmp_path / "flash_attn_4-4.0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn-4\nVersion: 4.0.0\n")
    cute = tmp_path / "flash_attn" / "cute"
    cute.mkdir(parents=True)
    (cute / "interface.py").write_text("import no_such_module_of_ours\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    assert is_installed("flash-attn-4")
    assert not is_usable("flash-attn-4", KERNELS["flash-attn-4"][0])
    assert "flash-attn-4 is installed but cannot be imported, and not used" in caplog.text
    (found,) = (each for each in kernels() if each.name == "flash-attn-4")
    assert "no_such_module_of_ours" in found.text and "flash-attn-4" in found.fix


def test_a_package_that_is_not_there_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    assert not is_usable("no-such-package-of-ours", "json")
    assert not caplog.text
