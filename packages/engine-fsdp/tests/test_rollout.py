"""rollout=hf samples what transformers' own model says, whoever shares the batch."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from rollout_cases import FAMILIES, difference, make_model, named_weights, random_prompt, start
from transformers import Gemma2Config, MistralConfig, Qwen2Config

from coupler.errors import CouplerError
from coupler.interfaces import Model, Rank, Request
from coupler_engine_fsdp.config import HFConfig
from coupler_engine_fsdp.rollout import HFRollout
from coupler_engine_fsdp.rollout_sampling import sample, stream_starts, uniforms

LENGTHS = (1, 3, 17, 40, 5, 5, 9, 60)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_generate_of_transformers(tmp_path: Path, family: str, tied: bool) -> None:
    model = make_model(tmp_path, family, tie_word_embeddings=tied)
    requests = [
        Request(random_prompt(n, n + i), 8 + 4 * i, temperature=0) for i, n in enumerate(LENGTHS)
    ]

    async def run() -> None:
        # the others join when rows leave
        rollout = await start(tmp_path, model, max_sequences=5)
        for request, done in zip(
            requests, await asyncio.gather(*map(rollout.generate, requests)), strict=True
        ):
            ids = torch.tensor([request.prompt])
            expected = model.generate(  # type: ignore[operator]
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=request.max_tokens,
                eos_token_id=None,
                pad_token_id=0,
            )
            assert list(done.tokens) == expected[0, len(request.prompt) :].tolist()
            assert done.finish == "length"
            assert difference(model, request, done) < 1e-4  # of temperature 1

    asyncio.run(run())


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_a_full_forward_while_rows_join_and_leave(
    tmp_path: Path, temperature: float
) -> None:
    model = make_model(tmp_path, "qwen3")
    requests = [
        Request(random_prompt(n, n), 3 + i % 30, temperature, stop=(7, 11), seed=i)
        for i, n in enumerate((*LENGTHS, *range(1, 30)))
    ]

    async def late(rollout: HFRollout, request: Request, steps: int) -> None:
        for _ in range(steps):
            await asyncio.sleep(0)
        done = await rollout.generate(request)
        assert difference(model, request, done) < 1e-4
        stopped = done.tokens[-1] in request.stop
        assert done.finish == ("stop" if stopped else "length")
        assert stopped or len(done.tokens) == request.max_tokens
        assert not set(done.tokens[:-1]) & set(request.stop)
        assert len(done.tokens) == len(done.logprobs) == len(done.versions)

    async def run() -> None:
        rollout = await start(tmp_path, model, max_sequences=12)
        await asyncio.gather(*(late(rollout, request, 3 * i) for i, request in enumerate(requests)))

    asyncio.run(run())


def test_samples_of_a_prompt_share_its_prefill(tmp_path: Path) -> None:
    model = make_model(tmp_path, "llama")
    prefix = random_prompt(30, 1)

    async def run() -> None:
        rollout = await start(tmp_path, model, max_sequences=6)
        computed: list[int] = []
        rollout.hf.base_model.register_forward_pre_hook(
            lambda module, args, kwargs: computed.append(kwargs["input_ids"].numel()),
            with_kwargs=True,
        )
        requests = [
            Request(prefix, 4 + 3 * i, seed=i) for i in range(9)
        ]  # three of them join beside a running sibling
        for request, done in zip(
            requests, await asyncio.gather(*map(rollout.generate, requests)), strict=True
        ):
            assert difference(model, request, done) < 1e-4
        assert [n for n in computed if n > 6] == [29]

    asyncio.run(run())


def test_a_seed_fixes_the_tokens_whoever_shares_the_batch(tmp_path: Path) -> None:
    model = make_model(tmp_path, "qwen2")
    request = Request(random_prompt(12, 0), 25, seed=123)

    async def run(seeds: range, limit: int) -> tuple[int, ...]:
        rollout = await start(tmp_path, model, max_sequences=limit)
        others = [Request(random_prompt(5 + s % 7, s), 4 + s, 0.9, seed=s) for s in seeds]
        done = await asyncio.gather(*map(rollout.generate, [*others, request]))
        return done[-1].tokens

    alone = asyncio.run(run(range(0), 8))
    assert asyncio.run(run(range(20), 8)) == alone
    assert asyncio.run(run(range(40, 55), 64)) == alone


def test_sampled_frequencies_match_the_probabilities(tmp_path: Path) -> None:
    model = make_model(tmp_path, "qwen2", vocab_size=8, initializer_range=0.15)
    prompt, n, temperature = (1, 2, 3), 4000, 0.8

    async def run() -> list[tuple[int, ...]]:
        rollout = await start(tmp_path, model)
        done = await asyncio.gather(
            *(rollout.generate(Request(prompt, 2, temperature, seed=i)) for i in range(n))
        )
        return [d.tokens for d in done]

    drawn = Counter(asyncio.run(run()))
    with torch.no_grad():
        first = torch.softmax(model(torch.tensor([prompt])).logits[0, -1] / temperature, -1)
        second = torch.stack(
            [
                torch.softmax(model(torch.tensor([[*prompt, t]])).logits[0, -1] / temperature, -1)
                for t in range(8)
            ]
        )
    expected = n * (first[:, None] * second).numpy().ravel()
    observed = np.array([drawn[a, b] for a in range(8) for b in range(8)])
    rare = expected < 5
    expected, observed = (
        np.append(expected[~rare], expected[rare].sum()),
        np.append(observed[~rare], observed[rare].sum()),
    )
    chi_square = ((observed - expected) ** 2 / np.maximum(expected, 1)).sum()
    freedom = len(expected) - 1
    assert freedom > 5
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5


def test_uniform_numbers_are_uniform_and_streams_are_independent() -> None:
    index = np.arange(2000, dtype=np.uint64)
    streams = np.stack(
        [uniforms(np.full(2000, start), index) for start in stream_starts(list(range(50)))]
    )
    assert streams.min() > 0
    assert streams.max() <= 1
    counts = np.histogram(streams, 100, (0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 99 + 4 * (2 * 99) ** 0.5
    correlation = np.corrcoef(streams) - np.eye(50)
    assert np.abs(correlation).max() < 0.13


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logprobs = (
        torch.tensor([[-torch.inf, 0.5, -torch.inf, 0.5, -torch.inf]]).log_softmax(-1).expand(3, -1)
    )
    uniform = torch.tensor([2.0**-53, 0.5, 1.0], dtype=torch.float64)
    assert sample(logprobs, uniform).tolist() == [1, 1, 3]


def test_malformed_requests_are_refused(tmp_path: Path) -> None:
    model = make_model(tmp_path, "qwen2")

    async def run() -> None:
        rollout = await start(tmp_path, model)
        cases = {
            "128 tokens": Request((1,) * 128, 1),
            "0 tokens; this": Request((), 1),
            "wants 0 tokens": Request((1,), 0),
            "knows 0 to 96": Request((1, 97), 1),
            "temperature": Request((1,), 1, temperature=-1.0),
        }
        for match, request in cases.items():
            with pytest.raises(CouplerError, match=match):
                await rollout.generate(request)
        done = await rollout.generate(Request(random_prompt(120, 0), 50))
        # the model has 128 positions
        assert (len(done.tokens), done.finish) == (8, "length")

    asyncio.run(run())


@pytest.mark.parametrize(
    "config",
    [
        Qwen2Config(
            num_hidden_layers=2, use_sliding_window=True, sliding_window=8, max_window_layers=1
        ),
        MistralConfig(num_hidden_layers=2, sliding_window=8),
        Gemma2Config(num_hidden_layers=2),
        Qwen2Config(
            num_hidden_layers=2,
            rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        ),
    ],
    ids=["qwen2-window", "mistral", "gemma2", "dynamic-rope"],
)
def test_models_with_other_caches_are_refused(tmp_path: Path, config: Qwen2Config) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(CouplerError, match="rollout=hf cannot run a model of type"):
        asyncio.run(HFRollout(HFConfig(), Model(str(tmp_path))).setup(Rank()))


def test_long_and_short_sequences_relocate_the_cache(tmp_path: Path) -> None:
    model = make_model(tmp_path, "llama", max_position_embeddings=700)

    async def run() -> None:
        rollout = await start(tmp_path, model, max_sequences=4, max_prefill_tokens=64)
        requests = [
            Request(random_prompt(1 + (i * 37) % 90, i), (5, 150, 20, 400)[i % 4], seed=i)
            for i in range(12)
        ]
        for request, done in zip(
            requests, await asyncio.gather(*map(rollout.generate, requests)), strict=True
        ):
            assert difference(model, request, done) < 2e-4
        assert rollout.decoder.columns.store.shape[4] < 800

    asyncio.run(run())


def test_dummy_weights_never_come_from_the_checkpoint(tmp_path: Path) -> None:
    model = make_model(tmp_path, "qwen2")
    model.save_pretrained(tmp_path)

    async def run() -> None:
        rollout = await start(tmp_path, None)
        for name, weight in named_weights(rollout.hf).items():
            assert weight.ndim == 1 or not torch.equal(weight, named_weights(model)[name])
        assert torch.equal(rollout.hf.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
        done = await rollout.generate(Request((1, 2), 2))
        assert done.versions == (-1, -1)

    asyncio.run(run())
