"""Check what every rollout must do. Laws 2 to 4: the meaning of log-probs, the receipt
of a weight update, the version of a token.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coupler.errors import CouplerError, WeightSyncError
from coupler.interfaces import Completion, InFlight, Memory, Named, Request
from coupler.plugins.manager import Plugins
from coupler.testing import expect
from coupler.testing.edge import Served, amid_tokens
from coupler.testing.models import EOS, NUM_SPECIAL, VOCAB, rewrite
from coupler.testing.reference import Reference, as_batch
from coupler.testing.subject import Subject
from coupler.worker.worker import reverse_elements

CHANGED = 1e-2  # nats: what another weight changes log-probs by, at least
POSITIONS = 256  # of the kit's models
SLOWEST = 100  # tokens/s of a rollout that samples one request at a time, beside other work
LONG = 200  # tokens of a completion that is still running when something happens
PROMPTS = tuple(
    tuple(np.random.default_rng(size).integers(NUM_SPECIAL, VOCAB, size).tolist())
    for size in (3, 1, 9, 5)
)


@pytest.fixture(scope="module")
def start(rollout_subject: Subject, reference: Reference) -> Iterator[Callable[..., Served]]:
    """Start a rollout on a transport, once: engines take long to start."""
    served: dict[str, Served] = {}

    def make(transport: str = "disk") -> Served:
        if transport not in served:
            backend = Plugins.load().get("transport", transport)
            served[transport] = Served(rollout_subject.create(reference.folder), backend)
        return served[transport]

    yield make
    for each in served.values():
        each.close()


@pytest.fixture(scope="module")
def dummy(start: Callable[..., Served]) -> tuple[Served, list[Completion]]:
    """Start a rollout, and keep what it sampled before any update."""
    served = start()
    return served, generate(served, [Request(p, 8, seed=i) for i, p in enumerate(PROMPTS)])


@pytest.fixture
def served(dummy: tuple[Served, list[Completion]], reference: Reference) -> Served:
    """Return the rollout with the true weights, running."""
    served, _ = dummy
    served.push(stream(reference))
    return served


@pytest.fixture
def flat(served: Served, reference: Reference) -> Served:
    """Return the rollout with a head so small that every token is about as likely."""
    head = {name: tensor / 50 for name, tensor in reference.tensors.items() if "head" in name}
    assert head, "this test needs a model with a head of its own"
    served.push(stream(reference, {**reference.tensors, **head}))
    return served


def stream(reference: Reference, tensors: dict[str, np.ndarray] | None = None) -> Iterator[Named]:
    for name, tensor in (reference.tensors if tensors is None else tensors).items():
        yield name, reference.carried(tensor)


def moved(reference: Reference, folder: Path, seed: int) -> Reference:
    """Write the same model with other weights, as training makes them."""
    random = np.random.default_rng(seed)
    tensors = {
        n: t + random.normal(0, 0.05, t.shape).astype(np.float32)
        for n, t in reference.tensors.items()
    }
    return type(reference)(rewrite(reference.folder, folder, tensors))


def generate(served: Served, requests: list[Request]) -> list[Completion]:
    async def together() -> list[Completion]:
        return await asyncio.gather(*(served.rollout.generate(r) for r in requests))

    asked = sum(request.max_tokens for request in requests)
    return served.run(together, deadline_s=120.0 + asked / SLOWEST)


def error(reference: Reference, request: Request, done: Completion) -> float:
    """Return the largest difference between the log-probs that came back and the
    reference's.
    """
    want = reference.logprobs_of(request.prompt, done.tokens, request.temperature)
    return float(np.abs(want - done.logprobs).max())


def worst(served: Served, reference: Reference) -> float:
    """Return the largest log-prob error over fresh completions of every prompt."""
    requests = [Request(p, 6, seed=i) for i, p in enumerate(PROMPTS)]
    return max(
        error(reference, r, d) for r, d in zip(requests, generate(served, requests), strict=True)
    )


# --- weights


def test_it_starts_with_dummy_weights(
    dummy: tuple[Served, list[Completion]], reference: Reference
) -> None:
    """A rollout that reads the checkpoint looks right until the first update that fails
    silently.
    """
    _, samples = dummy
    differences = [
        error(reference, Request(p, 8), d) for p, d in zip(PROMPTS, samples, strict=True)
    ]
    assert max(differences) > 0.1, "it samples from the checkpoint, though no weights were sent"


def test_it_serves_the_weights_of_its_folder(
    rollout_subject: Subject, reference: Reference, every_model: None, tolerance: float
) -> None:
    """A judge has weights of its own, and no engine sends them."""
    if not rollout_subject.has("model:own_weights"):
        pytest.skip(f"{rollout_subject} does not declare model:own_weights")
    rollout = rollout_subject.create(reference.folder, own_weights=True)
    served = Served(rollout, Plugins.load().get("transport", "disk"))

    try:
        expect.below(
            worst(served, reference),
            tolerance,
            "the log-prob error of a rollout with the weights of its folder",
        )
    finally:
        served.close()


@pytest.mark.parametrize("transport", ["disk", "inproc"])
def test_an_update_brings_every_weight(
    dummy: tuple[Served, list[Completion]],
    start: Callable[..., Served],
    rollout_subject: Subject,
    reference: Reference,
    every_model: None,
    transport: str,
    tolerance: float,
) -> None:
    """The receipt accounts for each tensor. A permuted push shows, and the true one
    after it repairs it all.
    """
    if transport == "inproc" and rollout_subject.has("workers:remote"):
        pytest.skip(f"{rollout_subject} declares workers:remote")
    served = start(transport)
    num_bytes = sum(t.nbytes for t in reference.tensors.values())

    for permuted in (True, False, True, False):
        weights = ((n, reverse_elements(t) if permuted else t) for n, t in stream(reference))
        sent, receipt = served.push(weights, permuted=permuted)
        counts = (sent.num_tensors, receipt.num_received, receipt.num_loaded)
        expect.same(
            counts, (len(reference.tensors),) * 3, "tensors that were (sent, received, loaded)"
        )
        expect.same(
            (sent.num_bytes, receipt.num_bytes),
            (num_bytes, num_bytes),
            "bytes that were (sent, received)",
        )
        expect.same((receipt.missing, receipt.unexpected), ((), ()), "(missing, unexpected)")
        expect.same(receipt.version, served.edge.version, "the version of the receipt")
        off = worst(served, reference)
        if permuted:
            expect.above(off, 0.1, "the log-prob error after a permuted push")
        else:
            expect.below(off, tolerance, "the log-prob error after a push")


def test_every_single_tensor_arrives(
    served: Served, reference: Reference, tolerance: float
) -> None:
    """One tensor at a time is scrambled. A tensor that is skipped, or served from a
    stale copy, gives the same log-probs.
    """
    request = Request(PROMPTS[2], 4, seed=5)
    random = np.random.default_rng(0)

    for name, tensor in reference.tensors.items():
        scrambled = tensor + random.normal(0, 1, tensor.shape).astype(np.float32)
        served.push(stream(reference, {**reference.tensors, name: scrambled}))
        assert error(reference, request, generate(served, [request])[0]) > CHANGED, (
            f"{name} changed nothing"
        )
    served.push(stream(reference))
    expect.below(
        error(reference, request, generate(served, [request])[0]),
        tolerance,
        "the log-prob error after all tensors came again",
    )


def test_other_weights_give_other_logprobs(
    served: Served, reference: Reference, tmp_path: Path, tolerance: float
) -> None:
    """Log-probs follow each of three updates in a row, as training makes them, and
    every token says its version.
    """
    weights = reference

    for i in range(3):
        weights = moved(weights, tmp_path / str(i), i)
        served.push(stream(weights))
        expect.below(worst(served, weights), tolerance, f"the log-prob error after update {i}")
        expect.above(
            worst(served, reference),
            CHANGED,
            f"the distance from the first weights after update {i}",
        )
        done = generate(served, [Request(PROMPTS[0], 4)])[0]
        expect.same(set(done.versions), {served.edge.version}, "the versions of the tokens")


def test_a_missing_tensor_is_named(served: Served, reference: Reference) -> None:
    dropped = sorted(n for n in reference.tensors if "norm" in n or "bias" in n)[-1]
    _, receipt = served.push(
        stream(reference, {n: t for n, t in reference.tensors.items() if n != dropped})
    )
    expect.same(receipt.missing, (dropped,), "missing, of an update without one tensor,")
    expect.same(
        (receipt.num_loaded, receipt.num_received),
        (len(reference.tensors) - 1,) * 2,
        "(loaded, received) of an update without one tensor",
    )


def test_an_unexpected_tensor_is_named(
    served: Served, reference: Reference, tolerance: float
) -> None:
    extra = "model.layers.99.nobody.weight"
    _, receipt = served.push(
        stream(reference, {**reference.tensors, extra: np.zeros(4, np.float32)})
    )
    expect.same(receipt.unexpected, (extra,), "unexpected, of an update with one tensor more,")

    expect.same(
        (receipt.missing, receipt.num_loaded),
        ((), len(reference.tensors)),
        "(missing, loaded) of an update with one tensor more",
    )
    expect.below(
        worst(served, reference),
        tolerance,
        "the log-prob error after an update with one tensor more",
    )


def test_a_tensor_of_another_shape_is_refused(
    served: Served, reference: Reference, tolerance: float
) -> None:
    """The error has its name, also where as many elements would fit. The right tensor
    is taken after it.
    """
    odd = max((name for name, tensor in reference.tensors.items() if tensor.ndim == 2), key=len)
    turned = np.ascontiguousarray(reference.tensors[odd].reshape(-1, 1))
    for _ in range(2):  # before and after all of it came once
        with pytest.raises(WeightSyncError, match=re.escape(odd)):
            served.push(stream(reference, {**reference.tensors, odd: turned}))
        served.push(stream(reference))
        expect.below(
            worst(served, reference),
            tolerance,
            "the log-prob error after the update that followed a refused one",
        )


# --- sampling


def test_greedy_is_the_most_likely(served: Served, reference: Reference, tolerance: float) -> None:
    """Two log-probs that are each off by the tolerance may change places."""
    requests = [Request(p, 12, 0.0) for p in PROMPTS]

    for request, done in zip(requests, generate(served, requests), strict=True):
        expect.below(
            shortfall(reference, request, done),
            2 * tolerance,
            "the nats between the most likely token and that of temperature 0",
        )
        expect.same(len(done.tokens), 12, "the number of tokens")
        expect.same(done.finish, "length", "the finish of a completion of max_tokens")


def shortfall(reference: Reference, request: Request, done: Completion) -> float:
    """Return how many nats a token is at most below the most likely one, each after
    those that came before it.
    """
    batch = as_batch(request.prompt, done.tokens, 1.0)
    log_p = reference.distributions(batch)[len(request.prompt) :]
    chosen = log_p[np.arange(len(done.tokens)), list(done.tokens)]
    return float((log_p.max(-1) - chosen).max())


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5])
def test_logprobs_are_of_the_sampling_distribution(
    served: Served, reference: Reference, temperature: float, tolerance: float
) -> None:
    """Log-probs are taken after the temperature, over the full support, for concurrent
    requests of different lengths.
    """
    requests = [Request(p, 3 + 4 * i, temperature, seed=i) for i, p in enumerate(PROMPTS)]
    for request, done in zip(requests, generate(served, requests), strict=True):
        sizes = (len(done.tokens), len(done.logprobs), len(done.versions))
        expect.same(sizes, (request.max_tokens,) * 3, "the number of (tokens, log-probs, versions)")
        expect.below(
            error(reference, request, done),
            tolerance,
            f"the log-prob error at temperature {temperature:g}",
        )


def test_samples_follow_the_distribution_they_report(served: Served, reference: Reference) -> None:
    """The mean of -log p over samples is the entropy. A hidden top-k, top-p or penalty
    makes it smaller.
    """
    temperature, num_samples = 2.0, 256
    done = generate(
        served, [Request(PROMPTS[0], 1, temperature, seed=i) for i in range(num_samples)]
    )
    surprise = -np.array([d.logprobs[0] for d in done])
    entropy = reference.outputs(as_batch(PROMPTS[0], (0,), temperature))["entropy"][-1]
    off = abs(surprise.mean() - entropy) / (surprise.std() / np.sqrt(num_samples))
    expect.below(
        off, 4.5, "the standard deviations between the mean surprise of samples and the entropy"
    )


def test_top_p_keeps_the_most_likely_tokens(
    served: Served, reference: Reference, rollout_subject: Subject, tolerance: float
) -> None:
    """The fewest tokens that together have so much stay, and log-probs are of these. A
    request beside it has all of them.
    """
    if not rollout_subject.has("sampling:top_p"):
        pytest.skip(f"{rollout_subject} does not declare sampling:top_p")
    temperature, prompt = 2.0, PROMPTS[0]
    every = np.array(
        [reference.logprobs_of(prompt, (token,), temperature)[0] for token in range(VOCAB)]
    )
    mass = np.exp(np.sort(every)[::-1]).cumsum()

    for top_p in (1e-6, 0.5, 0.9):
        # Rounding may move a token over the edge.
        least, most = (
            int(np.searchsorted(mass[:-1], top_p + slack)) for slack in (-tolerance, tolerance)
        )
        requests = [
            Request(prompt, 1, temperature, seed=i, top_p=top_p if i % 4 else 1.0)
            for i in range(64)
        ]
        sampled: set[int] = set()
        for request, done in zip(requests, generate(served, requests), strict=True):
            (token,), (logprob,) = done.tokens, done.logprobs
            totals = np.zeros(2)
            if request.top_p < 1:
                sampled.add(token)
                totals = np.log(mass[[most, least]])
                ahead = int((every > every[token] + 2 * tolerance).sum())
                expect.holds(ahead <= most, f"at most {most} tokens ahead of a sampled one", ahead)
            low, high = every[token] - totals + (-tolerance, tolerance)
            expect.holds(
                low <= logprob <= high,
                f"a log-prob from {low:.4f} to {high:.4f} under top_p={request.top_p:g}",
                logprob,
            )
        expect.holds(
            len(sampled) > 1 or least == 0,
            f"several of {least + 1} tokens under top_p={top_p:g}",
            sampled,
        )


def check_kept(
    log_p: np.ndarray, ids: set[int], top_k: int, top_p: float, tolerance: float
) -> None:
    """Fail unless ``ids`` are the ``top_k`` most likely ones, or the fewest of them
    with ``top_p`` of their probability, as far as the tolerance tells.
    """
    kept = log_p[sorted(ids)]
    outside = np.delete(log_p, sorted(ids)).max(initial=-np.inf)
    expect.below(
        outside - kept.min(),
        2 * tolerance,
        "the nats of an id outside a mask above one inside",
    )
    candidates = np.sort(log_p)[::-1][:top_k]
    if top_p >= 1:
        expect.same(len(ids), len(candidates), f"the ids of top_k={top_k}")
        return

    share = np.exp(kept - np.logaddexp.reduce(candidates))
    expect.above(share.sum() + tolerance, top_p, "the probability of a mask")
    expect.below(
        share.sum() - share.min() - tolerance,
        top_p,
        "the probability without the last id",
    )


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(2, 1.0), (9, 1.0), (9, 0.6), (VOCAB, 0.5), (VOCAB + 9, 1.0)]
)
def test_a_sampling_mask_has_the_ids_that_a_token_was_sampled_among(
    served: Served,
    reference: Reference,
    rollout_subject: Subject,
    tolerance: float,
    top_k: int,
    top_p: float,
) -> None:
    """They are the most likely ones, and log-probs are of these. A request beside it
    has all of them and no mask.
    """
    if not rollout_subject.has("output:sampling_mask"):
        pytest.skip(f"{rollout_subject} does not declare output:sampling_mask")
    temperature = 2.0
    requests = []
    for i in range(24):
        request = Request(PROMPTS[i % len(PROMPTS)], 3 + i % 3, temperature, seed=i)
        if i % 4:
            request = replace(request, top_k=top_k, top_p=top_p)
        requests.append(request)

    for request, done in zip(requests, generate(served, requests), strict=True):
        mask = done.sampling_mask
        if not request.top_k:
            assert mask is None, "nobody asked"
            continue
        assert mask is not None, "a mask was asked for, and none came"
        expect.same(mask.dtype.kind, "i", "the kind of the mask")
        expect.same(len(mask), len(done.tokens), "the rows of the mask")

        batch = as_batch(request.prompt, done.tokens, temperature)
        every = reference.distributions(batch)[len(request.prompt) :]
        for log_p, token, logprob, row in zip(
            every,
            done.tokens,
            done.logprobs,
            mask,
            strict=True,
        ):
            ids = {*row[row >= 0].tolist()}
            check_kept(log_p, ids, top_k, top_p, tolerance)
            expect.holds(token in ids, f"the sampled token among {sorted(ids)}", token)
            total = np.logaddexp.reduce(log_p[sorted(ids)])
            expect.near(
                logprob,
                log_p[token] - total,
                f"the log-prob among {len(ids)} ids",
                abs_=tolerance,
            )


def test_a_stop_token_ends_the_completion_and_belongs_to_it(flat: Served) -> None:
    """Also where it is the last token that there is room for."""
    stop = tuple(range(0, VOCAB, 8))
    asked = [
        Request(
            prompt,
            max_tokens=6,
            temperature=1.0,
            stop=stop,
            seed=i,
        )
        for i, prompt in enumerate(PROMPTS * 6)
    ]
    done = generate(flat, asked)
    check_ends(asked, done)

    expect.same(
        {each.finish for each in done},
        {"stop", "length"},
        "the finishes of completions of which some stop",
    )

    short = [
        replace(request, max_tokens=len(each.tokens))
        for request, each in zip(asked, done, strict=True)
    ]
    check_ends(short, generate(flat, short))


def check_ends(asked: list[Request], done: list[Completion]) -> None:
    """Check that each completion ends at its first stop token, or with its room."""
    for request, each in zip(asked, done, strict=True):
        assert not set(each.tokens[:-1]) & set(request.stop), "sampled on after a stop token"
        ended = each.tokens[-1] in request.stop
        room = request.max_tokens

        expect.same(
            each.finish,
            "stop" if ended else "length",
            f"the finish of {len(each.tokens)} of {room} tokens that end with {each.tokens[-1]}",
        )
        expect.holds(
            ended or len(each.tokens) == room,
            f"{room} tokens, or a stop token at the end",
            each.tokens,
        )


def test_only_the_stop_tokens_of_the_request_stop(flat: Served) -> None:
    """The end-of-sequence token of a configuration file does not: a distribution that
    is nearly flat comes across it.
    """
    (at_once,) = generate(flat, [Request(PROMPTS[0], 6, stop=tuple(range(VOCAB)))])
    expect.same(len(at_once.tokens), 1, "the number of tokens where every token stops")

    asked = [
        Request(
            prompt,
            max_tokens=200,
            seed=i,
        )
        for i, prompt in enumerate(PROMPTS * 6)
    ]
    done = generate(flat, asked)
    assert any(EOS in each.tokens[:-1] for each in done), "this test must sample it"
    expect.same(
        {len(each.tokens) for each in done}, {200}, "the lengths of completions without stop tokens"
    )


def test_one_free_position_gives_one_token(
    served: Served, reference: Reference, rollout_subject: Subject, tolerance: float
) -> None:
    """No free position is an error: a completion is never empty."""
    if rollout_subject.toy:
        pytest.skip("a bigram has no positions")
    longest = tuple(range(NUM_SPECIAL, NUM_SPECIAL + POSITIONS))
    request = Request(longest[:-1], 50, seed=1)
    (done,) = generate(served, [request])
    expect.same(
        (len(done.tokens), done.finish),
        (1, "length"),
        "(tokens, finish) where one position is free",
    )
    expect.below(
        error(reference, request, done), tolerance, "the log-prob error in the last position"
    )

    with pytest.raises(CouplerError, match=f"a prompt has {POSITIONS} tokens"):
        generate(served, [Request(longest, 1)])


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request((), 1), "a prompt has 0 tokens"),
        (Request((7,), 0), "wants 0 tokens"),
        (Request((7, VOCAB), 1), "ids"),
    ],
)
def test_malformed_requests_are_refused(
    served: Served, rollout_subject: Subject, request_: Request, message: str
) -> None:
    if rollout_subject.toy:
        pytest.skip("nothing but this kit makes requests for it")
    with pytest.raises(CouplerError, match=message):
        generate(served, [request_])


def test_a_request_is_all_that_it_is_asked(served: Served) -> None:
    """No rollout accepts audio, arguments of a processor or a priority that another one
    drops.
    """
    expect.same(
        list(signature(served.rollout.generate).parameters),
        ["request"],
        "the parameters of generate()",
    )
    with pytest.raises(TypeError, match="priority"):
        Request((7,), 1, priority=3)  # type: ignore[call-arg]


def test_routes_have_a_row_for_every_token(
    served: Served, reference: Reference, rollout_subject: Subject
) -> None:
    """Routes are [prompt + tokens, layers, topk]. The last token was never fed, and
    nobody else returns any.
    """
    request = Request(PROMPTS[2], 5, seed=3)
    plain, asked = generate(served, [request, replace(request, routed_experts=True)])
    assert plain.routed_experts is None, "nobody asked"

    if not rollout_subject.has("output:routed_experts"):
        assert asked.routed_experts is None, "it does not declare output:routed_experts"
        return
    experts = {
        name.split(".experts.")[1].partition(".")[0]
        for name in reference.tensors
        if ".experts." in name
    }
    if not experts:
        pytest.skip("the model has no experts: --coupler-model moe")
    routes = asked.routed_experts
    expect.same((routes.dtype.kind, routes.ndim), ("i", 3), "(kind, axes) of the routes")
    expect.same(len(routes), len(request.prompt) + len(asked.tokens), "the rows of the routes")
    expect.holds(
        (routes[-1] == -1).all(), "-1 in the row of the last token, which was never fed", routes[-1]
    )
    expect.holds(
        0 <= routes[:-1].min() <= routes.max() < len(experts),
        f"experts from 0 to {len(experts) - 1}",
        (routes[:-1].min(), routes.max()),
    )


def test_the_seed_decides(served: Served) -> None:
    """The same request gives the same tokens, alone or among others. Another seed gives
    others.
    """
    request = Request(PROMPTS[0], 12, 1.5, seed=7)
    alone = generate(served, [request])[0].tokens
    others = [Request(p, 9, 1.5, seed=i) for i, p in enumerate(PROMPTS)]
    expect.same(
        generate(served, [*others, request])[-1].tokens,
        alone,
        "the tokens of a seed among other requests",
    )
    (another,) = generate(served, [Request(PROMPTS[0], 12, 1.5, seed=8)])
    expect.holds(another.tokens != alone, "other tokens of another seed, they are equal")


def test_samples_of_one_prompt_are_independent(
    served: Served, reference: Reference, tolerance: float
) -> None:
    requests = [Request(PROMPTS[2], 10, 1.5, seed=i) for i in range(8)]
    done = generate(served, requests)

    expect.same(
        len({d.tokens for d in done}),
        len(done),
        "the number of different completions of as many seeds",
    )
    off = max(error(reference, r, d) for r, d in zip(requests, done, strict=True))
    expect.below(off, tolerance, "the log-prob error of completions of one prompt")


# --- pausing and memory

# Its prompt is that of a request that runs meanwhile.
LATE = Request(PROMPTS[0], 4, seed=4)


def paused(
    served: Served,
    how: InFlight,
    during: Callable[[], Any],
    delay: float,
    top_k: int = 0,
) -> tuple[list[Completion], Completion]:
    """Pause two long requests, call ``during``, and resume. Return them and ``LATE``,
    which came in while paused.
    """
    rollout = served.rollout
    long = [Request(prompt, LONG, seed=3, top_k=top_k) for prompt in PROMPTS[:2]]

    async def story() -> tuple[list[Completion], Completion]:
        running = [asyncio.ensure_future(rollout.generate(request)) for request in long]
        await asyncio.sleep(delay)
        await rollout.pause(how)
        late = asyncio.ensure_future(rollout.generate(LATE))
        await asyncio.sleep(0.05)

        assert not late.done(), "a request was admitted during the pause"
        await during()
        await asyncio.sleep(0.05)
        assert not late.done(), "a request was admitted before resume()"
        await rollout.resume()
        return list(await asyncio.gather(*running)), await late

    return served.run(story)


def interrupted(
    served: Served,
    how: InFlight,
    during: Callable[[], Any],
    hit: Callable[[Completion], bool],
    top_k: int = 0,
) -> tuple[list[Completion], Completion]:
    """Call :func:`paused` until both requests are hit."""
    return amid_tokens(
        lambda delay: paused(served, how, during, delay, top_k),
        lambda found: all(hit(done) for done in found[0]),
    )


def test_drain_waits_for_what_runs(served: Served, reference: Reference) -> None:
    """The test pauses at several moments, since a quick rollout may be done by the time
    of a late one.
    """
    for delay in (0.05, 0.003, 0.001):
        before = served.edge.version
        running, late = paused(
            served, InFlight.DRAIN, lambda: served.edge.push(stream(reference)), delay
        )

        for done in running:
            found = (done.finish, len(done.tokens), len(set(done.versions)))
            expect.same(
                found,
                ("length", LONG, 1),
                "(finish, tokens, versions) of a request that is drained",
            )
            assert done.versions[0] == before or delay < 0.05, (
                "it was admitted, and then made to wait"
            )
        expect.same(
            set(late.versions), {before + 1}, "the versions of a request that came in the pause"
        )


def test_abort_returns_what_there_is(
    served: Served, reference: Reference, rollout_subject: Subject, tolerance: float
) -> None:
    if not rollout_subject.has("in_flight:abort"):
        pytest.skip(f"{rollout_subject} does not declare in_flight:abort")
    running, late = interrupted(
        served,
        InFlight.ABORT,
        lambda: served.edge.push(stream(reference)),
        lambda done: 0 < len(done.tokens) < LONG,
    )
    expect.same(late.finish, "length", "the finish of a request that came in the pause")

    for prompt, done in zip(PROMPTS[:2], running, strict=True):
        expect.same(done.finish, "abort", "the finish of a request that was aborted")
        sizes = (len(done.logprobs), len(done.versions))
        expect.same(
            sizes, (len(done.tokens),) * 2, "the number of (log-probs, versions), by tokens,"
        )
        expect.same(
            set(done.versions),
            {served.edge.version - 1},
            "the versions of a request that was aborted, before the push,",
        )
        expect.below(
            error(reference, Request(prompt, LONG), done),
            tolerance,
            "the log-prob error of a request that was aborted",
        )


@pytest.mark.parametrize("how", [InFlight.RECOMPUTE, InFlight.STALE_KV])
def test_requests_in_flight_continue_on_new_weights(
    served: Served,
    reference: Reference,
    rollout_subject: Subject,
    tmp_path: Path,
    how: InFlight,
    tolerance: float,
) -> None:
    """Tokens before the update carry the old version and the old log-probs, tokens
    after it the new ones. A request that starts after it reads no cache of before.
    """
    if not rollout_subject.has(f"in_flight:{how}"):
        pytest.skip(f"{rollout_subject} does not declare in_flight:{how}")
    random = np.random.default_rng(9)
    tensors = {
        n: t + random.normal(0, 0.05, t.shape).astype(np.float32)
        for n, t in reference.tensors.items()
    }
    moved = type(reference)(rewrite(reference.folder, tmp_path / "moved", tensors))
    models = {served.edge.version: reference}

    async def switch() -> None:
        model = moved if models[served.edge.version] is reference else reference
        await served.edge.push(stream(model))
        models[served.edge.version] = model

    running, late = interrupted(served, how, switch, lambda done: len(set(done.versions)) == 2)
    expect.below(
        error(models[late.versions[0]], LATE, late),
        tolerance,
        "the log-prob error of a request that started after the update",
    )
    for prompt, done in zip(PROMPTS[:2], running, strict=True):
        expect.same(
            (done.finish, len(done.tokens)),
            ("length", LONG),
            "(finish, tokens) of a request that went on",
        )
        expect.same(list(done.versions), sorted(done.versions), "the versions, which never fall,")
        for version in set(done.versions):
            of_version = np.array(done.versions) == version
            # After an update, a stale cache is of neither model.
            if how is InFlight.RECOMPUTE or version == min(done.versions):
                want = models[version].logprobs_of(prompt, done.tokens, 1.0)
                assert np.abs(want - done.logprobs)[of_version].max() < tolerance, (
                    f"log-probs of version {version}"
                )


@pytest.mark.parametrize("how", [InFlight.RECOMPUTE, InFlight.STALE_KV])
def test_every_token_of_a_request_in_flight_has_its_mask(
    served: Served, reference: Reference, rollout_subject: Subject, how: InFlight
) -> None:
    needed = ("output:sampling_mask", f"in_flight:{how}")
    if not all(map(rollout_subject.has, needed)):
        pytest.skip(f"{rollout_subject} does not declare {' and '.join(needed)}")
    running, _ = interrupted(
        served,
        how,
        lambda: served.edge.push(stream(reference)),
        lambda done: len(set(done.versions)) == 2,
        top_k=5,
    )

    for done in running:
        mask = done.sampling_mask
        assert mask is not None, "a mask was asked for, and none came"
        expect.same(len(mask), len(done.tokens), "the rows of a mask over two stays")
        tokens = np.array(done.tokens)[:, None]
        expect.holds((mask == tokens).any(1).all(), "every token in its row of the mask")
        expect.same({*(mask >= 0).sum(1).tolist()}, {5}, "the numbers of ids in a mask")


def test_memory_comes_and_goes_by_part(
    served: Served, reference: Reference, rollout_subject: Subject
) -> None:
    """The cache goes alone, with the weights as they were. Then all of it goes, and is
    back in the order of a sync.
    """
    if not rollout_subject.has("memory:sleep"):
        pytest.skip(f"{rollout_subject} does not declare memory:sleep")
    rollout, request = served.rollout, Request(PROMPTS[0], 8, seed=1)
    (before,) = generate(served, [request])

    async def refused() -> None:
        with pytest.raises(CouplerError, match=r"(?s)sleep.*wake\(\) before"):
            await rollout.generate(request)

    async def story() -> None:
        await rollout.pause(InFlight.DRAIN)
        await rollout.sleep(frozenset({Memory.KV_CACHE}))
        await rollout.resume()
        await refused()
        await rollout.wake(frozenset({Memory.KV_CACHE}))

        again = await rollout.generate(request)
        expect.same(again.tokens, before.tokens, "the tokens after the cache slept")
        await rollout.pause(InFlight.DRAIN)
        await rollout.sleep(frozenset(Memory))
        with pytest.raises(CouplerError, match="sleep"):
            await rollout.update(None)  # type: ignore[arg-type]  # refused before it is looked at
        await rollout.wake(frozenset({Memory.WEIGHTS}))
        await served.edge.push(stream(reference))
        await rollout.resume()
        await refused()
        await rollout.wake(frozenset({Memory.KV_CACHE}))
        again = await rollout.generate(request)
        expect.same(again.tokens, before.tokens, "the tokens after everything slept")

    served.run(story)


def test_memory_comes_back_with_an_update(
    served: Served, reference: Reference, rollout_subject: Subject, tmp_path: Path, tolerance: float
) -> None:
    """The update brings other weights than those that slept. A rollout that gives
    nothing back could otherwise skip it.
    """
    if not rollout_subject.has("memory:sleep"):
        pytest.skip(f"{rollout_subject} does not declare memory:sleep")
    everything = frozenset(Memory)

    async def samples() -> None:
        await served.rollout.resume()
        await served.rollout.generate(Request(PROMPTS[0], 1))

    async def refused() -> None:
        await served.rollout.pause(InFlight.DRAIN)
        await served.rollout.sleep(everything)
        with pytest.raises(CouplerError, match=r"(?s)sleep.*wake\(\) before"):
            await samples()

    served.run(refused)
    for weights in (moved(reference, tmp_path / "moved", 0), reference):

        async def nap(weights: Reference = weights) -> None:
            await served.rollout.pause(InFlight.DRAIN)
            await served.rollout.sleep(everything)
            await served.rollout.wake(everything)
            await served.edge.push(stream(weights))
            await served.rollout.resume()

        served.run(nap)
        expect.below(
            worst(served, weights), tolerance, "the log-prob error after sleeping and an update"
        )
