"""Check what an engine must do beyond short sequences and waits: long rows, dropout in
the configuration, small steps, saves that overlap a step.
"""

from __future__ import annotations

import pickletools
import random
import shutil
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from io import BytesIO
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from coupler.batch import Batch
from coupler.engine_kit.adamw import AdamWConfig
from coupler.interfaces import Part
from coupler.testing import expect, losses
from coupler.testing.cases import LENGTHS, make_batch, weighted
from coupler.testing.conformance.conftest import running
from coupler.testing.conformance.test_engine import (
    LOGPROBS,
    LONGEST,
    SURROGATE,
    Worlds,
    assert_metrics,
    split,
)
from coupler.testing.models import NUM_SPECIAL, rewrite
from coupler.testing.ranks import Arrays, World
from coupler.testing.reference import Gradient, Reference
from coupler.testing.subject import Subject

# Sequences that end before, at and after the usual sizes of tiles and windows. The
# first two fill a micro-batch to the last token.
LONG = (700, 324, 513, 256, 129, 65, 300, 2)
BUDGET = 1024
LONG_GRADIENT = 5.0  # times the limit for short sequences: sums are longer
CALLS, LEAK_BYTES = 60, 24 << 20
CROWD = 80  # sequences of a batch, above what a micro-batch has
MOST_FILES = 12  # of a save that are taken away one by one


@pytest.fixture(scope="module")
def long_worlds(
    tmp_path_factory: pytest.TempPathFactory, engine_subject: Subject, long_model: Reference
) -> Iterator[Worlds]:
    """Start worlds as ``worlds`` does, with the model for long sequences."""
    recipe = partial(engine_subject.recipe, long_model.folder)
    with running(engine_subject, recipe, tmp_path_factory) as make:
        yield make


def assert_same_bits(got: Arrays, want: Arrays, when: str) -> None:
    for name, tensor in want.items():
        assert np.array_equal(got[name], tensor), (
            f"expected {name} to be equal to the bit {when}; it differs by up to "
            f"{np.abs(got[name] - tensor).max():.3g}"
        )


def test_long_sequences_equal_the_reference(
    long_worlds: Worlds, long_model: Reference, every_model: None
) -> None:
    """Log-probs, entropies and the gradient of sequences of up to 700 tokens, in
    micro-batches that are full to the last token. Dropout of the configuration shows
    nowhere, and the log-probs after a step are those before it.
    """
    batch = weighted(make_batch(long_model, LONG))
    world, want = long_worlds(1, max_tokens_per_gpu=BUDGET), long_model.outputs(batch)
    gradient = long_model.gradient(batch, losses.surrogate)

    for when in ("before", "after"):
        (done,) = world.forward([batch], ("logprobs", "entropy"))
        for name in ("logprobs", "entropy"):
            off = np.abs(done[name] - want[name])
            row, limit = int(off.argmax()), 4 * LOGPROBS
            assert off.max() < limit, (
                f"expected {name} within {limit:g} of the reference {when} a step; row {row} of "
                f"{len(off)} is off by {off.max():.3g}"
            )
        if when == "after":
            break
        grads, metrics, _ = world.gradient([batch], SURROGATE)
        assert_metrics(metrics, gradient.metrics)
        for name, true in gradient.grads.items():
            error, scale = np.abs(grads[name] - true).max(), np.abs(true).max()
            assert error <= LONG_GRADIENT * gradient.tolerance * scale, (
                f"expected the gradient of {name} as the reference's, of at most {scale:.3g}; "
                f"it is off by {error:.3g}"
            )


def test_small_steps_are_not_rounded_away(
    fresh: Callable[..., World], reference: Reference, any_setting: None
) -> None:
    """Each of ten steps moves weights by about 1e-5, which 16 bits would lose."""
    world = fresh(reference.folder, lr=1e-5)
    batch = weighted(make_batch(reference))
    before, steps = world.weights(), 10

    for index in range(steps):
        grads, _, (result, *_) = world.gradient([batch], SURROGATE, index=index)
        assert result[0], f"expected step {index} to be applied, it was skipped"
        after = world.weights()
        for name, w in after.items():
            sure = np.abs(grads[name]) > np.abs(grads[name]).max() / 100
            moved = float(np.median(np.abs(w.astype(np.float64) - before[name])[sure]))
            assert 4e-6 < moved < 2.5e-5, (
                f"expected {name} to move by about 1e-5 in step {index}, half of it moved by less "
                f"than {moved:.3g}"
            )
        before = after


