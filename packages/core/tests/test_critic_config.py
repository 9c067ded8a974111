"""``critic.engine``: a plugin's section inside another one, like the policy's unless it
is said otherwise.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_plugins import install, plugin

from coupler.config.compose import Composed, compose, dump_yaml
from coupler.config.schema import Job
from coupler.errors import ConfigError, PluginError
from coupler.plugins.manager import Plugins
from coupler.run.explain import explain
from coupler.run.plan import make_plan
from coupler.system.reads import track

NEEDED = [
    "engine=acme", "rollout=toy", "algorithm=judge", "model.path=/m", "data.source=x.jsonl",
    "reward.target=a:b",
    "prompts_per_step=2", "samples_per_prompt=4",
]  # fmt: skip
DECLARED = 'frozenset({"weights:full"})'
PRESETS = "\n@hookimpl\ndef coupler_config_paths():\n    return ['critic_conf']\n"


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plugins]:
    """``engine=acme`` and ``engine=other`` that compute values, ``engine=blind`` that
    does not; ``algorithm=judge``.
    """
    folder = tmp_path_factory.mktemp("site")
    able = 'frozenset({"weights:full", "output:values"})'
    check = (
        "    def __post_init__(self):\n        if self.lr < 0: raise "
        "ValueError('engine.lr must be above 0')\n"
    )
    acme = (
        plugin("engine", "acme")
        .replace(DECLARED, able)
        .replace("\n@hookimpl", f"{check}\n@hookimpl", 1)
    )
    install(folder, "critic-engine-acme", acme + PRESETS)
    install(folder, "critic-engine-other", plugin("engine", "other").replace(DECLARED, able))
    install(folder, "critic-engine-blind", plugin("engine", "blind"))
    judge = plugin("algorithm", "judge").replace(
        DECLARED, 'frozenset({"job:train", "needs:values"})'
    )
    install(folder, "critic-algorithm-judge", judge)
    (folder / "critic_conf" / "engine").mkdir(parents=True)
    (folder / "critic_conf" / "__init__.py").touch()
    (folder / "critic_conf" / "engine" / "fast.yaml").write_text(
        "defaults: [acme, _self_]\nlr: 0.5\n"
    )
    sys.path.insert(0, str(folder))
    yield Plugins.load()
    sys.path.remove(str(folder))
    for name in (
        "critic_engine_acme",
        "critic_engine_other",
        "critic_engine_blind",
        "critic_algorithm_judge",
    ):
        sys.modules.pop(name, None)


def good(plugins: Plugins, *overrides: str, file: str | None = None) -> Composed:
    return compose(plugins, [*NEEDED, *overrides], file)


def test_the_critic_is_like_the_policy_but_for_what_it_sets(
    plugins: Plugins, tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text(
        "engine: {shape: very_flat, inner: {width: 3}}\ncritic: {warmup_steps: 4}\n"
    )
    composed = good(
        plugins, "engine.lr=0.25", "critic.engine.inner.width=9", file=str(tmp_path / "run.yaml")
    )
    critic = composed.config.critic
    assert type(critic.engine) is plugins.get("engine", "acme").config
    assert (critic.engine.lr, critic.engine.shape, critic.engine.inner.width) == (
        0.25,
        "very_flat",
        9,
    )
    assert critic.warmup_steps == 4
    assert composed.config.engine.inner.width == 3
    assert composed.origin["critic.engine.lr"] == "as in engine"
    assert {"critic.engine.inner.width", "critic.warmup_steps", "engine.lr"} <= set(
        composed.set_keys
    )
    assert "critic.engine.lr" not in composed.set_keys
    text = explain(composed, "critic.engine.lr")
    assert "learning rate" in text and "0.25  (as in engine)" in text and "default:   0.001" in text
    assert "train only the critic" in explain(composed, "critic.warmup_steps")


def test_a_preset_reaches_the_critic_too(plugins: Plugins) -> None:
    composed = good(plugins, "engine=fast")
    assert composed.config.critic.engine.lr == 0.5
    assert composed.origin["critic.engine.lr"] == "preset fast"


@pytest.mark.parametrize(
    "choice", ["engine@critic.engine=other", "critic.engine=other", "critic.engine.name=other"]
)
def test_another_engine_has_its_own_defaults(plugins: Plugins, choice: str) -> None:
    config = good(plugins, "engine.lr=0.25", choice, "critic.engine.inner.width=9").config
    assert type(config.critic.engine) is plugins.get("engine", "other").config
    assert (config.engine.name, config.critic.engine.lr, config.critic.engine.inner.width) == (
        "acme",
        1e-3,
        9,
    )


@pytest.mark.parametrize(
    "section", ["critic: {engine: other}", "critic.engine: {name: other}", "critic.engine: other"]
)
def test_the_choice_in_the_file_and_over_it(plugins: Plugins, tmp_path: Path, section: str) -> None:
    file = str(tmp_path / "run.yaml")
    Path(file).write_text(f"{section}\nsteps: 3\n")
    assert good(plugins, file=file).config.critic.engine.name == "other"
    composed = good(plugins, "engine@critic.engine=acme", file=file)
    assert composed.config.critic.engine.name == "acme"


def test_other_choice_drops_the_section_of_the_file(plugins: Plugins, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("critic: {engine: {name: acme, lr: 0.5}, warmup_steps: 2}\n")
    composed = good(plugins, "engine@critic.engine=other", file=str(tmp_path / "run.yaml"))
    assert (composed.config.critic.engine.lr, composed.config.critic.warmup_steps) == (1e-3, 2)
    (note,) = composed.notes
    assert "section critic.engine is for acme and not used, critic.engine=other was chosen" in note


def test_saved_form_composes_to_the_same(plugins: Plugins, tmp_path: Path) -> None:
    config = good(plugins, "critic.engine.lr=0.5", "critic.warmup_steps=1").config
    file = tmp_path / "config.yaml"
    file.write_text(dump_yaml(config))
    assert compose(plugins, [], str(file)).config == config


def test_an_algorithm_without_a_critic_has_no_critic_engine(plugins: Plugins) -> None:
    composed = good(plugins, "algorithm=toy")
    assert composed.config.critic.engine is None
    assert not any(key.startswith("critic") for key in (*composed.set_keys, *composed.origin))


def test_what_such_an_algorithm_never_reads_is_named(plugins: Plugins) -> None:
    composed = good(plugins, "algorithm=toy", "critic.engine.lr=0.5", "critic.warmup_steps=2")
    assert composed.config.critic.engine.lr == 0.5
    _, reads = track(composed.config)
    assert {"critic.engine.lr", "critic.warmup_steps"} <= set(reads.unread(composed.set_keys))


BAD = [
    ("critic.engine.lrr=1", "unknown option critic.engine.lrr.", "did you mean:  critic.engine.lr"),
    ("critic.warmup=1", "unknown option critic.warmup.", "did you mean:  critic.warmup_steps"),
    ("critic.engine.inner.width=0", "critic.engine.inner.width must be at least 1", ""),
    ("critic.engine.lr=-1", "critic.engine.lr must be above 0", ""),
    (
        "critic.engine.shape=square",
        "critic.engine.shape takes one of round, very_flat, got 'square'.",
        "",
    ),
    ("critic.warmup_steps=-1", "critic.warmup_steps must be at least 0, got -1.", ""),
    ("critic=3", "critic is a section, got 3.", "engine, model, warmup_steps"),
    ("critic.engine=3", "critic.engine takes the name of a plugin's backend or preset, got 3.", ""),
    (
        "rollout@critic.engine=toy",
        "chooses the backend of another role: engine@critic.engine, rollout@eval.rollout, "
        "engine@teacher.engine, engine@reward_model.engine, rollout@judge.rollout.",
        "engine@critic.engine=NAME or rollout@eval.rollout=NAME",
    ),
    (
        "engine@actor=toy",
        "chooses the backend of another role: engine@critic.engine, rollout@eval.rollout, "
        "engine@teacher.engine, engine@reward_model.engine, rollout@judge.rollout.",
        "engine@critic.engine=NAME or rollout@eval.rollout=NAME",
    ),
    (
        "engine@critic.engine=blind",
        (
            "algorithm=judge trains a critic, and critic.engine=blind does not compute values "
            "(output:values): "
        ),
        "set engine@critic.engine to one of acme",
    ),
    (
        "engine=blind",
        "algorithm=judge trains a critic, and critic.engine=blind does not",
        "one of acme",
    ),
]


@pytest.mark.parametrize(("override", "sentence", "fix"), BAD, ids=[b[0] for b in BAD])
def test_mistakes(plugins: Plugins, override: str, sentence: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        good(plugins, override)
    text = str(caught.value)
    assert sentence in text.splitlines()[0]
    assert fix in text


def test_an_engine_that_is_not_installed(plugins: Plugins) -> None:
    with pytest.raises(PluginError, match="no engine named 'acmee' is installed"):
        good(plugins, "engine@critic.engine=acmee")


def test_the_plan_knows_the_critic(plugins: Plugins) -> None:
    plan = make_plan(good(plugins).config, None, plugins)
    assert plan.roles == ("policy (engine acme)", "critic (engine acme)", "rollout (toy)")
    warm = make_plan(good(plugins, "critic.warmup_steps=5").config, None, plugins).roles
    assert "critic (engine acme, alone for the first 5 steps)" in warm
    with pytest.raises(
        ConfigError, match=r"critic\.optimizer_steps_per_batch=3 does not divide the 8 sequences"
    ):
        make_plan(good(plugins, "critic.optimizer_steps_per_batch=3").config, None, plugins)
    with pytest.raises(ConfigError, match="offload=true needs engine=acme to free device memory"):
        make_plan(good(plugins, "offload=true").config, None, plugins)
    toy = compose(
        plugins,
        [
            *NEEDED,
            "engine=toy",
            "engine.max_tokens_per_gpu=4096",
            "critic.engine.max_tokens_per_gpu=9",
        ],
        None,
        Job.TRAIN,
    )
    with pytest.raises(
        ConfigError,
        match=r"critic\.engine\.max_tokens_per_gpu=9 is less than one sequence can have",
    ):
        make_plan(toy.config, None, plugins)
