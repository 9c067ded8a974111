"""Add the kit's options to pytest: ``pytest --pyargs coupler.testing.conformance
--coupler engine=NAME`` checks an installed backend.

Nothing of Coupler is loaded unless a test asks for a backend.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from coupler.plugins.manager import Plugins
    from coupler.testing.rewards import RewardSubject
    from coupler.testing.subject import Subject

# The kinds of backends.
KINDS = ("engine", "rollout", "algorithm", "transport", "sharding", "tracker", "environment")
ENVIRONMENT = "environment"  # it has a setting of the kit: rows=FILE.jsonl
REWARD = "reward"  # no backend: --coupler reward=package.module:function


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("coupler")
    group.addoption(
        "--coupler",
        action="append",
        default=[],
        metavar="KIND=NAME[,KEY=VALUE or MODEL]...",
        help=(
            "backend to check, repeatable; an engine and a rollout are checked as a pair too. "
            "Default: all installed. With settings, and models of the kit, that are this one's "
            "alone: engine=fsdp,moe,lora_rank=4. Of a backend that is named again, tests that "
            "depend on no setting run with the first alone"
        ),
    )
    group.addoption(
        "--coupler-set",
        action="append",
        default=[],
        metavar="KIND.KEY=VALUE",
        help="configuration of the backends to check, for example engine.tensor_parallel=2",
    )
    group.addoption(
        "--coupler-model",
        action="append",
        default=[],
        metavar="NAME",
        help=(
            "model of the kit to test with, repeatable: untied, tied, moe. Default: all that "
            "the backends declare"
        ),
    )
    group.addoption(
        "--coupler-logprobs",
        type=float,
        default=1e-3,
        metavar="NATS",
        help="how far log-probs of a rollout may be from the reference; default 1e-3: float32",
    )
    group.addoption(
        "--coupler-gradient",
        type=float,
        default=2e-5,
        metavar="SHARE",
        help=(
            "how far a tensor's gradient may be from the reference, as a share of its largest "
            "value; default 2e-5: float32"
        ),
    )
    group.addoption(
        "--coupler-limit",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="how long a test of the kit, or the start of its backends, may take; default 300",
    )
    group.addoption(
        "--coupler-share-gpus",
        action="store_true",
        help=(
            "let several ranks share a GPU: each is a host of its own to NCCL, which is slow, and "
            "shows what more GPUs than there are would compute"
        ),
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give every test that takes ``engine_subject``, ``rollout_subject`` or another
    kind the backends to check.

    An engine and a rollout meet only where they run the same models; ``model_name`` is
    one of these.
    """
    if "reward_subject" in metafunc.fixturenames:
        rewards = reward_subjects(metafunc.config)
        metafunc.parametrize("reward_subject", rewards, ids=map(str, rewards), scope="module")
        return

    kinds = [kind for kind in KINDS if f"{kind}_subject" in metafunc.fixturenames]
    if not kinds:
        return
    rows: list[tuple[Subject, ...]] = [()]
    for kind in kinds:
        rows = [(*row, subject) for row in rows for subject in subjects(metafunc.config, kind)]
    rows = [row for row in rows if len({subject.toy for subject in row}) == 1]

    if "any_setting" in metafunc.fixturenames:
        first = {tuple(subject.backend.name for subject in row): row for row in reversed(rows)}
        rows = [row for row in rows if row in first.values()]
    names = [f"{kind}_subject" for kind in kinds]
    ids = ["-".join(map(str, row)) for row in rows]

    if "model_name" in metafunc.fixturenames:
        every = "every_model" in metafunc.fixturenames
        common = [
            [m for m in row[0].models if all(m in other.models for other in row)] for row in rows
        ]
        models = [found if every else found[:1] for found in common]
        ids = [f"{i}-{m}" for i, found in zip(ids, models, strict=True) for m in found]
        values = [(*row, m) for row, found in zip(rows, models, strict=True) for m in found]
        metafunc.parametrize([*names, "model_name"], values, ids=ids, scope="module")
    else:
        metafunc.parametrize(names, rows, ids=ids, scope="module")


def pytest_configure(config: pytest.Config) -> None:
    """Look up what was selected before anything is collected.

    Raises:
        pytest.UsageError: a selection is malformed, or its backend cannot be used.
    """
    if config.getoption("--coupler-share-gpus"):
        from coupler.testing.ranks import SHARE_GPUS

        os.environ[SHARE_GPUS] = "1"
    if not (selected(config) or config.getoption("--coupler-set")):
        return
    from coupler.errors import CouplerError

    try:
        for kind in KINDS:
            for subject in subjects(config, kind):
                subject.config()
        reward_subjects(config)
    except CouplerError as exc:
        raise pytest.UsageError(str(exc)) from None


def selected(config: pytest.Config) -> list[str]:
    """Return each KIND=NAME that ``--coupler`` gave."""
    return config.getoption("--coupler") or []


def subjects(config: pytest.Config, kind: str) -> list[Subject]:
    """Return the backends of one kind to check: the selected ones, or every installed
    one where none of any kind is selected.

    Raises:
        CouplerError: a selection is malformed, or its backend cannot be used.
    """
    from coupler.errors import CouplerError
    from coupler.plugins.manager import Plugins
    from coupler.testing.subject import Subject, parse_settings

    if _PLUGINS not in config.stash:
        config.stash[_PLUGINS] = Plugins.load()
    plugins = config.stash[_PLUGINS]
    settings = parse_settings(config.getoption("--coupler-set") or []).get(kind, {})
    only = tuple(config.getoption("--coupler-model") or ())
    chosen = [text.partition("=")[::2] for text in selected(config)]
    for wanted, named in chosen:
        if wanted not in (*KINDS, REWARD) or not named:
            raise CouplerError(
                f"--coupler takes KIND=NAME, where KIND is one of {', '.join((*KINDS, REWARD))}."
            )
    if not chosen:
        return [Subject(backend, settings, only) for backend in plugins.of(kind).values()]
    found = []
    for named in (named for wanted, named in chosen if wanted == kind):
        name, comma, own = named.partition(",")
        words = own.split(",") if comma else []
        more = parse_settings([f"{kind}.{word}" for word in words if "=" in word]).get(kind, {})
        models = tuple(word for word in words if "=" not in word)
        given = {**settings, **more}
        rows = str(given.pop("rows", "")) if kind == ENVIRONMENT else ""
        every = Subject(plugins.get(kind, name), given, rows=rows, selected=True, own=comma + own)
        if unknown := [model for model in models if model not in every.models]:
            raise CouplerError(
                f"--coupler {every}: there is no model {unknown[0]!r} here.\n  there are:  "
                f"{', '.join(every.models)}"
            )
        found.append(replace(every, only=models or only))
    return found


def reward_subjects(config: pytest.Config) -> list[RewardSubject]:
    """Return the reward functions that ``--coupler`` named.

    Raises:
        CouplerError: a setting is none of a reward's.
    """
    from coupler.testing.rewards import RewardSubject

    chosen = (text.partition("=")[::2] for text in selected(config))
    common = config.getoption("--coupler-set") or []
    return [RewardSubject.parse(named, common) for wanted, named in chosen if wanted == REWARD]


_PLUGINS: pytest.StashKey[Plugins] = pytest.StashKey()
