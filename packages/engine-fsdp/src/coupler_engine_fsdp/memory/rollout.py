"""Estimate what a replica of ``rollout=hf`` needs."""

from __future__ import annotations

from coupler.engine_kit.memory_plan import GIB, Asked, Needs, Phase, Term, largest
from coupler.interfaces import Memory
from coupler_engine_fsdp.config import HFConfig
from coupler_engine_fsdp.decoding import MIN_GROWTH
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
    policy = build(asked.model, default_chunk(1, asked.gpu), 0).to(dtype)
    parameters = sum(tensor.numel() for tensor in policy.parameters())
    shape = policy.causal.config.get_text_config()

    heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    wide = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    token = 2 * shape.num_hidden_layers * heads * wide * dtype.itemsize
    longest = asked.longest or shape.max_position_embeddings
    room = max(int(config.kv_cache_gib * GIB) // (token * longest), 1)
    rows = min(config.max_sequences, asked.sequences or config.max_sequences, room)
    # The cache has a power of two of rows.
    column = token << (rows - 1).bit_length()

    prompt = min(asked.prompt or longest, longest)
    tokens = max(min(config.max_prefill_tokens, rows * prompt), prompt)
    passing = without_gradient(policy, tokens, 1, gpu=asked.gpu, copies=True)
    fewer = f"a smaller {asked.path}.kv_cache_gib or max_sequences"
    prompts = f"a smaller {asked.path}.max_prefill_tokens"
    largest_tensor = max(tensor.numel() for tensor in policy.parameters()) * dtype.itemsize

    cache = f"KV cache of {rows} sequences"
    moments = (
        (
            Term(cache, column * _first(prompt, longest), fewer),
            Term("a pass over prompts", tokens * token + passing, prompts),
        ),
        (
            Term(cache, column * longest, fewer),
            Term("the logits of a token for each", rows * shape.vocab_size * DRAWING, fewer),
        ),
        (Term(f"{cache}, and its growth", column * _growing(prompt, longest), fewer),),
    )
    return Needs(
        held={Memory.WEIGHTS: (Term("weights", parameters * dtype.itemsize),)},
        peaks={
            Phase.SAMPLING: largest(*moments),
            Phase.SYNC: (Term("the largest tensor that comes", largest_tensor),),
        },
        parameters=parameters,
    )


def _first(prompt: int, longest: int) -> int:
    """Return the columns of the cache when prompts enter it."""
    return min(longest, prompt + max(MIN_GROWTH, prompt))


def _growing(prompt: int, longest: int) -> int:
    """Return the most columns of two caches, of which one is copied into the other."""
    columns, most = _first(prompt, longest), 0
    while columns < longest:
        larger = min(longest, columns + max(MIN_GROWTH, columns))
        columns, most = larger, columns + larger
    return most