def schedule_of(subject: Subject) -> dict[str, object]:
    """Return settings under which every step has another learning rate."""
    if not issubclass(subject.backend.config, AdamWConfig):
        return {}
    return {"schedule": "linear", "total_steps": 9, "warmup_steps": 3}


def test_a_save_holds_the_state_of_when_it_was_asked_for(
    fresh: Callable[..., World],
    reference: Reference,
    engine_subject: Subject,
    tmp_path: Path,
) -> None:
    """The next step is taken before the save is waited for. Its folder, moved
    elsewhere, goes on with the weights, moments and learning rate of that moment.
    """
    settings = schedule_of(engine_subject)
    first, second, third = (weighted(make_batch(reference, seed=seed)) for seed in (1, 2, 3))
    world = fresh(reference.folder, deterministic=True, **settings)
    world.gradient([first], SURROGATE)
    want = world.weights()
    place = tmp_path / "parent" / "saved"
    place.mkdir(parents=True)
    world.save_across(place, [second], SURROGATE, index=1)
    beside = sorted(path.name for path in place.parent.iterdir())
    expect.same(beside, ["saved"], "what stands beside the folder of a save")
    shutil.move(place, tmp_path / "moved")
    _, _, steps = world.gradient([third], SURROGATE, index=2)
    last = world.weights()

    resumed = fresh(reference.folder, deterministic=True, **settings)
    resumed.load(tmp_path / "moved", Part.PARAMS, Part.OPTIMIZER)
    assert_same_bits(resumed.weights(), want, "after a save that a step overlapped")
    resumed.gradient([second], SURROGATE, index=1)
    _, _, again = resumed.gradient([third], SURROGATE, index=2)
    assert again == steps, (
        f"expected (applied, norm, lr) {steps[0]} two steps after a resume, came {again[0]}"
    )
    assert_same_bits(resumed.weights(), last, "two steps after a resume")
    assert_no_pickles(tmp_path / "moved")


def assert_no_pickles(folder: Path) -> None:
    """Fail where a file is a pickle, or an archive or array that holds one."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    assert files, "expected a save to write files, there are none"

    for path in files:
        content = path.read_bytes()
        found = [(path.name, content)]
        if zipfile.is_zipfile(BytesIO(content)):
            with zipfile.ZipFile(path) as archive:
                found = [
                    (f"{path.name}: {name}", archive.read(name)) for name in archive.namelist()
                ]
        for name, part in found:
            objects = part.startswith(b"\x93NUMPY") and b"|O'" in part[:256]
            assert not objects and not is_pickle(part), (
                f"expected no pickle in a save, since reading one runs code; {name} is one"
            )


def is_pickle(content: bytes) -> bool:
    if content[:1] != b"\x80" or not content[1:2] or content[1] > 5:
        return False
    try:
        return any(op.name == "STOP" for op, _, _ in pickletools.genops(content))
    except Exception:  # It has no name: not everything that begins so is one.
        return False


def test_parts_are_saved_and_loaded_apart(
    fresh: Callable[..., World], reference: Reference, tmp_path: Path, any_setting: None
) -> None:
    """Weights alone come back without a trace of another run's moments."""
    first, second = (weighted(make_batch(reference, seed=seed)) for seed in (1, 2))
    trained, plain = (fresh(reference.folder, deterministic=True) for _ in range(2))
    trained.gradient([first], SURROGATE)
    trained.save(tmp_path, Part.PARAMS)
    want = trained.weights()

    plain.gradient([second], SURROGATE)
    plain.load(tmp_path, Part.PARAMS)
    assert_same_bits(plain.weights(), want, "after weights alone were loaded")
    assert_same_bits(plain.weights(), want, "when weights() is read again")

    loaded, begun = fresh(reference.folder), rewrite(reference.folder, tmp_path / "model", want)
    loaded.load(tmp_path, Part.PARAMS)
    anew, after = fresh(begun), []
    for world in (loaded, anew):
        world.gradient([second], SURROGATE)
        after.append(world.weights())
    for name, w in after[1].items():
        off = float(np.abs(after[0][name] - w).max())
        moved = float(np.abs(w - want[name]).max())
        expect.below(off, 1e-3 * moved + 1e-7, f"what {name} has of moments that nobody loaded")


