"""Check what an engine must do beyond short sequences and waits: long rows, dropout in
the configuration, small steps, saves that overlap a step.
"""

from __future__ import annotations

import pickletools
import shutil
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest

from coupler.engine_kit.adamw import AdamWConfig
from coupler.interfaces import Part
from coupler.testing import losses
from coupler.testing.cases import LENGTHS, make_batch, weighted
from coupler.testing.conformance.conftest import running
from coupler.testing.conformance.test_engine import (
    LOGPROBS,
    SURROGATE,
    Worlds,
    assert_metrics,
    split,
)
from coupler.testing.ranks import Arrays, World
from coupler.testing.reference import Reference
from coupler.testing.subject import Subject

# Sequences that end before, at and after the usual sizes of tiles and windows. The
# first two fill a micro-batch to the last token.
LONG = (700, 324, 513, 256, 129, 65, 300, 2)
BUDGET = 1024
LONG_GRADIENT = 5.0  # times the limit for short sequences: sums are longer
CALLS, LEAK_BYTES = 40, 24 << 20


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
    """Ten steps of 1e-5 move weights by their sum, which 16 bits would lose."""
    world = fresh(reference.folder, lr=1e-5)
    batch = weighted(make_batch(reference))
    before, steps = world.weights(), 10
    total = {name: np.zeros(w.shape) for name, w in before.items()}
    for index in range(steps):
        grads, _, (result, *_) = world.gradient([batch], SURROGATE, index=index)
        assert result[0], f"expected step {index} to be applied, it was skipped"
        if index == 0:
            total = {name: -np.sign(g) * 1e-5 for name, g in grads.items()}

    after = world.weights()
    for name, w in after.items():
        sure = np.abs(total[name]) > 0
        moved = np.abs(w.astype(np.float64) - before[name])[sure]
        assert not moved.size or 2e-5 < np.median(moved) < 2e-4, (
            f"expected {name} to move by about {steps} times 1e-5, half of it moved by less than "
            f"{np.median(moved):.3g}"
        )


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
    place = tmp_path / "saved"
    place.mkdir()
    world.save_across(place, [second], SURROGATE, index=1)
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
        if call % 4 == 0:
            world.gradient([batch], SURROGATE)
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
