"""Write model folders for tests in a second: a bigram for the toy backends, a small
Qwen2 for real ones.

Both have the vocabulary of one small tokenizer. Their distributions are far from flat,
so that a wrong temperature, a shifted row or a missing tensor cannot look right.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from coupler.errors import CouplerError

VOCAB = 320
EOS = 2  # <|im_end|>
NUM_SPECIAL = 4  # ids below it never appear in the kit's prompts

_TEXT = [
    "what is 1 + 2 ? the answer is 3 .",
    "hello world",
    "compute 12 - 7 = 5",
    "yes no maybe",
] * 10
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """Read every tensor of a model folder by its name in the checkpoint."""
    return {
        k: v for path in sorted(folder.glob("*.safetensors")) for k, v in load_file(path).items()
    }


def read_toy(folder: Path) -> dict[str, np.ndarray]:
    """Read the tensors of the bigram model.

    Raises:
        CouplerError: they are not those of such a model, or not finite numbers.
    """
    found = read_tensors(folder)

    head = found.get("head.weight", np.zeros((0, 0)))
    tables = {"embed.weight": head.shape, "head.weight": head.shape, "head.bias": head.shape[:1]}
    wrong = [
        name
        for name, shape in tables.items()
        if name not in found or found[name].shape != shape or found[name].dtype.kind != "f"
    ]
    if wrong or head.ndim != 2 or len(head) != VOCAB:
        raise CouplerError(
            f"model.path={folder} is no toy model: {', '.join(wrong or tables)} do not fit.\n"
            "  try:  coupler.testing.models.write_toy"
        )
    if odd := [name for name in tables if not np.isfinite(found[name]).all()]:
        raise CouplerError(
            f"model.path={folder} has weights that are not finite: {', '.join(odd)}.\n"
            "  try:  another copy of the model"
        )

    return found


def write_toy(folder: Path, seed: int = 0, hidden: int = 8) -> Path:
    """Write the bigram model that the toy backends run; needs NumPy only."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    shapes = {
        "embed.weight": (VOCAB, hidden),
        "head.weight": (VOCAB, hidden),
        "head.bias": (VOCAB,),
    }
    scale = 1.1 * (8 / hidden) ** 0.25  # logits are as wide whatever the width
    tensors = {
        name: random.normal(0, scale, shape).astype(np.float32) for name, shape in shapes.items()
    }
    config = {
        "model_type": "toy_bigram",
        "vocab_size": VOCAB,
        "eos_token_id": EOS,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")

    return folder


SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": EOS,
    "bos_token_id": 0,
    "pad_token_id": 3,
}


def write_qwen2(folder: Path, *, tied: bool, seed: int = 0, **config: Any) -> Path:
    """Write a float32 Qwen2 with two layers, grouped heads and random biases, and its
    tokenizer.

    Args:
        config: values of its configuration beside those of ``SMALL``.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return write_random(
        Qwen2ForCausalLM(Qwen2Config(**{**SMALL, **config}, tie_word_embeddings=tied)), folder, seed
    )


def write_classifier(folder: Path, *, labels: int = 1, seed: int = 0, **config: Any) -> Path:
    """Write a float32 Qwen2 sequence classifier, and its tokenizer.

    Args:
        labels: numbers that its head ``score.weight [labels, H]`` gives.
        config: values of its configuration beside those of ``SMALL``.
    """
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    made = Qwen2Config(**{**SMALL, **config, "num_labels": labels})
    return write_random(Qwen2ForSequenceClassification(made), folder, seed)


def write_qwen3_moe(folder: Path, seed: int = 0, **more: Any) -> Path:
    """Write a float32 Qwen3-MoE with two layers of four experts, of which each token
    takes two.
    """
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts: dict[str, Any] = {
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "head_dim": 64,
    }
    config = Qwen3MoeConfig(**{**SMALL, **more}, **experts, tie_word_embeddings=False)
    return write_random(Qwen3MoeForCausalLM(config), folder, seed)


def write_random(model: Any, folder: Path, seed: int) -> Path:
    """Give the model random weights that are far from flat, and save it."""
    import torch

    model = model.float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            noise = torch.randn(param.shape, generator=generator)
            if "norm" in name:
                param.copy_(1 + 0.1 * noise)
            elif name.endswith("bias"):
                param.copy_(0.2 * noise)
            else:
                wide = "embed" in name or "lm_head" in name
                param.copy_(noise * (0.25 if wide else param.shape[-1] ** -0.5))
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):  # of routers
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level tokenizer of ``VOCAB`` entries at most, with a chat
    template.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE(unk_token=None))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_TEXT, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<|endoftext|>", eos_token="<|im_end|>", pad_token="<pad>"
    )
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)


def write_value_head(source: Path, folder: Path, hidden: int, seed: int = 0) -> Path:
    """Write the model of ``source`` with ``score.weight`` and ``score.bias`` beside
    what it has.
    """
    random = np.random.default_rng(seed)
    score = {
        "score.weight": random.normal(0, hidden**-0.5, (1, hidden)).astype(np.float32),
        "score.bias": random.normal(0, 1, 1).astype(np.float32),
    }
    return rewrite(source, folder, {**read_tensors(source), **score})


def rewrite(source: Path, folder: Path, tensors: Mapping[str, np.ndarray]) -> Path:
    """Write the model of ``source`` with other ``tensors`` into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.glob("*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    return folder
