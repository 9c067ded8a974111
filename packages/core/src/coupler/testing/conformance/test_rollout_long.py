"""Check what a rollout must do beyond the first window, block, batch and bucket: long
prompts and completions, many requests, small and refused updates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coupler.errors import CouplerError, WeightSyncError
from coupler.interfaces import Completion, Request
from coupler.plugins import Backend
from coupler.plugins.manager import Plugins
from coupler.testing import expect
from coupler.testing.conformance.test_rollout import error, generate, moved, shortfall, stream
from coupler.testing.edge import Served
from coupler.testing.left_alone import generators
from coupler.testing.models import EOS, NUM_SPECIAL, VOCAB, rewrite
from coupler.testing.reference import Reference, as_batch
from coupler.testing.subject import Subject

LONG = 200  # tokens of a completion
# Prompts that end before, at and after the usual sizes of blocks and windows.
LENGTHS = (300, 511, 512, 700)
PROMPTS = tuple(
    tuple(np.random.default_rng(size).integers(NUM_SPECIAL, VOCAB, size).tolist())
    for size in LENGTHS
)
SHORT = tuple(PROMPTS[0][i : i + 1 + i % 7] for i in range(12))
MANY = 300  # requests at once, above what any rollout batches
SURE = 4.5  # standard deviations by which an honest sample never differs
RANGE = 40  # ids whose share is looked at together
UPDATES = 14  # in a row, which leave memory as it is
LEAK_BYTES = 48 << 20  # more than the caches of an allocator grow by

LENDING = Backend(
    kind="transport", name="lending", target="coupler.testing.lending:LendingTransport"
)


@pytest.fixture(scope="module")
def live(rollout_subject: Subject, long_model: Reference) -> Iterator[Served]:
    """Start a rollout of the model with long sequences, and send it the weights."""
    backend = Plugins.load().get("transport", "disk")
    served = Served(rollout_subject.create(long_model.folder), backend)
    served.push(stream(long_model))
    yield served
    served.close()


@pytest.fixture
def served(live: Served, long_model: Reference) -> Iterator[Served]:
    """Return the rollout, and leave it with the true weights."""
    yield live
    live.push(stream(long_model))


def assert_close(reference: Reference, request: Request, done: Completion, limit: float) -> None:
    off = error(reference, request, done)
    assert off < limit, (
        f"expected log-probs within {limit:g} of the reference after a prompt of "
        f"{len(request.prompt)} tokens at temperature {request.temperature:g}; of "
        f"{len(done.tokens)} tokens the worst is off by {off:.4f}"
    )


def assert_whole(request: Request, done: Completion) -> None:
    sizes = (len(done.tokens), len(done.logprobs), len(done.versions))
    assert sizes == (request.max_tokens,) * 3 and done.finish == "length", (
        f"expected {request.max_tokens} tokens, log-probs and versions, and finish 'length', "
        f"came {sizes} and {done.finish!r}"
    )
    assert all(-np.inf < logprob <= 1e-6 for logprob in done.logprobs), (
        f"expected finite log-probs of at most 0, came {min(done.logprobs)} to {max(done.logprobs)}"
    )


# --- long sequences


@pytest.mark.parametrize("temperature", [1.0, 0.25])
def test_long_completions_are_scored_like_the_reference(
    served: Served, long_model: Reference, temperature: float, tolerance: float
) -> None:
    """Prompts of 300 tokens and more, each with a completion of 200."""
    requests = [Request(p, LONG, temperature, seed=i) for i, p in enumerate((*PROMPTS, *SHORT[:2]))]
    for request, done in zip(requests, generate(served, requests), strict=True):
        assert_whole(request, done)
        assert_close(long_model, request, done, tolerance / min(temperature, 1.0))


def test_an_update_forgets_what_was_read_before_it(
    served: Served, long_model: Reference, tmp_path: Path, tolerance: float
) -> None:
    """The same long prompts come before and after an update, whole and continued. A
    cache of their prefix is of the old weights.
    """
    prompts = (PROMPTS[0], PROMPTS[2], (*PROMPTS[2], *PROMPTS[0][:90]))
    requests = [Request(p, 8, seed=i) for i, p in enumerate(prompts)]

    for model in (long_model, moved(long_model, tmp_path / "moved", 1), long_model):
        served.push(stream(model))
        for again in range(2):  # the second time a cache answers
            for request, done in zip(requests, generate(served, requests), strict=True):
                off = error(model, request, done)
                assert off < tolerance, (
                    f"expected log-probs of version {served.edge.version} for a prompt of "
                    f"{len(request.prompt)} tokens that older weights have read; time {again + 1} "
                    f"after the update they are off by {off:.4f}"
                )
                assert set(done.versions) == {served.edge.version}, (
                    f"expected version {served.edge.version}, came {set(done.versions)}"
                )


# --- many requests


def test_more_requests_than_a_batch_holds(
    served: Served, long_model: Reference, tolerance: float
) -> None:
    """Each request gets its own completion, whatever waits beside it."""
    requests = [
        Request(PROMPTS[3][i : i + 1 + i % 41], 1 + i % 5, (1.0, 0.7, 1.4)[i % 3], seed=i)
        for i in range(MANY)
    ]

    for i, (request, done) in enumerate(zip(requests, generate(served, requests), strict=True)):
        assert_whole(request, done)
        if i % 5 and i < MANY - 20:
            continue  # The reference takes as long as the rollout.
        off = error(long_model, request, done)
        assert off < 2 * tolerance, (
            f"expected request {i} of {MANY} at once to be answered for its own prompt and "
            f"temperature, its log-probs are off by {off:.4f}"
        )


def test_seeds_decide_and_differ(served: Served, long_model: Reference) -> None:
    """A seed gives the same tokens alone, among others and after an update. Every seed
    gives other tokens, also where only its highest of 32 bits differs.
    """
    request = Request(PROMPTS[0], 60, 1.5, seed=7)
    (first,) = generate(served, [request])
    others = [replace(request, prompt=PROMPTS[1], seed=i) for i in range(20)]
    served.push(stream(long_model))
    again = generate(served, [*others, request])[-1]
    assert again.tokens == first.tokens, (
        "expected the tokens of the same seed, alone and then among others; they differ from "
        f"token {differing(first.tokens, again.tokens)} on"
    )

    seeds = (*range(40), 7 + (1 << 31))
    done = generate(served, [replace(request, max_tokens=20, seed=seed) for seed in seeds])
    found = len({each.tokens for each in done})
    assert found == len(seeds), (
        f"expected {len(seeds)} seeds to give as many completions, came {found} different ones"
    )


def differing(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    same = (a == b for a, b in zip(first, second, strict=False))
    return next((i for i, equal in enumerate(same) if not equal), min(len(first), len(second)))


# --- the distribution


@pytest.mark.parametrize(
    ("temperature", "count"),
    [
        (2.0, 128),
        (0.9, 16),
        (0.25, 16),
        (0.1, 16),
    ],
)
def test_long_samples_follow_the_distribution(
    served: Served, long_model: Reference, temperature: float, count: int
) -> None:
    """Sums over the tokens have the mean that the reference's distribution has. 25,600
    of them show a penalty of 0.1 nats.

    A hidden top-p, top-k or min-p lowers the surprise and empties the tail. A penalty
    lowers the share of tokens that came before, and a wrong temperature moves both.
    Tokens that are banned or preferred move the share of their ids.
    """
    requests = [Request(SHORT[i % 12], LONG, temperature, seed=100 + i) for i in range(count)]
    totals: dict[str, np.ndarray] = {}
    for request, done in zip(requests, generate(served, requests), strict=True):
        for name, sums in statistics(long_model, request, done).items():
            totals[name] = totals.get(name, np.zeros(3)) + sums

    for name, (difference, variance, size) in totals.items():
        # By Bernstein's inequality (1927), since a rare token may weigh as much as all.
        rare = SURE**2 / 6 * size / len(requests)
        limit = rare + np.sqrt(rare**2 + SURE**2 * variance)
        assert abs(difference) < limit, (
            f"expected {name} as the distribution has it at temperature {temperature:g}; over "
            f"{LONG * len(requests)} tokens it is off by {difference:+.1f}, "
            f"{difference / np.sqrt(variance):+.1f} standard deviations"
        )


def statistics(reference: Reference, request: Request, done: Completion) -> dict[str, np.ndarray]:
    """Sum (observed - expected) over tokens, with its variance and the size of one
    event, by name.
    """
    batch = as_batch(request.prompt, done.tokens, request.temperature)
    log_p = reference.distributions(batch)[len(request.prompt) :]
    p = np.exp(log_p)
    tokens, at = np.array(done.tokens), np.arange(len(done.tokens))

    context = np.array([*request.prompt, *done.tokens])
    seen = np.zeros(p.shape, bool)
    for i in at:
        seen[i, context[: len(request.prompt) + i]] = True

    order = np.argsort(-p, axis=-1)
    ordered = np.take_along_axis(p, order, -1)
    above = ordered.cumsum(-1) - ordered
    below = np.empty(p.shape)
    np.put_along_axis(below, order, 1 - above, -1)

    ids = np.arange(p.shape[1])
    events = {
        "the surprise": -log_p,
        "the share of tokens that came before": seen.astype(float),
        "the share of the least likely tenth": (below < 0.1).astype(float),
        # Random numbers of 8 bits or fewer never come so close to 1.
        "the share of the least likely 0.15 percent": (below < 0.0015).astype(float),
        "the share of special tokens": np.broadcast_to(ids < NUM_SPECIAL, p.shape),
        "the share of the end": np.broadcast_to(ids == EOS, p.shape),
        "the share of odd ids": np.broadcast_to(ids % 2 == 1, p.shape),
        **{
            f"the share of ids from {low} to {low + RANGE - 1}": np.broadcast_to(
                ids // RANGE == low // RANGE, p.shape
            )
            for low in range(0, VOCAB, RANGE)
        },
    }
    found = {}
    for name, values in events.items():
        mean = (p * values).sum(-1)
        variance = (p * values**2).sum(-1) - mean**2
        came = values[at, tokens] - mean
        found[name] = np.array([came.sum(), variance.sum(), np.abs(came).max()])
    return found


def test_greedy_is_greedy_for_long(served: Served, long_model: Reference, tolerance: float) -> None:
    """Every token is the most likely one, as far as the tolerance tells two apart."""
    request = Request(PROMPTS[0], 60, 0.0, seed=3)
    (done,) = generate(served, [request])
    expect.below(
        shortfall(long_model, request, done),
        2 * tolerance,
        "the nats between the most likely token and that of temperature 0",
    )


def test_a_stop_token_counts_where_it_is_sampled(served: Served, long_model: Reference) -> None:
    """The prompt may hold it, and it may be the last token that was asked for."""
    plain = Request(PROMPTS[0], 24, 1.0, seed=5)
    (done,) = generate(served, [plain])
    last = next(i for i in range(23, 0, -1) if done.tokens[i] not in done.tokens[:i])
    stop = (done.tokens[last],)
    for request in (replace(plain, stop=stop), replace(plain, stop=stop, max_tokens=last + 1)):
        (stopped,) = generate(served, [request])
        assert (stopped.tokens, stopped.finish) == (done.tokens[: last + 1], "stop"), (
            f"expected {last + 1} tokens that end with {stop[0]}, and finish 'stop', came "
            f"{len(stopped.tokens)} and {stopped.finish!r}"
        )

    inside = replace(plain, stop=stop, prompt=(*stop, *PROMPTS[0], *stop))
    (other,) = generate(served, [inside])
    want = "stop" if other.tokens[-1] in stop else "length"
    assert other.finish == want and (want == "stop" or len(other.tokens) == 24), (
        "expected the stop token of a prompt to end nothing, came "
        f"{len(other.tokens)} tokens and {other.finish!r}"
    )


# --- updates


def test_small_moves_arrive(
    served: Served, long_model: Reference, tmp_path: Path, tolerance: float
) -> None:
    """Weights move by one unit in the last place of bfloat16, or by as many as the
    tolerance lets one see, or in one element alone. The log-probs of greedy tokens move
    by as much as the reference's.
    """
    requests = [Request(p[:40], 12, 0.0) for p in PROMPTS]
    before = generate(served, requests)
    limit = max(tolerance / 10, 1e-4)

    units = max(1, round(tolerance / 0.01))
    for name, tensors in small_moves(long_model, requests, units).items():
        model = type(long_model)(rewrite(long_model.folder, tmp_path / name, tensors))
        served.push(stream(model))
        moves = [
            moves_of(request, old, new, long_model, model)
            for request, old, new in zip(requests, before, generate(served, requests), strict=True)
        ]
        want, came = (np.concatenate(each) for each in zip(*moves, strict=True))
        moved_by = np.abs(want).max(initial=0.0)
        off = np.abs(came - want).max(initial=0.0)
        assert moved_by > 4 * limit, f"the kit's move of {name} is too small to see: {moved_by}"
        assert off < limit + 0.1 * moved_by, (
            f"expected log-probs to move by up to {moved_by:.5f} with {name}, they are off by "
            f"{off:.5f}"
        )


def moves_of(
    request: Request, old: Completion, new: Completion, before: Reference, after: Reference
) -> tuple[np.ndarray, np.ndarray]:
    """Return how log-probs should move and how they did, while tokens are equal."""
    same = differing(old.tokens, new.tokens)
    first, second = (
        model.logprobs_of(request.prompt, old.tokens, 1.0)[:same] for model in (before, after)
    )
    return second - first, np.array(new.logprobs[:same]) - np.array(old.logprobs[:same])


def small_moves(
    reference: Reference, requests: list[Request], units: int
) -> dict[str, dict[str, np.ndarray]]:
    """Return the tensors of each move, by its name.

    ``units`` are of the last place of bfloat16.
    """
    more = np.float32(1 + units * 2**-8)
    tensors = reference.tensors
    wide = max(tensors, key=lambda name: tensors[name].size)
    head = next((name for name in tensors if "head" in name and tensors[name].ndim == 2), wide)
    embed = next(name for name in tensors if "embed" in name)
    element = tensors[embed].copy()
    element[requests[0].prompt[-1], 3] += np.float32(0.1)

    return {
        "every-weight": {name: tensor * more for name, tensor in tensors.items()},
        "the-head": {**tensors, head: tensors[head] * more},
        "one-element": {**tensors, embed: element},
    }


def test_every_row_of_the_vocabulary_arrives(
    served: Served, long_model: Reference, tmp_path: Path, tolerance: float
) -> None:
    """Other weights come, and each id of the vocabulary is a prompt. A row that was
    left out, at the end of a padded or a sharded vocabulary, is of the weights before.
    """
    random = np.random.default_rng(4)
    tensors = dict(long_model.tensors)
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and len(tensor) == VOCAB:
            noise = random.normal(0, tensor.std(), tensor.shape)
            tensors[name] = (0.7 * (tensor + noise)).astype(np.float32)
    model = type(long_model)(rewrite(long_model.folder, tmp_path / "rows", tensors))
    served.push(stream(model))
    requests = [Request((id_,), 2, 1.3, seed=id_) for id_ in range(VOCAB)]

    for request, done in zip(requests, generate(served, requests), strict=True):
        off = error(model, request, done)
        assert off < 2 * tolerance, (
            f"expected the log-probs of {done.tokens} after token {request.prompt[0]} to be of "
            f"the weights that came last, they are off by {off:.4f}"
        )


def test_a_tensor_is_read_before_the_next_one_comes(
    rollout_subject: Subject, long_model: Reference, tmp_path: Path, tolerance: float
) -> None:
    """A transport receives into one buffer: what a rollout keeps of a tensor is a
    copy.
    """
    served = Served(rollout_subject.create(long_model.folder), LENDING)

    try:
        for model in (long_model, moved(long_model, tmp_path / "moved", 5)):
            served.push(stream(model))
            requests = [Request(p[:60], 6, seed=i) for i, p in enumerate(PROMPTS)]
            for request, done in zip(requests, generate(served, requests), strict=True):
                off = error(model, request, done)
                assert off < tolerance, (
                    f"expected the weights as they were while each was lent, log-probs are off "
                    f"by {off:.4f} after the transport took them back"
                )
    finally:
        served.close()


def test_a_refused_update_changes_nothing(
    served: Served, long_model: Reference, tmp_path: Path, tolerance: float
) -> None:
    """The odd tensor comes in the middle of other weights. The rollout goes on with the
    old weights and their version, or samples nothing until a whole update came.
    """
    other = moved(long_model, tmp_path / "moved", 2)
    names = list(other.tensors)
    odd = next(name for name in names[len(names) // 2 :] if other.tensors[name].ndim == 2)
    tensors = {**other.tensors, odd: np.ascontiguousarray(other.tensors[odd].reshape(-1, 1))}
    version, request = served.edge.version, Request(PROMPTS[0], 8, seed=1)

    with pytest.raises(WeightSyncError):
        served.push(stream(other, tensors))
    try:
        (done,) = generate(served, [request])
    except CouplerError:
        done = None  # It says that it has no weights.
    if done is not None:
        assert set(done.versions) == {version}, (
            f"expected version {version}, since the update after it was refused, came "
            f"{set(done.versions)}"
        )
        off = error(long_model, request, done)
        assert off < tolerance, (
            f"expected the weights of version {version}, or no sample, since the update after it "
            f"was refused at {odd}; log-probs are off by {off:.4f}"
        )

    served.push(stream(other))
    (done,) = generate(served, [request])
    assert_close(other, request, done, tolerance)


# --- state


def test_sampling_leaves_generators_and_memory_alone(served: Served) -> None:
    """A trainer in the same process has random numbers and memory of its own."""
    requests = [Request(p, 6, seed=i) for i, p in enumerate(PROMPTS * 6)]
    for _ in range(2):
        generate(served, requests)
    before = generators()
    # What leaks goes on to. What a process takes once for all it may take late.
    grown = []
    for _ in range(3):
        start = served.run(served.rollout.host_bytes)
        for _ in range(3):
            generate(served, requests)
        grown.append(served.run(served.rollout.host_bytes) - start)
        if grown[-1] < LEAK_BYTES:
            break

    after = generators()
    assert after == before, (
        "expected global random generators as they were, sampling changed "
        f"{[name for name in before if before[name] != after[name]]}"
    )
    more = min(grown)
    assert more < LEAK_BYTES, (
        f"expected memory to stay, {3 * len(requests)} requests made it grow by {more >> 20} MiB"
    )


def test_updates_leave_memory_alone(served: Served, long_model: Reference) -> None:
    """A run takes thousands of them."""
    request, sizes = Request(PROMPTS[3], 2), []
    for _ in range(UPDATES):
        served.push(stream(long_model))
        generate(served, [request])
        sizes.append(served.run(served.rollout.host_bytes))
    grown = sizes[-1] - sizes[UPDATES // 3]
    assert grown < LEAK_BYTES, (
        f"expected memory to stay, {UPDATES - UPDATES // 3} updates made it grow by "
        f"{grown >> 20} MiB"
    )


def test_a_request_is_left_alone(served: Served) -> None:
    """The completion is made of plain numbers, and what was asked stays as it was."""
    request = Request(PROMPTS[0], 5, 0.8, (1, 2), seed=9)
    copy = replace(request)
    (done,) = generate(served, [request])
    assert request == copy, f"expected the request to stay {copy}, it became {request}"
    kinds = (
        {type(number) for number in (*done.tokens, *done.versions)},
        {type(number) for number in done.logprobs},
    )
    assert kinds == ({int}, {float}), f"expected int and float, came {kinds}"