def test_calls_leave_generators_and_memory_alone(
    long_worlds: Worlds, long_model: Reference, any_setting: None
) -> None:
    """Everything else of a trainer draws from its own streams, and a run is long."""
    world = long_worlds(1, max_tokens_per_gpu=BUDGET)
    batch = weighted(make_batch(long_model, LENGTHS))
    world.gradient([batch], SURROGATE)
    before = world.facts()[0]["generators"]
    sizes = []
    for call in range(CALLS):
        world.forward([batch], ("logprobs",))
        world.gradient([batch], SURROGATE, index=1 + call)
        world.weights()
        sizes.append(world.facts()[0]["bytes"])

    after = world.facts()[0]["generators"]
    changed = [name for name in before if after[name] != before[name]]
    assert not changed, f"expected global random generators as they were, calls changed {changed}"
    grown = sizes[-1] - sizes[CALLS // 4]
    assert grown < LEAK_BYTES, (
        f"expected memory to stay, {CALLS} calls of {batch.num_tokens} tokens made it grow by "
        f"{grown >> 20} MiB"
    )


def test_the_rest_of_a_step_stays_as_it_was(
    fresh: Callable[..., World], reference: Reference, any_setting: None
) -> None:
    """Evaluations between steps change neither gradients, moments nor rates."""
    batches = [weighted(make_batch(reference, seed=seed)) for seed in (1, 2)]
    found = []
    for evaluates in (False, True):
        world = fresh(reference.folder, deterministic=True)
        for index, batch in enumerate(batches):
            if evaluates:
                world.forward(split(batches[1 - index], world), ("logprobs", "entropy"))
                world.weights()
            world.gradient([batch], SURROGATE, index=index)
        found.append(world.weights())
    assert_same_bits(found[1], found[0], "with evaluations between the steps")


# --- batches of any content


def crowd(reference: Reference) -> Batch:
    """Make a batch of many short sequences: special tokens stand among others, some
    sequences are equal, and temperatures go from 0.1 to 5.
    """
    lengths = tuple(int(n) for n in np.resize([3, 14, 9, 5, 12, 7, 2, 11], CROWD))
    batch = make_batch(reference, lengths)
    tokens = batch["tokens"].copy()
    draw = np.random.default_rng(5)
    special = draw.random(len(tokens)) < 0.2
    tokens[special] = draw.integers(0, NUM_SPECIAL, int(special.sum()))
    for row in range(8, CROWD, 16):  # the same sequence again, with other advantages
        here, there = (slice(batch.starts[i], batch.starts[i + 1]) for i in (row, row - 8))
        tokens[here] = tokens[there]
    temperature = np.resize([1.0, 0.1, 0.7, 5.0, 0.25, 1.3], CROWD).astype(np.float32)
    return weighted(batch.with_tokens(tokens=tokens).with_seqs(temperature=temperature))


def test_a_crowd_of_sequences_equals_the_reference(
    long_worlds: Worlds, long_model: Reference
) -> None:
    """Many micro-batches of many sequences, also where an end-of-sequence or padding
    token is trained, where sequences are equal and at very low temperatures.
    """
    batch = crowd(long_model)
    want = long_model.outputs(batch)
    for tokens in (LONGEST, BUDGET):
        world = long_worlds(1, max_tokens_per_gpu=tokens)
        (done,) = world.forward([batch], ("logprobs", "entropy"))
        np.testing.assert_array_equal(done["tokens"], batch["tokens"], err_msg="the rows' order")
        for name in ("logprobs", "entropy"):
            # Rounding grows as temperature falls.
            cold = np.minimum(batch.spread(batch["temperature"]), 1.0)
            off = np.abs(done[name] - want[name]) * cold
            row = int(off.argmax())
            assert off.max() < 4 * LOGPROBS, (
                f"expected {name} within {4 * LOGPROBS:g} of the reference in a batch of {CROWD} "
                f"sequences; row {row}, token {batch['tokens'][row]}, is off by {off.max():.3g}"
            )

    mild = weighted(batch.with_seqs(temperature=np.ones(CROWD, np.float32)))
    near = long_model.outputs(mild)["logprobs"].astype(np.float32)
    mild = mild.with_tokens(rollout_logprobs=near)
    gradient = long_model.gradient(mild, losses.surrogate)
    for tokens in (LONGEST, BUDGET):  # equal sequences apart, and in one micro-batch
        world = long_worlds(1, max_tokens_per_gpu=tokens)
        grads, metrics, _ = world.gradient([mild], SURROGATE)
        assert_metrics(metrics, gradient.metrics)
        assert_gradient_of_a_crowd(grads, gradient, long_model.padding, tokens)


def assert_gradient_of_a_crowd(
    grads: Arrays, want: Gradient, padding: int | None, tokens: int
) -> None:
    for name, true in want.grads.items():
        # transformers leaves the input row of the padding token as it is. Another
        # implementation may train it.
        rows = np.full(len(true), True)
        if "embed_tokens" in name and padding is not None:
            rows[padding] = False
        off = float(np.abs(grads[name][rows] - true[rows]).max() / np.abs(true[rows]).max())

        what = f"the error of the gradient of {name}, as a share, at {tokens} tokens a micro-batch"
        expect.below(off, LONG_GRADIENT * want.tolerance, what)


# --- files


def test_a_save_that_lost_a_file_is_not_read(
    fresh: Callable[..., World], reference: Reference, tmp_path: Path, any_setting: None
) -> None:
    """Each file of a save is taken away or cut in half, one at a time. A load raises,
    or brings everything back without it.
    """
    first, second = (weighted(make_batch(reference, seed=seed)) for seed in (1, 2))
    parts, whole = (Part.PARAMS, Part.OPTIMIZER), tmp_path / "whole"
    whole.mkdir()
    world = fresh(reference.folder)
    world.gradient([first], SURROGATE)
    world.gradient([second], SURROGATE, index=1)
    world.save(whole, *parts)
    want = after_a_step(world, first)

    files = [path.relative_to(whole) for path in sorted(whole.rglob("*")) if path.is_file()]
    for number, (file, how) in enumerate(product(files[:MOST_FILES], ("missing", "half"))):
        hurt = tmp_path / str(number)
        shutil.copytree(whole, hurt)
        content = (hurt / file).read_bytes()
        (hurt / file).unlink()
        if how == "half":
            (hurt / file).write_bytes(content[: len(content) // 2])
        # What a refused load brought back must not be there when the next one needs it.
        after_a_step(world, first)
        refused = False
        try:
            world.load(hurt, *parts)
        except Exception:  # The class is the engine's, and core says which checkpoint.
            refused = True
            # Ranks that may wait for the one that raised were ended.
            world = fresh(reference.folder) if world.num_ranks > 1 else world
        shutil.rmtree(hurt)
        got = want if refused else after_a_step(world, first)
        for name, w in want.items():
            off = float(np.abs(got[name] - w).max())
            assert off < 1e-6, (
                f"expected load() to raise, or to need no {file}, which is {how}; {name} is off by "
                f"{off:.3g} a step later"
            )

    world.load(whole, *parts)
    got = after_a_step(world, first)
    for name, w in want.items():
        off = float(np.abs(got[name] - w).max())
        expect.below(off, 1e-6, f"the difference of {name} after the whole save was read again")


def after_a_step(world: World, batch: Batch) -> Arrays:
    """Return the weights that the next step leads to, which show moments and rates."""
    world.gradient([batch], SURROGATE, index=2)
    return world.weights()


def test_saving_and_loading_leave_generators_alone(
    fresh: Callable[..., World], reference: Reference, tmp_path: Path, any_setting: None
) -> None:
    """A checkpoint is written between steps, and draws nothing from a trainer's
    streams.
    """
    world = fresh(reference.folder)
    world.gradient([weighted(make_batch(reference))], SURROGATE)
    for generator in (random, np.random):  # else a constant seed may give the same state
        generator.random()
    before = world.facts()[0]["generators"]
    world.save(tmp_path, Part.PARAMS, Part.OPTIMIZER)
    world.load(tmp_path, Part.PARAMS, Part.OPTIMIZER)
    expect.same(world.facts()[0]["generators"], before, "the states of global random generators")
