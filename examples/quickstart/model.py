"""The quickstart's model: a Llama of 0.1 M parameters with random weights, and a
tokenizer for its task.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END = "<end>"


def build(folder: Path, texts: Iterable[str], seed: int) -> int:
    """Write config, random weights and tokenizer in Hugging Face layout; return the
    number of parameters.
    """
    tokenizer = _tokenizer(texts)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=64,
            tie_word_embeddings=True,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def _tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Byte-pair encoding in which every letter of the last word is a token, and the
    instruction before it one token.
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Split(
        Regex(r"[A-Za-z](?=[A-Za-z]*$)"), behavior="isolated"
    )
    tokenizer.decoder = decoders.Fuse()
    trainer = trainers.BpeTrainer(vocab_size=256, special_tokens=[END], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
