"""Provide the kit's fixtures: model folders with their references, and worlds of engine
ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from coupler.errors import TooFewDevices
from coupler.interfaces import Head
from coupler.testing.limits import limited
from coupler.testing.models import write_qwen2, write_qwen3_moe, write_toy, write_value_head
from coupler.testing.plugin import KINDS, REWARD, selected
from coupler.testing.ranks import World
from coupler.testing.reference import (
    Reference,
    ToyReference,
    ToyValueReference,
    TransformersReference,
    TransformersValueReference,
)
from coupler.testing.subject import Subject

# The learning rate of engines that serve many tests: a step changes nothing.
FROZEN = 1e-30
# Sampling defaults of a model's folder. A rollout follows the request alone.
MISLEADING = {
    "temperature": 0.1,
    "top_k": 1,
    "repetition_penalty": 3.0,
    "eos_token_id": list(range(8)),
}
# The prefix of a model's name that asks for its variant with long sequences.
LONG = "long-"
LONG_SEQUENCES: dict[str, Any] = {"max_position_embeddings": 1024, "attention_dropout": 0.3}
# An engine has so many ranks at most. A test on more is left out.
MOST_RANKS = 4
# The kinds that a file needs, where its name does not say it.
NEEDS = {
    "pair": ("engine", "rollout"),
    "values": ("engine",),
    "routing": ("engine",),
    "engine_long": ("engine",),
    "engine_split": ("engine",),
    "adapter": ("engine",),
    "memory_plan": ("engine",),
    "rollout_long": ("rollout",),
    "transport_large": ("transport",),
}
# Fixtures that start a backend.
STARTED = ("dummy", "served", "pair", "live")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the files of kinds that were not selected."""
    chosen = {text.partition("=")[0] for text in selected(config)}
    topic = collection_path.stem.removeprefix("test_")
    needed = NEEDS.get(topic, (topic,) if topic in (*KINDS, REWARD) else ())
    return True if chosen and not set(needed) <= chosen else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip an installed backend whose dependency is not installed, unless it was asked
    for.
    """
    assert isinstance(item, pytest.Function), f"expected a test function, came {item}"
    for subject in item.callspec.params.values():
        if isinstance(subject, Subject) and not subject.selected:
            try:
                subject.backend.load()
            except ImportError as exc:
                pytest.skip(f"{subject} cannot be imported: {exc}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Limit the time of a test."""
    with limited(item.name, item.config.option.coupler_limit):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Iterator[Any]:
    """Limit the time in which a backend starts."""
    if fixturedef.argname not in STARTED:
        return (yield)
    with limited(f"the start of {fixturedef.argname}", request.config.option.coupler_limit):
        return (yield)


