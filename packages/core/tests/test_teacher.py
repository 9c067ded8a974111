"""``teacher.*``: a model that an algorithm learns from."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_plugins import install, plugin

from coupler.config.compose import compose
from coupler.errors import ConfigError
from coupler.interfaces import Output
from coupler.jobs.teacher import check_tokens
from coupler.plugins.manager import Plugins
from coupler.run.plan import make_plan

NEEDED = [
    "engine=acme", "rollout=toy", "model.path=/m", "data.source=x.jsonl", "reward.target=a:b",
    "prompts_per_step=2", "samples_per_prompt=4",
]  # fmt: skip
DECLARED = 'frozenset({"weights:full"})'


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plugins]:
    """``engine=acme``, and ``algorithm=learner``, which needs a teacher."""
    folder = tmp_path_factory.mktemp("site")
    needs = 'frozenset({"job:train", "needs:teacher_logprobs"})'
    learner = plugin("algorithm", "learner").replace(DECLARED, needs)
    install(folder, "taught-engine-acme", plugin("engine", "acme"))
    install(folder, "taught-algorithm-learner", learner)

    sys.path.insert(0, str(folder))
    yield Plugins.load()
    sys.path.remove(str(folder))
    for name in ("taught_engine_acme", "taught_algorithm_learner"):
        sys.modules.pop(name, None)


def plan(plugins: Plugins, *overrides: str) -> Any:
    return make_plan(compose(plugins, [*NEEDED, *overrides]).config, 8, plugins)


def test_the_teacher_has_an_engine_like_the_policys(plugins: Plugins) -> None:
    given = ["algorithm=learner", "teacher.model.path=/t", "engine.lr=0.25"]
    config = compose(plugins, [*NEEDED, *given]).config
    assert (config.teacher.engine.name, config.teacher.engine.lr) == ("acme", 0.25)
    assert "teacher (engine acme)" in plan(plugins, *given).roles


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm=learner"], "algorithm=learner learns from a teacher, and there is none."),
        (
            ["algorithm=toy", "teacher.model.path=/t"],
            "teacher.model.path=/t is set, and algorithm=toy learns from no teacher.",
        ),
        (
            ["algorithm=toy", "engine@teacher.engine=acme"],
            "teacher.engine is chosen, and teacher.model.path is empty",
        ),
    ],
)
def test_a_teacher_without_a_learner_is_refused(
    plugins: Plugins, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        plan(plugins, *overrides)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("overrides", "which"),
    [
        (["teacher.model.path=/t"], "engine=acme"),
        (["engine=toy", "teacher.model.path=/t", "engine@teacher.engine=acme"], "teacher.engine=a"),
        (["teacher.prompt=hint.txt"], "engine=acme"),
    ],
)
def test_an_engine_without_several_logprobs_of_a_position_is_refused(
    plugins: Plugins, overrides: list[str], which: str
) -> None:
    """A teacher's distribution needs it of the policy, and of the teacher."""
    needs = frozenset({"teacher_top_logprobs"})
    given = [*NEEDED, "algorithm=toy", "sampling.max_tokens=8", "data.max_prompt_tokens=8"]
    config = compose(plugins, [*given, *overrides]).config
    with pytest.raises(ConfigError) as raised:
        make_plan(config, 8, plugins, needs)
    assert f"learns a teacher's distribution, and {which}" in str(raised.value)
    able = compose(plugins, [*given, "engine=toy", "teacher.model.path=/t"])
    assert make_plan(able.config, 8, plugins, needs).roles


@pytest.mark.parametrize(("name", "k"), [("top_ids", 0), ("logprobs", 4), ("top_logprobs", 4)])
def test_an_output_has_a_number_of_ids_where_it_has_ids(name: Any, k: int) -> None:
    with pytest.raises(ValueError, match="top_ids alone has a k"):
        Output(name, k)
    assert Output("top_ids", 4).k == 4


def codec(**ids: int) -> Any:
    return SimpleNamespace(tokenizer=SimpleNamespace(get_vocab=lambda: ids), folder=Path("t"))


def test_a_teacher_with_other_tokens_is_refused() -> None:
    check_tokens(codec(a=0, b=1), codec(a=0, b=1, c=2), "teacher.model.path")
    for teacher, words in (
        (codec(a=0, b=2), "1 differ, and 'b', whose id is 1, has the id 2 there."),
        (codec(b=1), "1 differ, and 'a', whose id is 0, does not exist there."),
    ):
        with pytest.raises(ConfigError, match=words):
            check_tokens(codec(a=0, b=1), teacher, "teacher.model.path")
