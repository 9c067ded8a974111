"""Estimate what a replica of ``rollout=hf`` needs."""

from __future__ import annotations

from coupler.engine_kit.memory_plan import GIB, Asked, Needs, Phase, Term
from coupler.interfaces import Memory
from coupler_engine_fsdp.config import HFConfig
from coupler_engine_fsdp.logprobs import default_chunk
from coupler_engine_fsdp.memory.engine import compute_dtype
from coupler_engine_fsdp.memory.rehearsal import without_gradient
from coupler_engine_fsdp.model import build

DRAWING = 22
"""Bytes of a logit while a token is drawn: of the model, fp32 twice, log-prob, and the
cumulative probability in fp64."""


def needs(config: HFConfig, asked: Asked) -> Needs:
    """Estimate the memory of one replica.

    Raises:
        CouplerError: the model cannot be built.
    """
    dtype = compute_dtype(config.dtype, asked.gpu)
    policy = build(asked.model, default_chunk(1, asked.gpu), False).to(dtype)
    parameters = sum(tensor.numel() for tensor in policy.parameters())
    shape = policy.causal.config.get_text_config()

    heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    wide = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    token = 2 * shape.num_hidden_layers * heads * wide * dtype.itemsize
    longest = asked.longest or shape.max_position_embeddings
    room = max(int(config.kv_cache_gib * GIB) // (token * longest), 1)
    rows = min(config.max_sequences, asked.sequences or config.max_sequences, room)
    # The cache has a power of two of rows, and grows into a copy of twice the length.
    cache = (1 << (rows - 1).bit_length()) * longest * token

    tokens = min(config.max_prefill_tokens, rows * longest)
    prefill = tokens * token
    prefill += without_gradient(policy, tokens, 1, gpu=asked.gpu, copies=True)
    drawn = rows * shape.vocab_size * DRAWING
    fewer = f"a smaller {asked.path}.kv_cache_gib or max_sequences"
    prompts = f"a smaller {asked.path}.max_prefill_tokens"
    largest = max(tensor.numel() for tensor in policy.parameters()) * dtype.itemsize

    return Needs(
        held={Memory.WEIGHTS: (Term("weights", parameters * dtype.itemsize),)},
        peaks={
            Phase.SAMPLING: (
                Term(f"KV cache of {rows} sequences, and its growth", cache * 3 // 2, fewer),
                Term("a pass over prompts", prefill, prompts)
                if prefill > drawn
                else Term("the logits of a token for each sequence", drawn, fewer),
            ),
            Phase.SYNC: (Term("the largest tensor that comes", largest),),
        },
        parameters=parameters,
    )
