"""An export of a model that brings its own Python code is whole: transformers loads it
and computes the same.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from coupler.interfaces import Model, Rank
from coupler.worker.torch.hf_export import export
from coupler_engine_fsdp.config import FSDPConfig
from coupler_engine_fsdp.engine import FSDPEngine

CONFIGURATION = """
from transformers import Qwen2Config

class OwnConfig(Qwen2Config):
    model_type = "coupler_own"
"""
MODELING = """
from transformers import Qwen2ForCausalLM

from .configuration_own import OwnConfig
from .names_own import WHO

class OwnForCausalLM(Qwen2ForCausalLM):
    config_class = OwnConfig
    who = WHO
"""
SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder with code of its own, which transformers finds by its auto_map."""
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "configuration_own.py").write_text(CONFIGURATION)
    (folder / "modeling_own.py").write_text(MODELING)
    (folder / "names_own.py").write_text('WHO = "own"\n')
    own = {
        "AutoConfig": "configuration_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
    }
    config = {
        "model_type": "coupler_own",
        "architectures": ["OwnForCausalLM"],
        "auto_map": own,
        **SIZES,
        **HEADS,
    }
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(seeded(folder), trust_remote_code=True)
    assert model.who == "own"
    return folder


def seeded(folder: Path) -> Path:
    """Add random weights under the names of Qwen2."""
    tensors = Qwen2ForCausalLM(Qwen2Config(**SIZES, **HEADS)).state_dict()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_an_export_brings_the_code_of_its_model(source: Path, tmp_path: Path) -> None:
    engine = FSDPEngine(FSDPConfig(dtype="fp32"), Model(str(source), trust_remote_code=True))
    engine.setup(Rank())
    out = tmp_path / "out"
    export(engine.weights(), out, source, write=True)
    source.rename(tmp_path / "gone")
    again = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    assert type(again).__name__ == "OwnForCausalLM"
    want = AutoModelForCausalLM.from_pretrained(tmp_path / "gone", trust_remote_code=True)
    tokens = torch.arange(8)[None]
    torch.testing.assert_close(again(tokens).logits, want(tokens).logits, rtol=0, atol=0)