@pytest.fixture(scope="session")
def reference_of(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Callable[[str], Reference]:
    """Write a model of the kit by its name, once."""

    def write(name: str) -> Reference:
        folder = tmp_path_factory.mktemp("models") / name
        if name == "toy":
            return ToyReference(write_toy(folder))
        if name.startswith(LONG):
            return long_reference(folder, name.removeprefix(LONG))
        written = (
            write_qwen3_moe(folder) if name == "moe" else write_qwen2(folder, tied=name == "tied")
        )
        (written / "generation_config.json").write_text(json.dumps(MISLEADING))
        return TransformersReference(written)

    return cache(lambda name: _tolerant(write(name), pytestconfig))


@pytest.fixture(scope="session")
def value_reference_of(
    tmp_path_factory: pytest.TempPathFactory,
    reference_of: Callable[[str], Reference],
    pytestconfig: pytest.Config,
) -> Callable[[str], Reference]:
    """Write the same models with a value head, once."""

    def write(name: str) -> Reference:
        folder = tmp_path_factory.mktemp("critics") / name
        plain = reference_of(name)
        if name == "toy":
            return ToyValueReference(
                write_value_head(plain.folder, folder, plain.tensors["embed.weight"].shape[1])
            )
        width = plain.tensors["model.embed_tokens.weight"].shape[1]
        return TransformersValueReference(write_value_head(plain.folder, folder, width))

    return cache(lambda name: _tolerant(write(name), pytestconfig))


def long_reference(folder: Path, name: str) -> Reference:
    """Write the variant of a model that takes long sequences.

    Its largest tensors have 1 MiB, above the small buffers of a transport, and its
    configuration asks for dropout, which neither log-probs nor gradients may show.
    """
    if name == "toy":
        return ToyReference(write_toy(folder, hidden=512))
    if name == "moe":
        written = write_qwen3_moe(folder, **LONG_SEQUENCES)
    else:
        wide = {**LONG_SEQUENCES, "intermediate_size": 2048}
        written = write_qwen2(folder, tied=name == "tied", **wide)
    (written / "generation_config.json").write_text(json.dumps(MISLEADING))
    return TransformersReference(written)


def _tolerant(reference: Reference, pytestconfig: pytest.Config) -> Reference:
    reference.tolerance = pytestconfig.option.coupler_gradient
    return reference


@pytest.fixture(scope="module")
def reference(reference_of: Callable[[str], Reference], model_name: str) -> Reference:
    return reference_of(model_name)


@pytest.fixture(scope="module")
def long_model(reference_of: Callable[[str], Reference], model_name: str) -> Reference:
    """Return the variant of the model with long sequences, large tensors and
    dropout.
    """
    return reference_of(LONG + model_name)


@pytest.fixture
def every_model() -> None:
    """Run a test that asks for it with every model of the backend. The others run with
    the usual model only.
    """


@pytest.fixture
def any_setting() -> None:
    """Run a test that asks for it once where a backend is checked under several
    settings. Its result depends on none of them.
    """


@pytest.fixture(scope="session")
def tolerance(pytestconfig: pytest.Config) -> float:
    """Return the nats by which log-probs of a rollout may differ from the reference."""
    return pytestconfig.option.coupler_logprobs


@pytest.fixture(scope="module")
def worlds(
    tmp_path_factory: pytest.TempPathFactory, engine_subject: Subject, reference: Reference
) -> Iterator[Callable[..., World]]:
    """Start the engine on so many data shards, once per configuration.

    Its weights stay, since the learning rate is next to 0.
    """
    with running(
        engine_subject, partial(engine_subject.recipe, reference.folder), tmp_path_factory
    ) as make:
        yield make


@contextmanager
def running(
    subject: Subject,
    recipe: Callable[..., dict[str, Any]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[..., World]]:
    """Start worlds of ``recipe`` with further settings. Skip where the engine or the
    machine has too few ranks.
    """
    made: dict[tuple[object, ...], World | TooFewDevices] = {}

    def make(num_shards: int = 1, **settings: object) -> World:
        key = (num_shards, *sorted(settings.items()))
        if key not in made:
            ranks = ranks_for(subject, num_shards)
            made[key] = _start(
                recipe(**{"lr": FROZEN, **settings}), ranks, tmp_path_factory.mktemp("world")
            )
        world = made[key]
        if isinstance(world, TooFewDevices):
            pytest.skip(str(world).splitlines()[0])
        return world

    yield make
    for world in made.values():
        if isinstance(world, World):
            world.close()


@pytest.fixture
def fresh(engine_subject: Subject, tmp_path: Path) -> Iterator[Callable[..., World]]:
    """Start an engine of its own for the test, on a model folder, with a learning rate
    that moves.
    """
    made: list[World] = []

    def make(
        folder: Path,
        num_shards: int = 1,
        head: Head = Head.LM,
        deterministic: bool = False,
        apart: bool = False,
        **settings: object,
    ) -> World:
        place = tmp_path / f"world-{len(made)}"
        place.mkdir()
        recipe = engine_subject.recipe(folder, head, **{"lr": 1e-2, **settings})

        try:
            made.append(
                World(
                    recipe,
                    ranks_for(engine_subject, num_shards),
                    place,
                    deterministic=deterministic,
                    apart=apart,
                )
            )
        except TooFewDevices as error:
            pytest.skip(str(error).splitlines()[0])

        return made[-1]

    yield make
    for world in made:
        world.close()


def ranks_for(subject: Subject, num_shards: int) -> int:
    """Return the ranks of an engine with at least so many data shards. Skip the test
    where these are too many for it.
    """
    ranks = subject.ranks_for(num_shards)
    if ranks > 1 and subject.has("world:1"):
        pytest.skip(f"{subject} declares world:1")
    if ranks > MOST_RANKS:
        pytest.skip(
            f"{num_shards} data shards of {subject} take {ranks} ranks, the kit starts "
            f"{MOST_RANKS} at most"
        )
    return ranks


def _start(recipe: dict[str, Any], num_ranks: int, folder: Path) -> World | TooFewDevices:
    try:
        return World(recipe, num_ranks, folder)
    except TooFewDevices as error:
        return error
