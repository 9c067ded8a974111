"""Rollouts with one fault each: log-probs, sampling, versions, loading, sleeping."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import numpy as np
from tests.faults.faulty import fault

from coupler.errors import CouplerError, WeightSyncError
from coupler.interfaces import Completion, InFlight, Memory, Rank, Request, SyncReceipt
from coupler.system.seeding import stream
from coupler.testing.models import EOS, VOCAB
from coupler.testing.toy import ToyRollout, kept_ids, log_softmax, most_likely, nucleus

NOTHING: frozenset[Memory] = frozenset()


class Hooked(ToyRollout):
    """The toy rollout, with a method for each thing that may go wrong in it."""

    async def setup(self, rank: Rank) -> int:
        self.asleep = NOTHING
        self.updates, self.served = 0, 0
        self.prompts: dict[tuple[int, ...], int] = {}
        self.old: dict[str, np.ndarray] = {}
        return await super().setup(rank)

    def scores(self, request: Request, tokens: list[int]) -> np.ndarray:
        """Return the [V] log-probs of the policy."""
        last = np.array([(*request.prompt, *tokens)[-1]])
        return log_softmax(self.weights, last, request.temperature or 1.0)[0]

    def drawn(self, log_p: np.ndarray, request: Request, tokens: list[int]) -> np.ndarray:
        """Return the [V] log-probs to sample from, which need not add up to 1."""
        return log_p

    def choose(self, log_p: np.ndarray, request: Request, tokens: list[int], draw: Any) -> int:
        if request.temperature == 0:
            return int(log_p.argmax())
        p = np.exp(log_p - log_p.max())
        return int(draw.choice(len(p), p=p / p.sum()))

    def told(self, log_p: np.ndarray, request: Request, tokens: list[int]) -> float:
        """Return the log-prob to report of the last of ``tokens``."""
        return float(log_p[tokens[-1]])

    def draws(self, request: Request) -> Any:
        return stream(request.seed, "toy")

    def stops(self, request: Request, tokens: list[int]) -> bool:
        return tokens[-1] in request.stop

    def limit(self, request: Request) -> int:
        return request.max_tokens

    def done(self, request: Request, completion: Completion) -> Completion:
        """Return what the request gets."""
        return completion

    async def generate(self, request: Request) -> Completion:
        self.awake()
        self.served += 1
        self.prompts[request.prompt] = self.prompts.get(request.prompt, 0) + 1
        return self.done(request, await super().generate(request))

    def awake(self) -> None:
        if self.asleep:
            raise CouplerError("memory sleeps: call wake() before generate().")

    async def _sample(self, request: Request) -> Completion:
        draw = self.draws(request)
        tokens: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        masks: list[np.ndarray] = []
        finish = "length"

        while len(tokens) < self.limit(request):
            await asyncio.sleep(0)
            await self.samples.wait()
            if self.aborting:
                finish = "abort"
                break
            log_p = self.scores(request, tokens)
            if request.top_k:
                log_p = most_likely(log_p, request.top_k)
            if request.top_p < 1:
                log_p = nucleus(log_p, request.top_p)
            at = self.drawn(log_p, request, tokens)
            tokens.append(self.choose(at, request, tokens, draw))
            logprobs.append(self.told(log_p, request, tokens))
            versions.append(self.version)
            masks.append(kept_ids(log_p, request.top_k))
            if self.stops(request, tokens):
                finish = "stop"
                break
        mask = np.stack(masks) if request.top_k and masks else None
        return Completion(
            tuple(tokens), tuple(logprobs), tuple(versions), finish, sampling_mask=mask
        )

    async def update(self, update: Any) -> SyncReceipt:
        if Memory.WEIGHTS in self.asleep:
            raise CouplerError("weights sleep: call wake() before update().")
        self.old, before = dict(self.weights), self.version
        receipt = await super().update(update)
        self.updates += 1
        self.loaded(before)
        return receipt

    def loaded(self, before: int) -> None:
        """Meddle with weights that have just come. ``self.old`` are those before."""

    async def sleep(self, what: frozenset[Memory]) -> None:
        self.asleep |= what
        if Memory.WEIGHTS in what:
            self.weights = {name: np.zeros_like(w) for name, w in self.weights.items()}

    async def wake(self, what: frozenset[Memory]) -> None:
        self.asleep -= what


@fault("rollout")
def honest() -> type:
    return type("Honest", (Hooked,), {})


def other(log_p: np.ndarray) -> np.ndarray:
    """Return log-probs of the same tokens under a temperature of 1.5."""
    z = log_p / 1.5
    return z - np.logaddexp.reduce(z)


# --- log-probs


def telling(told: Any) -> type:
    """Make a rollout that reports ``told(self, log_p, request, tokens)``."""
    return type("Telling", (Hooked,), {"told": told})


WRONG = {
    "raw": lambda s, p, r, t: float(
        log_softmax(s.weights, np.array([(*r.prompt, *t)[-2]]), 1.0)[0, t[-1]]
    ),
    "probability": lambda s, p, r, t: float(np.exp(p[t[-1]])),
    "log2": lambda s, p, r, t: float(p[t[-1]] / np.log(2)),
    "log10": lambda s, p, r, t: float(p[t[-1]] / np.log(10)),
    "positive": lambda s, p, r, t: -float(p[t[-1]]),
    "constant": lambda s, p, r, t: -1.0,
    "zero": lambda s, p, r, t: 0.0,
    "of_the_best": lambda s, p, r, t: float(p.max()),
    "relative_to_the_best": lambda s, p, r, t: float(p[t[-1]] - p.max()),
    "float16": lambda s, p, r, t: float(np.float16(p[t[-1]])),
    "two_decimals": lambda s, p, r, t: round(float(p[t[-1]]), 2),
    "cumulative": lambda s, p, r, t: float(p[t[-1]]) * len(t),
    "of_the_next_id": lambda s, p, r, t: float(p[(t[-1] + 1) % VOCAB]),
    "numpy": lambda s, p, r, t: p[t[-1]],
    "nan_if_rare": lambda s, p, r, t: float(p[t[-1]]) if p[t[-1]] > -9 else float("nan"),
    "tempered_twice": lambda s, p, r, t: float(_tempered(p, r.temperature or 1.0)[t[-1]]),
}


def _tempered(log_p: np.ndarray, temperature: float) -> np.ndarray:
    z = log_p / temperature
    return z - np.logaddexp.reduce(z)


@fault("rollout", how=tuple(WRONG))
def logprobs_wrong(how: str) -> type:
    return telling(WRONG[how])


# Nothing samples a token of -12 nats in time.
@fault("rollout", low=(-4.0, -8.0))
def logprobs_clamped(low: float) -> type:
    return telling(lambda s, p, r, t: max(low, float(p[t[-1]])))


@fault("rollout", k=(5, 20, 100, 300))
def logprobs_of_top_k(k: int) -> type:
    def told(self: Hooked, p: np.ndarray, request: Request, tokens: list[int]) -> float:
        return float(p[tokens[-1]] - np.logaddexp.reduce(np.sort(p)[-k:]))

    return telling(told)


@fault("rollout", by=(1, -1))
def logprobs_shifted(by: int) -> type:
    def done(self: Hooked, request: Request, c: Completion) -> Completion:
        return replace(c, logprobs=tuple(np.roll(c.logprobs, by).tolist()))

    return type("Shifted", (Hooked,), {"done": done})


def where(hit: Any, altered: Any = other) -> type:
    """Make a rollout that reports another log-prob where ``hit``, and samples right."""

    def told(self: Hooked, p: np.ndarray, request: Request, tokens: list[int]) -> float:
        return float((altered(p) if hit(self, request, tokens) else p)[tokens[-1]])

    return telling(told)


@fault("rollout", past=(16, 32, 64, 100, 128, 160, 190))
def logprobs_past_a_completion_of(past: int) -> type:
    return where(lambda s, r, t: len(t) > past)


@fault("rollout", past=(64, 128, 256, 384, 512, 640, 800))
def logprobs_past_a_position_of(past: int) -> type:
    return where(lambda s, r, t: len(r.prompt) + len(t) > past)


@fault("rollout", size=(8, 16, 64, 128, 256))
def logprobs_at_the_start_of_a_block_of(size: int) -> type:
    return where(lambda s, r, t: (len(r.prompt) + len(t)) % size == 0)


@fault("rollout", size=(16, 64, 128, 256, 512))
def logprobs_after_prompts_of_whole_blocks_of(size: int) -> type:
    return where(lambda s, r, t: len(r.prompt) % size == 0 and len(t) == 1)


@fault("rollout", above=(64, 200, 256, 500, 600))
def logprobs_after_prompts_above(above: int) -> type:
    return where(lambda s, r, t: len(r.prompt) > above and len(t) <= 2)


@fault("rollout", more=(4, 16, 32, 64, 128, 256))
def logprobs_in_batches_above(more: int) -> type:
    return where(lambda s, r, t: s.active > more)


@fault("rollout", tokens=(1, 4))
def logprobs_of_a_prompt_that_came_before(tokens: int) -> type:
    return where(lambda s, r, t: s.prompts[r.prompt] > 1 and len(t) <= tokens)


@fault("rollout", served=(50, 200, 400))
def logprobs_after_requests(served: int) -> type:
    return where(lambda s, r, t: s.served > served)


@fault("rollout", where_=("first", "last", "stop"))
def logprobs_zero_at_the(where_: str) -> type:
    def done(self: Hooked, request: Request, c: Completion) -> Completion:
        if where_ == "stop" and c.finish != "stop":
            return c
        index = 0 if where_ == "first" else len(c.tokens) - 1
        logprobs = list(c.logprobs)
        logprobs[index] = 0.0
        return replace(c, logprobs=tuple(logprobs))

    return type("Zero", (Hooked,), {"done": done})


@fault("rollout", low=(100, 200, 300, 316))
def logprobs_of_ids_above(low: int) -> type:
    return where(lambda s, r, t: t[-1] > low)


@fault("rollout", of=(0, 1, 2, 3))
def logprobs_of_a_special_token(of: int) -> type:
    return where(lambda s, r, t: t[-1] == of)


@fault("rollout", below=(0.3, 0.5, 0.8))
def logprobs_below_a_temperature_of(below: float) -> type:
    return where(lambda s, r, t: 0 < r.temperature < below, lambda p: _tempered(p, 1.2))


@fault("rollout", above=(1.2, 1.6))
def logprobs_above_a_temperature_of(above: float) -> type:
    return where(lambda s, r, t: r.temperature > above)


@fault("rollout", missing=("logprobs", "versions"))
def one_is_missing_in(missing: str) -> type:
    def done(self: Hooked, request: Request, c: Completion) -> Completion:
        return replace(c, **{missing: getattr(c, missing)[:-1]})

    return type("Missing", (Hooked,), {"done": done})


# --- the cache of prompts and of weights


@fault("rollout", tokens=(1, 8))
def a_stale_cache_after_an_update(tokens: int) -> type:
    def scores(self: Hooked, request: Request, before: list[int]) -> np.ndarray:
        if self.prompts[request.prompt] > 1 and len(before) < tokens and self.old:
            weights = self.old
        else:
            weights = self.weights
        last = np.array([(*request.prompt, *before)[-1]])
        return log_softmax(weights, last, request.temperature or 1.0)[0]

    return type("Stale", (Hooked,), {"scores": scores})


@fault("rollout", longer=(0, 16, 64, 400))
def a_stale_prefix_after_an_update(longer: int) -> type:
    """The weights that first read a prompt of this length answer it forever."""

    def scores(self: Hooked, request: Request, before: list[int]) -> np.ndarray:
        if len(request.prompt) > longer and not before:
            kept = self.__dict__.setdefault("kept", {})
            return kept.setdefault(
                (request.prompt, request.temperature), Hooked.scores(self, request, before)
            )
        return Hooked.scores(self, request, before)

    return type("Prefix", (Hooked,), {"scores": scores})


@fault("rollout", by=("prompt", "prompt_and_seed"))
def completions_kept_across_updates(by: str) -> type:
    class Kept(Hooked):
        async def generate(self, request: Request) -> Completion:
            kept = self.__dict__.setdefault("kept", {})
            key = request if by == "prompt_and_seed" else replace(request, seed=0)
            if key not in kept:
                kept[key] = await super().generate(request)
            return kept[key]

    return Kept


# --- sampling


def drawing(drawn: Any) -> type:
    """Make a rollout that reports the policy and samples from ``drawn``."""
    return type("Drawing", (Hooked,), {"drawn": drawn})


@fault("rollout", p=(0.5, 0.8, 0.9, 0.95, 0.98))
def hidden_top_p(p: float) -> type:
    return drawing(lambda s, log_p, r, t: nucleus(log_p, p))


@fault("rollout", k=(1, 5, 20, 50))
def hidden_top_k(k: int) -> type:
    return drawing(lambda s, log_p, r, t: np.where(log_p >= np.sort(log_p)[-k], log_p, -np.inf))


@fault("rollout", p=(0.02, 0.05, 0.1))
def hidden_min_p(p: float) -> type:
    return drawing(
        lambda s, log_p, r, t: np.where(log_p >= log_p.max() + np.log(p), log_p, -np.inf)
    )


def _counts(request: Request, tokens: list[int], prompt: bool) -> np.ndarray:
    seen = (*request.prompt, *tokens) if prompt else tokens
    return np.bincount(np.array(seen, int), minlength=VOCAB).astype(float)


@fault("rollout", by=(0.1, 0.3, 1.0), kind=("presence", "frequency"), prompt=(True, False))
def hidden_penalty(by: float, kind: str, prompt: bool) -> type:
    def drawn(s: Hooked, log_p: np.ndarray, r: Request, t: list[int]) -> np.ndarray:
        count = _counts(r, t, prompt)
        return log_p - by * (count if kind == "frequency" else np.minimum(count, 1))

    return drawing(drawn)


@fault("rollout", factor=(0.7, 0.9, 0.95, 1.05, 1.1, 1.4))
def a_temperature_off_by(factor: float) -> type:
    return drawing(lambda s, log_p, r, t: log_p / factor)


@fault("rollout", least=(0.2, 0.5, 0.8))
def a_least_temperature_of(least: float) -> type:
    """It samples at this temperature where less was asked for."""
    return drawing(
        lambda s, p, r, t: p * (r.temperature / least) if 0 < r.temperature < least else p
    )


@fault("rollout", below=(0.3, 0.5, 0.8))
def greedy_below_a_temperature_of(below: float) -> type:
    return drawing(
        lambda s, p, r, t: np.where(p == p.max(), 0.0, -np.inf) if r.temperature < below else p
    )


@fault("rollout", banned=("special", "eos", "odd", "rare"))
def banned_tokens(banned: str) -> type:
    ids = {
        "special": np.arange(VOCAB) < 4,
        "eos": np.arange(VOCAB) == EOS,
        "odd": np.arange(VOCAB) % 2 == 1,
        "rare": np.arange(VOCAB) >= 300,
    }[banned]
    return drawing(lambda s, p, r, t: np.where(ids, -np.inf, p))


@fault("rollout", bias=(0.5, 2.0))
def a_bias_to_the_end(bias: float) -> type:
    return drawing(lambda s, p, r, t: p + bias * (np.arange(VOCAB) == EOS))


@fault("rollout", past=(0, 50, 100, 150))
def hidden_top_k_past(past: int) -> type:
    return drawing(
        lambda s, p, r, t: np.where(p >= np.sort(p)[-5], p, -np.inf) if len(t) >= past else p
    )


@fault("rollout", first=(1, 3))
def greedy_first_tokens(first: int) -> type:
    return drawing(
        lambda s, p, r, t: (
            np.where(p == p.max(), 0.0, -np.inf) if len(t) < first and r.temperature else p
        )
    )


@fault("rollout", size=(1, 2, 3))
def no_repeated_ngram_of(size: int) -> type:
    def drawn(s: Hooked, p: np.ndarray, r: Request, t: list[int]) -> np.ndarray:
        tail = tuple(t[len(t) - size + 1 :]) if size > 1 else ()
        grams = {tuple(t[i : i + size]) for i in range(len(t) - size + 1)}
        banned = [gram[-1] for gram in grams if gram[:-1] == tail]
        p = p.copy()
        p[banned] = -np.inf
        return p

    return drawing(drawn)


@fault("rollout", bits=(4, 6, 8))
def coarse_random_numbers_of_bits(bits: int) -> type:
    def choose(self: Hooked, p: np.ndarray, r: Request, t: list[int], draw: Any) -> int:
        if r.temperature == 0:
            return int(p.argmax())
        point = (np.floor(draw.random() * 2**bits) + 0.5) / 2**bits
        order = np.argsort(-p)
        return int(order[min(np.searchsorted(np.exp(p[order]).cumsum(), point), VOCAB - 1)])

    return type("Coarse", (Hooked,), {"choose": choose})


@fault("rollout", chance=(0.02, 0.1))
def tokens_replaced_after_scoring(chance: float) -> type:
    """It returns another token than it scored, now and then."""

    def done(self: Hooked, request: Request, c: Completion) -> Completion:
        draw = np.random.default_rng(request.seed)
        tokens = [t if draw.random() > chance else int(draw.integers(4, VOCAB)) for t in c.tokens]
        return replace(c, tokens=tuple(tokens))

    return type("Replaced", (Hooked,), {"done": done})


# --- seeds


SEEDS = {
    "entropy": lambda r: np.random.default_rng(),
    "constant": lambda r: stream(0, "toy"),
    "low_bits": lambda r: stream(r.seed % 16, "toy"),
    "sixteen_bits": lambda r: stream(r.seed & 0xFFFF, "toy"),
    "signed_halves": lambda r: stream(r.seed & 0x7FFFFFFF, "toy"),
    "with_the_prompt_alone": lambda r: stream(hash(r.prompt) % 2**31, "toy"),
    "global": lambda r: _Global(),
}


class _Global:
    def choice(self, size: int, p: np.ndarray) -> int:
        return int(np.random.choice(size, p=p))


@fault("rollout", how=tuple(SEEDS))
def seeds(how: str) -> type:
    return type("Seeds", (Hooked,), {"draws": lambda self, request: SEEDS[how](request)})


@fault("rollout", which=("served", "active", "version"))
def seeds_depend_on(which: str) -> type:
    return type(
        "Depends",
        (Hooked,),
        {"draws": lambda self, request: stream(request.seed + getattr(self, which), "toy")},
    )


@fault("rollout", same=(2, 4))
def equal_samples_of_a_prompt(same: int) -> type:
    return type(
        "Equal",
        (Hooked,),
        {"draws": lambda self, request: stream(request.seed // same, "toy")},
    )


@fault("rollout", where_=("random", "numpy"))
def a_global_generator_is_consumed(where_: str) -> type:
    def draws(self: Hooked, request: Request) -> Any:
        (random.random if where_ == "random" else np.random.random)()
        return stream(request.seed, "toy")

    return type("Consumes", (Hooked,), {"draws": draws})


# --- the end of a completion


ENDS = {
    "never": lambda s, r, t: False,
    "eos_too": lambda s, r, t: t[-1] in r.stop or t[-1] == EOS,
    "first_alone": lambda s, r, t: t[-1] in r.stop[:1],
    "in_the_prompt": lambda s, r, t: bool(set(r.stop) & {*r.prompt, *t}),
    "not_at_once": lambda s, r, t: len(t) > 1 and t[-1] in r.stop,
    "after_four": lambda s, r, t: len(t) > 4 and t[-1] in r.stop,
    "one_late": lambda s, r, t: len(t) > 1 and t[-2] in r.stop,
    "on_a_repeat": lambda s, r, t: t[-1] in r.stop or (len(t) > 3 and len(set(t[-4:])) == 1),
    "above_100": lambda s, r, t: t[-1] in r.stop or len(t) >= 100,
}


@fault("rollout", how=tuple(ENDS))
def stops(how: str) -> type:
    return type("Stops", (Hooked,), {"stops": lambda s, r, t: ENDS[how](s, r, t)})


@fault("rollout", by=(1, -1))
def a_limit_off_by(by: int) -> type:
    return type("Off", (Hooked,), {"limit": lambda s, r: max(1, r.max_tokens + by)})


@fault("rollout", most=(16, 64, 128, 192))
def a_hidden_limit_of(most: int) -> type:
    return type("Most", (Hooked,), {"limit": lambda s, r: min(r.max_tokens, most)})


@fault("rollout", how=("stop", "length", "eos", "none"))
def a_finish_that_always_is(how: str) -> type:
    finish: Any = None if how == "none" else how

    def done(self: Hooked, request: Request, c: Completion) -> Completion:
        return replace(c, finish=finish if c.finish != "abort" else c.finish)

    return type("Finish", (Hooked,), {"done": done})


@fault("rollout")
def a_stop_token_in_the_last_place_is_none() -> type:
    """As SGLang 0.5.17 says."""

    def done(self: Hooked, request: Request, c: Completion) -> Completion:
        full = len(c.tokens) == request.max_tokens
        return replace(c, finish="length") if full and c.finish == "stop" else c

    return type("Last", (Hooked,), {"done": done})


@fault("rollout", how=("dropped", "doubled"))
def the_stop_token_is(how: str) -> type:
    def done(self: Hooked, request: Request, c: Completion) -> Completion:
        if c.finish != "stop" or len(c.tokens) < 2:
            return c
        last = slice(0, -1) if how == "dropped" else [*range(len(c.tokens)), -1]
        kept = {
            name: tuple(np.array(getattr(c, name))[last].tolist())
            for name in ("tokens", "logprobs", "versions")
        }
        return replace(c, **kept)

    return type("Stop", (Hooked,), {"done": done})


@fault("rollout", more=(2, 8, 100))
def completions_swapped_in_batches_above(more: int) -> type:
    class Swapped(Hooked):
        async def generate(self, request: Request) -> Completion:
            done = await super().generate(request)
            last = self.__dict__.get("last", done)
            self.last = done
            return last if self.active > more else done

    return Swapped


@fault("rollout", more=(2, 16, 64))
def the_temperature_of_the_first_in_batches_above(more: int) -> type:
    class First(Hooked):
        async def generate(self, request: Request) -> Completion:
            if self.active == 0:
                self.temperature = request.temperature
            if self.active > more:
                request = replace(request, temperature=self.temperature)
            return await super().generate(request)

    return First


@fault("rollout")
def top_p_is_ignored() -> type:
    class Ignores(Hooked):
        async def generate(self, request: Request) -> Completion:
            return await super().generate(replace(request, top_p=1.0))

    return Ignores


@fault("rollout")
def top_p_of_one_is_that_of_all() -> type:
    class Shared(Hooked):
        least = 1.0

        async def generate(self, request: Request) -> Completion:
            self.least = min(self.least, request.top_p)
            return await super().generate(replace(request, top_p=self.least))

    return Shared


@fault("rollout")
def top_k_is_ignored() -> type:
    class Ignores(Hooked):
        async def generate(self, request: Request) -> Completion:
            done = await super().generate(replace(request, top_k=0))
            if not request.top_k:
                return done
            rows = np.full((len(done.tokens), request.top_k), -1)
            rows[:, 0] = done.tokens
            return replace(done, sampling_mask=rows)

    return Ignores


MASKS = {
    "lacks_the_last_id": lambda m: np.where(m == m.max(1, keepdims=True), -1, m),
    "one_too_many": lambda m: np.concatenate([m, (m[:, :1] + 1) % VOCAB], 1),
    "of_the_token_before": lambda m: np.roll(m, 1, 0),
    "the_first_of_all": lambda m: np.repeat(m[:1], len(m), 0),
    "none": lambda m: None,
    "a_row_less": lambda m: m[:-1],
}


@fault("rollout", how=tuple(MASKS))
def masks(how: str) -> type:
    def done(self: Hooked, request: Request, completion: Completion) -> Completion:
        mask = completion.sampling_mask
        return completion if mask is None else replace(completion, sampling_mask=MASKS[how](mask))

    return type("Masks", (Hooked,), {"done": done})


@fault("rollout")
def top_p_logprobs_are_of_all() -> type:
    def told(self: Hooked, p: np.ndarray, request: Request, tokens: list[int]) -> float:
        return float(Hooked.scores(self, request, tokens[:-1])[tokens[-1]])

    return telling(told)


# --- versions


VERSIONS = {
    "of_the_end": lambda s, c: (s.version,) * len(c.tokens),
    "of_the_start": lambda s, c: c.versions[:1] * len(c.tokens),
    "one_too_new": lambda s, c: tuple(v + 1 for v in c.versions),
    "one_too_old": lambda s, c: tuple(max(v - 1, 0) for v in c.versions),
    "zero": lambda s, c: (0,) * len(c.tokens),
    "counted": lambda s, c: (s.updates - 1,) * len(c.tokens),
    "numpy": lambda s, c: tuple(np.array(c.versions)),
}


@fault("rollout", how=tuple(VERSIONS))
def versions(how: str) -> type:
    return type(
        "Versions",
        (Hooked,),
        {"done": lambda s, r, c: replace(c, versions=VERSIONS[how](s, c))},
    )


# --- loading


def loading(change: Any) -> type:
    """Make a rollout that calls ``change(self, new, old)`` when weights have come."""

    def loaded(self: Hooked, before: int) -> None:
        self.weights = change(self, dict(self.weights), self.old) or self.weights

    return type("Loading", (Hooked,), {"loaded": loaded})


def _keep(names: Any) -> Any:
    return lambda s, new, old: {n: old[n] if names(n) else w for n, w in new.items()}


def _round(dtype: Any) -> Any:
    def change(s: Hooked, new: dict, old: dict) -> dict:
        return {n: dtype(w) for n, w in new.items()}

    return change


def _bfloat16(w: np.ndarray) -> np.ndarray:
    bits = w.astype(np.float32).view(np.uint32)
    return ((bits + 0x8000) & 0xFFFF0000).astype(np.uint32).view(np.float32).astype(np.float64)


def _rows(first: int, last: int) -> Any:
    def change(s: Hooked, new: dict, old: dict) -> dict:
        out = {n: w.copy() for n, w in new.items()}
        for n, w in out.items():
            w[first:last] = old[n][first:last]
        return out

    return change


def _if(condition: Any) -> Any:
    return lambda s, new, old: old if condition(s, new, old) else new


LOADS = {
    "skips_embed": _keep(lambda n: n == "embed.weight"),
    "skips_head": _keep(lambda n: n == "head.weight"),
    "skips_bias": _keep(lambda n: n == "head.bias"),
    "swaps": lambda s, w, o: {
        **w,
        "embed.weight": w["head.weight"],
        "head.weight": w["embed.weight"],
    },
    "ties": lambda s, w, o: {**w, "head.weight": w["embed.weight"]},
    "transposes": lambda s, w, o: {
        **w,
        "head.weight": w["head.weight"].T.reshape(w["head.weight"].shape),
    },
    "bfloat16": _round(_bfloat16),
    "float16": _round(lambda w: w.astype(np.float16).astype(np.float64)),
    "int8": _round(lambda w: np.round(w / abs(w).max() * 127) * abs(w).max() / 127),
    "adds": lambda s, w, o: {n: w[n] + o[n] for n in w} if s.updates > 1 else w,
    "averages": lambda s, w, o: {n: (w[n] + o[n]) / 2 for n in w} if s.updates > 1 else w,
    "moves_slowly": lambda s, w, o: (
        {n: 0.99 * w[n] + 0.01 * o[n] for n in w} if s.updates > 1 else w
    ),
    "once": _if(lambda s, w, o: s.updates > 1),
    "every_other": _if(lambda s, w, o: s.updates % 2 == 0),
    "every_fifth_not": _if(lambda s, w, o: s.updates % 5 == 4),
    "not_small_moves": _if(lambda s, w, o: max(abs(w[n] - o[n]).max() for n in w) < 0.02),
    "not_equal_sums": _if(lambda s, w, o: all(np.isclose(w[n].sum(), o[n].sum()) for n in w)),
    "last_rows": _rows(312, VOCAB),
    "first_rows": _rows(0, 4),
    "middle_rows": _rows(100, 140),
    "a_row": _rows(37, 38),
    "clips": _round(lambda w: np.clip(w, -1.5, 1.5)),
    "zeroes_tiny": _round(lambda w: np.where(abs(w) < 0.03, 0.0, w)),
    "negates_bias": lambda s, w, o: {**w, "head.bias": -w["head.bias"]},
    "keeps_padding": lambda s, w, o: {
        **w,
        "head.bias": np.where(np.arange(VOCAB) > 310, -30.0, w["head.bias"]),
    },
}


@fault("rollout", how=tuple(LOADS))
def loads(how: str) -> type:
    return loading(LOADS[how])


@fault("rollout", most=(10_000, 400_000))
def tensors_above_bytes_are_skipped(most: int) -> type:
    return loading(
        lambda s, new, old: {n: old[n] if w.nbytes // 2 > most else w for n, w in new.items()}
    )


@fault("rollout", most=(4_096, 65_536, 262_144))
def elements_above_are_skipped(most: int) -> type:
    def change(s: Hooked, new: dict, old: dict) -> dict:
        out = {}
        for name, w in new.items():
            flat = w.copy().reshape(-1)
            flat[most // 4 :] = old[name].reshape(-1)[most // 4 :]
            out[name] = flat.reshape(w.shape)
        return out

    return loading(change)


@fault("rollout")
def weights_come_one_update_late() -> type:
    def change(s: Hooked, new: dict, old: dict) -> dict:
        late = s.__dict__.get("late", new)
        s.late = new
        return late

    return loading(change)


@fault("rollout")
def a_permuted_update_is_ignored() -> type:
    class Ignores(Hooked):
        async def update(self, update: Any) -> SyncReceipt:
            before = self.weights
            receipt = await super().update(update)
            if update.permuted:
                self.weights = before
            return receipt

    return Ignores


@fault("rollout")
def the_checkpoint_is_read() -> type:
    from pathlib import Path

    from coupler.testing.models import read_tensors

    class Reads(Hooked):
        async def setup(self, rank: Rank) -> int:
            workers = await super().setup(rank)
            found = read_tensors(Path(self.model.path))
            self.weights = {name: w.astype(np.float64) for name, w in found.items()}
            return workers

    return Reads


@fault("rollout", how=("half", "half_and_version", "version", "reshapes", "silently"))
def a_refused_update(how: str) -> type:
    """It leaves half-new weights or the new version behind, or is not refused."""

    class Refused(Hooked):
        async def update(self, update: Any) -> SyncReceipt:
            shapes = {} if how in ("reshapes", "silently") else self.shapes()
            names, size = [], 0
            weights = self.weights if "half" in how else dict(self.weights)
            try:
                for name, tensor in update.receive(Rank(), shapes):
                    names.append(name)
                    size += tensor.nbytes
                    if name not in weights:
                        continue
                    fits = tensor.shape == weights[name].shape
                    if how == "silently" and not fits:
                        continue
                    weights[name] = np.array(tensor, np.float64).reshape(weights[name].shape)
            except WeightSyncError:
                if how in ("version", "half_and_version"):
                    self.version = update.version
                raise
            self.weights, self.version = weights, update.version
            known = [name for name in names if name in weights]
            return SyncReceipt(
                update.version,
                len(names),
                len(known),
                size,
                tuple(sorted(set(weights) - set(names))),
                tuple(sorted(set(names) - set(weights))),
            )

        def shapes(self) -> dict[str, tuple[int, ...]]:
            return {name: tensor.shape for name, tensor in self.weights.items()}

    return Refused


@fault("rollout", how=("reference", "view"))
def tensors_are_kept_without_a_copy(how: str) -> type:
    """They are valid until the next one is asked for."""

    class Borrows(Hooked):
        async def update(self, update: Any) -> SyncReceipt:
            shapes = {name: tensor.shape for name, tensor in self.weights.items()}
            weights: dict[str, Any] = dict(self.weights)
            names, size = [], 0
            for name, tensor in update.receive(Rank(), shapes):
                names.append(name)
                size += tensor.nbytes
                if name in weights:
                    weights[name] = tensor if how == "reference" else tensor[...]
            known = [name for name in names if name in weights]
            self.weights, self.version = weights, update.version
            missing = tuple(sorted(set(weights) - set(names)))
            more = tuple(sorted(set(names) - set(weights)))
            return SyncReceipt(update.version, len(names), len(known), size, missing, more)

    return Borrows


RECEIPTS = {
    "missing": lambda r: replace(r, missing=()),
    "unexpected": lambda r: replace(r, unexpected=(), num_loaded=r.num_received),
    "bytes": lambda r: replace(r, num_bytes=0),
    "version": lambda r: replace(r, version=max(0, r.version - 1)),
    "received": lambda r: replace(r, num_received=3, num_loaded=3),
}


@fault("rollout", how=tuple(RECEIPTS))
def a_receipt_that_lies_about(how: str) -> type:
    class Lies(Hooked):
        async def update(self, update: Any) -> SyncReceipt:
            return RECEIPTS[how](await super().update(update))

    return Lies


@fault("rollout")
def an_update_lets_requests_in() -> type:
    class LetsIn(Hooked):
        async def update(self, update: Any) -> SyncReceipt:
            receipt = await super().update(update)
            await self.resume()
            return receipt

    return LetsIn


# --- pauses, sleep, memory


@fault("rollout", how=("returns_at_once", "admits", "aborts", "drains"))
def a_pause(how: str) -> type:
    class Pauses(Hooked):
        async def pause(self, in_flight: InFlight) -> None:
            if how == "returns_at_once":
                self.admits.clear()
            elif how == "admits":
                await super().pause(in_flight)
                self.admits.set()
            elif how == "aborts":
                await super().pause(InFlight.ABORT)
            else:
                await super().pause(InFlight.DRAIN)

    return Pauses


@fault("rollout", how=("empty", "repeats", "new_version"))
def an_abort(how: str) -> type:
    def done(self: Hooked, request: Request, c: Completion) -> Completion:
        if c.finish != "abort":
            return c
        if how == "empty":
            return replace(c, tokens=(), logprobs=(), versions=())
        if how == "repeats":
            return replace(c, logprobs=c.logprobs[:1] * len(c.tokens))
        return replace(c, versions=(self.version + 1,) * len(c.tokens))

    return type("Aborts", (Hooked,), {"done": done})


@fault("rollout", how=("loses_weights", "serves", "keeps_old", "reseeds", "takes_updates"))
def sleeping(how: str) -> type:
    class Sleeps(Hooked):
        async def sleep(self, what: frozenset[Memory]) -> None:
            if how == "keeps_old" and Memory.WEIGHTS in what:
                self.slept = dict(self.weights)
            await super().sleep(what)
            if how == "loses_weights":
                self.weights = {name: np.zeros_like(w) for name, w in self.weights.items()}
            if how == "serves":
                self.asleep = NOTHING

        def awake(self) -> None:
            if how != "serves":
                super().awake()

        def draws(self, request: Request) -> Any:
            return stream(request.seed + (how == "reseeds" and self.naps), "toy")

        naps = 0

        async def wake(self, what: frozenset[Memory]) -> None:
            await super().wake(what)
            self.naps += 1

        async def update(self, update: Any) -> SyncReceipt:
            if how == "takes_updates":
                self.asleep -= {Memory.WEIGHTS}
                if update is None:
                    return None  # type: ignore[return-value]
            receipt = await super().update(update)
            if how == "keeps_old" and "slept" in self.__dict__:
                self.weights = self.__dict__.pop("slept")
            return receipt

    return Sleeps


@fault("rollout", mib=(1, 2), per=("request", "update"))
def memory_leaks(mib: int, per: str) -> type:
    class Leaks(Hooked):
        async def generate(self, request: Request) -> Completion:
            if per == "request":
                self.__dict__.setdefault("kept", []).append(np.ones(mib << 17))
            return await super().generate(request)

        async def update(self, update: Any) -> SyncReceipt:
            if per == "update":
                self.__dict__.setdefault("kept", []).append(np.ones(8 * mib << 17))
            return await super().update(update)

    return Leaks
