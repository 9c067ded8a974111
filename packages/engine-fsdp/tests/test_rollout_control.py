"""rollout=hf: weight updates and receipts, pausing, sleeping, failing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from rollout_cases import (
    difference,
    full_logprobs,
    make_model,
    named_weights,
    publish,
    random_prompt,
    start,
)

from coupler.errors import CouplerError
from coupler.interfaces import InFlight, Memory, Request
from coupler_engine_fsdp.rollout import HFRollout

REQUESTS = [Request(random_prompt(4 + i, i), 20, seed=i) for i in range(6)]


async def after(steps: int) -> None:
    for _ in range(steps):
        await asyncio.sleep(0)


@pytest.mark.parametrize("tied", [False, True])
def test_a_receipt_counts_what_arrived(tmp_path: Path, tied: bool) -> None:
    model = make_model(tmp_path, "qwen2", tie_word_embeddings=tied)
    weights = named_weights(model)

    async def run() -> None:
        rollout = await start(tmp_path, None)
        receipt = await rollout.update(publish(3, weights))
        assert (receipt.version, receipt.num_received, receipt.num_loaded) == (
            3,
            len(weights),
            len(weights),
        )
        assert receipt.num_bytes == sum(weight.nbytes for weight in weights.values())
        assert receipt.missing == receipt.unexpected == ()
        assert set(receipt.seconds) == {"receive", "load"}
        for name, weight in named_weights(rollout.hf).items():
            assert torch.equal(weight, weights[name])

        fewer = {
            name: weight
            for name, weight in weights.items()
            if name != "model.layers.1.mlp.up_proj.weight"
        }
        receipt = await rollout.update(publish(4, fewer | {"extra": torch.zeros(2)}))
        assert receipt.missing == ("model.layers.1.mlp.up_proj.weight",)
        assert receipt.unexpected == ("extra",)
        assert (receipt.num_received, receipt.num_loaded) == (len(weights), len(weights) - 1)

    asyncio.run(run())


def test_tied_names_are_one_tensor(tmp_path: Path) -> None:
    model = make_model(tmp_path, "qwen2", tie_word_embeddings=True)
    weights = named_weights(model)
    head = weights.pop("model.embed_tokens.weight")

    async def run() -> None:
        rollout = await start(tmp_path, None)
        assert (await rollout.update(publish(0, weights))).missing == ("model.embed_tokens.weight",)
        receipt = await rollout.update(publish(0, weights | {"lm_head.weight": head}))
        assert receipt.missing == receipt.unexpected == ()
        assert torch.equal(rollout.hf.get_parameter("model.embed_tokens.weight"), head)

    asyncio.run(run())


def test_updates_take_effect_again_and_again_with_sleep_between(tmp_path: Path) -> None:
    models = [make_model(tmp_path, "qwen3", seed=s, tie_word_embeddings=True) for s in range(3)]
    everything = frozenset(Memory)

    async def run() -> None:
        rollout = await start(tmp_path, models[0])
        for version, model in enumerate(models):
            await rollout.pause(InFlight.DRAIN)
            await rollout.sleep(everything)
            assert (
                sum(parameter.untyped_storage().nbytes() for parameter in rollout.hf.parameters())
                == 0
            )
            assert rollout.decoder.columns.store.numel() == 0
            with pytest.raises(CouplerError, match="sleep"):
                await rollout.update(publish(version, named_weights(model)))
            await rollout.wake(everything)
            assert (await rollout.update(publish(version, named_weights(model)))).missing == ()
            await rollout.resume()
            for request in REQUESTS[:2]:
                done = await rollout.generate(request)
                assert difference(model, request, done) < 1e-4
                assert set(done.versions) == {version}

    asyncio.run(run())


def test_drain_finishes_what_runs_and_holds_what_comes(tmp_path: Path) -> None:
    model = make_model(tmp_path, "llama")

    async def run() -> None:
        rollout = await start(tmp_path, model, max_sequences=4)
        running = [
            asyncio.create_task(rollout.generate(request)) for request in REQUESTS
        ]  # two of them wait
        await after(5)
        await rollout.pause(InFlight.DRAIN)
        await after(3)
        late = asyncio.create_task(rollout.generate(REQUESTS[0]))
        await after(50)
        assert [task.done() for task in running] == [True] * 4 + [False] * 2
        assert not late.done()
        await rollout.resume()
        for request, done in zip(
            [*REQUESTS, REQUESTS[0]], await asyncio.gather(*running, late), strict=True
        ):
            assert done.finish == "length"
            assert difference(model, request, done) < 1e-4

    asyncio.run(run())


def test_abort_returns_what_was_sampled(tmp_path: Path) -> None:
    model = make_model(tmp_path, "llama")

    async def run() -> None:
        rollout = await start(tmp_path, model)
        running = [asyncio.create_task(rollout.generate(request)) for request in REQUESTS]
        await after(8)
        await rollout.pause(InFlight.ABORT)
        for request, done in zip(REQUESTS, await asyncio.gather(*running), strict=True):
            assert done.finish == "abort"
            assert 0 < len(done.tokens) < request.max_tokens
            assert difference(model, request, done) < 1e-4
            assert set(done.versions) == {0}
        await rollout.resume()
        whole = await asyncio.gather(*map(rollout.generate, REQUESTS))
        assert [done.finish for done in whole] == ["length"] * len(REQUESTS)

    asyncio.run(run())


def test_recompute_continues_on_new_weights(tmp_path: Path) -> None:
    old, new = make_model(tmp_path, "qwen2", seed=1), make_model(tmp_path, "qwen2", seed=2)

    async def run() -> None:
        rollout = await start(tmp_path, old, version=7)
        running = [asyncio.create_task(rollout.generate(request)) for request in REQUESTS]
        await after(8)
        await rollout.pause(InFlight.RECOMPUTE)
        await rollout.update(publish(8, named_weights(new)))
        await after(5)
        assert not any(task.done() for task in running)
        await rollout.resume()
        for request, done in zip(REQUESTS, await asyncio.gather(*running), strict=True):
            cut = done.versions.index(8)
            assert done.versions == (7,) * cut + (8,) * (20 - cut)
            assert 0 < cut < 20
            sampled = torch.tensor(done.logprobs)
            assert (full_logprobs(old, request.prompt, done, 1.0) - sampled)[
                :cut
            ].abs().max() < 1e-4
            assert (full_logprobs(new, request.prompt, done, 1.0) - sampled)[
                cut:
            ].abs().max() < 1e-4

    asyncio.run(run())


def test_memory_does_not_sleep_under_running_requests(tmp_path: Path) -> None:
    model = make_model(tmp_path, "qwen2")

    async def run() -> None:
        rollout = await start(tmp_path, model)
        expected = [done.tokens for done in await asyncio.gather(*map(rollout.generate, REQUESTS))]
        running = [asyncio.create_task(rollout.generate(request)) for request in REQUESTS]
        await after(8)
        with pytest.raises(CouplerError) as refused:
            await rollout.sleep(frozenset(Memory))
        assert str(refused.value) == (
            "6 requests are being sampled.\n  call:  pause() before sleep()"
        )
        assert [done.tokens for done in await asyncio.gather(*running)] == expected

    asyncio.run(run())


def test_recompute_without_an_update_changes_nothing(tmp_path: Path) -> None:
    model = make_model(tmp_path, "qwen2")

    async def run() -> None:
        rollout = await start(tmp_path, model)
        expected = [done.tokens for done in await asyncio.gather(*map(rollout.generate, REQUESTS))]
        running = [asyncio.create_task(rollout.generate(request)) for request in REQUESTS]
        await after(8)
        await rollout.pause(InFlight.RECOMPUTE)
        await rollout.sleep(frozenset({Memory.KV_CACHE}))
        await rollout.wake(frozenset({Memory.KV_CACHE}))
        await rollout.resume()
        assert [done.tokens for done in await asyncio.gather(*running)] == expected

    asyncio.run(run())


def test_stale_kv_continues_on_the_old_cache(tmp_path: Path) -> None:
    old, new = make_model(tmp_path, "qwen2", seed=1), make_model(tmp_path, "qwen2", seed=2)

    async def run() -> None:
        rollout = await start(tmp_path, old, version=7)
        running = [asyncio.create_task(rollout.generate(request)) for request in REQUESTS]
        await after(8)
        await rollout.pause(InFlight.STALE_KV)
        await after(5)
        cut = len(rollout.decoder.rows[0].tokens)
        await rollout.update(publish(8, named_weights(new)))
        await rollout.resume()
        for request, done in zip(REQUESTS, await asyncio.gather(*running), strict=True):
            assert done.versions == (7,) * cut + (8,) * (20 - cut)
            sampled = torch.tensor(done.logprobs)
            assert (full_logprobs(old, request.prompt, done, 1.0) - sampled)[
                :cut
            ].abs().max() < 1e-4
            assert (full_logprobs(new, request.prompt, done, 1.0) - sampled)[
                cut:
            ].abs().max() > 1e-3  # it is stale

    asyncio.run(run())


def test_an_error_while_decoding_reaches_every_caller(tmp_path: Path) -> None:
    model = make_model(tmp_path, "llama")
    broken = named_weights(model) | {"model.norm.weight": torch.full((48,), torch.nan)}

    async def run() -> None:
        rollout = await start(tmp_path, None, max_sequences=2)
        await rollout.update(publish(0, broken))
        outcomes = await asyncio.gather(*map(rollout.generate, REQUESTS), return_exceptions=True)
        assert all(isinstance(o, CouplerError) and "not finite" in str(o) for o in outcomes)
        await rollout.update(publish(1, named_weights(model)))
        assert difference(model, REQUESTS[0], await rollout.generate(REQUESTS[0])) < 1e-4

    asyncio.run(run())


def test_an_error_in_a_prefill_reaches_every_caller(tmp_path: Path) -> None:
    """Those whose prompts it was computing neither wait nor run."""
    model = make_model(tmp_path, "llama")

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    async def run() -> None:
        rollout = await start(tmp_path, model, max_sequences=4)
        running = [asyncio.create_task(rollout.generate(request)) for request in REQUESTS[:2]]
        await after(3)
        hook = rollout.hf.base_model.register_forward_pre_hook(fail)
        late = map(rollout.generate, REQUESTS[2:])
        async with asyncio.timeout(20):
            outcomes = await asyncio.gather(*running, *late, return_exceptions=True)
        assert [str(o) for o in outcomes] == ["out of memory"] * len(REQUESTS)
        hook.remove()
        assert difference(model, REQUESTS[2], await rollout.generate(REQUESTS[2])) < 1e-4

    asyncio.run(run())


def test_a_cancelled_caller_leaves_the_batch(tmp_path: Path) -> None:
    model = make_model(tmp_path, "llama")

    async def run() -> None:
        rollout = await start(tmp_path, model)
        running = [asyncio.create_task(rollout.generate(request)) for request in REQUESTS]
        await after(5)
        running[2].cancel()
        await after(3)
        assert len(rollout.decoder.rows) == len(REQUESTS) - 1
        done = await asyncio.gather(*running, return_exceptions=True)
        assert isinstance(done[2], asyncio.CancelledError)
        assert difference(model, REQUESTS[3], done[3]) < 1e-4  # type: ignore[arg-type]

    asyncio.run(run())


def test_it_runs_on_the_loop_of_another_thread_and_on_several_loops(tmp_path: Path) -> None:
    model = make_model(tmp_path, "llama")
    rollout = asyncio.run(start(tmp_path, model))

    async def both(rollout: HFRollout) -> list[tuple[int, ...]]:
        return [done.tokens for done in await asyncio.gather(*map(rollout.generate, REQUESTS))]

    async def in_thread() -> list[tuple[int, ...]]:
        return await asyncio.to_thread(asyncio.run, both(rollout))

    assert asyncio.run(in_thread()) == asyncio.run(both(rollout))
