"""A configuration is composed from three levels, strictly, and says where its values
come from.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
import sys
from pathlib import Path

import pytest
from fake_plugins import install, plugin
from hydra.core.config_store import ConfigStore

from coupler.config.compose import Composed, compose, dump_yaml
from coupler.config.schema import Job, RunConfig, SamplingConfig
from coupler.errors import ConfigError, PluginError
from coupler.plugins.manager import Plugins
from coupler.run.explain import differences, explain
from coupler.system.reads import original, track

NEEDED = [
    "engine=acme", "rollout=toy", "algorithm=toy", "model.path=/m", "data.source=x.jsonl",
    "reward.target=a:b",
]  # fmt: skip
PRESETS = "\n@hookimpl\ndef coupler_config_paths():\n    return ['acme_conf']\n"


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Plugins:
    """A plugin with ``engine=acme``, nested options, and presets ``fast`` and ``wrong``
    of it.
    """
    folder = tmp_path_factory.mktemp("site")
    install(folder, "coupler-engine-acme", plugin("engine", "acme") + PRESETS)
    install(folder, "coupler-rollout-blunt", plugin("rollout", "blunt"))
    presets = folder / "acme_conf" / "engine"
    presets.mkdir(parents=True)
    (folder / "acme_conf" / "__init__.py").touch()
    fast = "defaults: [acme, _self_]\nlr: 0.5\nshape: very_flat\ninner: {width: '${steps}'}\n"
    (presets / "fast.yaml").write_text(fast)
    (presets / "wrong.yaml").write_text("lr: 0.5\n")
    (presets / "faster.yaml").write_text("defaults: [fast, _self_]\nlr: 0.75\n")
    (presets / "below.yaml").write_text("defaults: [fast]\nlr: 0.75\nextra_args: {a: 1}\n")
    (presets / "lost.yaml").write_text("defaults: [fasst, _self_]\n")
    (presets / "circle.yaml").write_text("defaults: [round, _self_]\n")
    (presets / "round.yaml").write_text("defaults: [circle, _self_]\n")
    (presets / "odd.yaml").write_text("defaults: [{override: x}]\n")
    (presets / "broken.yaml").write_text("lr: [\n")
    (presets / "row.yaml").write_text("- lr\n")
    sys.path.insert(0, str(folder))
    yield Plugins.load()
    sys.path.remove(str(folder))
    for name in ("coupler_engine_acme", "coupler_rollout_blunt", "acme_conf"):
        sys.modules.pop(name, None)


def good(
    plugins: Plugins, *overrides: str, file: str | None = None, job: Job = Job.TRAIN
) -> Composed:
    return compose(plugins, [*NEEDED, *overrides], file, job)


def test_sections_are_instances_of_the_plugins_classes(plugins: Plugins) -> None:
    config = good(
        plugins, "engine.lr=1e-2", "engine.inner.width=5", "engine.shape=very_flat"
    ).config
    assert isinstance(config, RunConfig)
    assert type(config.engine) is plugins.get("engine", "acme").config
    assert (config.engine.lr, config.engine.inner.width, config.engine.shape) == (
        0.01,
        5,
        "very_flat",
    )
    assert type(config.engine.shape).__name__ == "Shape"
    assert isinstance(config.sampling, SamplingConfig)


def test_three_levels(plugins: Plugins, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("engine: {name: fast, lr: 0.25}\nsteps: 7\nsampling.max_tokens: 99\n")
    overrides = [text for text in NEEDED if not text.startswith("engine")]
    composed = compose(plugins, [*overrides, "sampling.max_tokens=11"], str(file))
    config = composed.config
    assert (config.engine.name, config.engine.lr, config.engine.shape) == (
        "acme",
        0.25,
        "very_flat",
    )
    assert (config.steps, config.engine.inner.width, config.sampling.max_tokens) == (7, 7, 11)
    assert composed.origin["engine.lr"] == str(file)
    assert composed.origin["engine.shape"] == "preset fast"
    assert composed.origin["sampling.max_tokens"] == "command line"
    assert "engine.shape" not in composed.set_keys
    assert "engine.lr" in composed.set_keys


def test_a_preset_builds_on_another_one(plugins: Plugins) -> None:
    composed = good(plugins, "engine=faster", "steps=4")
    engine = composed.config.engine
    assert (engine.name, engine.lr, engine.shape, engine.inner.width) == (
        "acme",
        0.75,
        "very_flat",
        4,
    )
    assert composed.origin["engine.lr"] == composed.origin["engine.shape"] == "preset faster"
    # Without _self_ the preset's own values win, as in Hydra.
    below = good(plugins, "engine=below").config.engine
    assert (below.lr, below.extra_args) == (0.75, {"a": 1})


def test_composing_leaves_nothing_behind_in_hydra(plugins: Plugins) -> None:
    before = set(ConfigStore.instance().repo)
    good(plugins, "engine=fast")
    assert not {"coupler.yaml", "engine", "rollout", "algorithm"} & set(ConfigStore.instance().repo)
    assert set(ConfigStore.instance().repo) == before


@pytest.mark.parametrize(
    "text", ["engine: acme\n", "engine: {name: acme}\n", "engine.name: acme\n"]
)
def test_choice_in_the_file(plugins: Plugins, tmp_path: Path, text: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    config = compose(plugins, NEEDED[1:], str(tmp_path / "run.yaml")).config
    assert config.engine.name == "acme"


def test_order_on_the_command_line_does_not_matter(plugins: Plugins) -> None:
    assert compose(plugins, ["engine.lr=0.1", *NEEDED]).config.engine.lr == 0.1


def test_other_choice_drops_the_section_of_the_file(plugins: Plugins, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("engine: {name: acme, shape: very_flat, lr: 0.5}\n")
    composed = good(plugins, "engine=toy", file=str(tmp_path / "run.yaml"))
    assert composed.config.engine.lr == 0.05
    assert "engine.lr" not in composed.set_keys
    (note,) = composed.notes
    assert "section engine is for acme and not used, engine=toy" in note


def test_an_empty_mapping_takes_the_place_of_one_below(plugins: Plugins, tmp_path: Path) -> None:
    """Of the file and of a preset. One that is filled adds its entries."""
    file = tmp_path / "run.yaml"
    file.write_text("data: {args: {size: 4, task: x}}\nreward: {functions: {a: {target: a:b}}}\n")

    composed = good(plugins, "data.args={}", "reward.functions={}", file=str(file))
    assert (composed.config.data.args, composed.config.reward.functions) == ({}, {})
    assert composed.origin["data.args"] == "command line"
    assert "data.args.size" not in composed.origin

    for typed, args in (
        (["data.args={size: 5}"], {"size": 5, "task": "x"}),
        (["data.args={}", "data.args.size=5"], {"size": 5}),
        (["data={}"], {"size": 4, "task": "x"}),
    ):
        config = good(plugins, *typed, "reward.functions={}", file=str(file)).config
        assert config.data.args == args

    assert good(plugins, "engine=below").config.engine.extra_args == {"a": 1}
    assert good(plugins, "engine=below", "engine.extra_args={}").config.engine.extra_args == {}
    file.write_text("engine: {name: below, extra_args: {}}\n")
    assert compose(plugins, NEEDED[1:], str(file)).config.engine.extra_args == {}


def test_null_takes_out_what_the_file_chose(plugins: Plugins, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("rollout: {name: blunt}\neval: {rollout: toy}\nengine: {name: acme, lr: 0.5}\n")
    typed = [text for text in NEEDED if not text.startswith(("engine=", "rollout="))]

    config = compose(plugins, ["eval.rollout=null", *typed], str(file)).config
    assert config.eval.rollout is None and config.rollout.name == "blunt"
    without = ["rollout=null", "eval.rollout=null", *typed]
    assert compose(plugins, without, str(file), Job.SFT).config.rollout is None
    with pytest.raises(ConfigError, match=r"^engine is not chosen\."):
        compose(plugins, ["engine=null", *typed], str(file))


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["engine=fast", "engine.extra_args.deep.x=1"],
        [
            "run_dir='a${b}'",
            "data.args={q: [1, '1e3'], n: null}",
            "sampling.stop=['</s>', \"it's: #1\"]",
        ],
        ["seed=3", "sampling.temperature=1e-7", "sync.in_flight=drain", "trackers=[]"],
    ],
)
def test_saved_form_composes_to_the_same(
    plugins: Plugins, tmp_path: Path, overrides: list[str]
) -> None:
    overrides = [text.replace("${", "\\${") for text in overrides]
    config = good(plugins, *overrides).config
    file = tmp_path / "config.yaml"
    file.write_text(dump_yaml(config))
    assert compose(plugins, [], str(file)).config == config


BAD = [
    ("engine.lrr=1", "unknown option engine.lrr.", "did you mean:  engine.lr"),
    ("+engine.lrr=1", "unknown option engine.lrr.", "engine.extra_args.lrr"),
    (
        "++engine.lrr=1",
        "unknown option engine.lrr.",
        "options of engine:  name, ranks, python, lr, shape",
    ),
    ("engine.inner.widht=1", "unknown option engine.inner.widht.", "engine.inner.width"),
    ("lr=1", "unknown option lr.", "did you mean:  engine.lr"),
    ("sampling.max_token=1", "unknown option sampling.max_token.", "sampling.max_tokens"),
    ("engine.lr.x=1", "engine.lr takes a number, got {'x': 1}.", ""),
    ("engine.lr=abc", "engine.lr takes a number, got 'abc'.", ""),
    ("engine.lr=null", "engine.lr takes a number, got null.", ""),
    (
        "data.columns={answer: null}",
        "data.columns takes a mapping {key: value, ...}, got {'answer': None}.",
        "",
    ),
    ("engine.shape=square", "engine.shape takes one of round, very_flat, got 'square'.", ""),
    ("engine.inner.width=0", "engine.inner.width must be at least 1", ""),
    ("steps=1.5", "steps takes an integer, got 1.5.", ""),
    ("steps=0", "steps must be at least 1, got 0.", ""),
    ("steps=${nope}", "steps=${nope} cannot be resolved", ""),
    ("steps=1,2", "steps is given several values, and a run takes one.", "--multirun steps=1,2"),
    ("prompts_per_step=-1", "prompts_per_step must be at least 1, got -1.", ""),
    (
        "reward.max_invalid_fraction=2",
        "reward.max_invalid_fraction must be between 0 and 1, got 2.0.",
        "",
    ),
    ("sampling.temperature=nan", "sampling.temperature must be a finite number, got nan.", ""),
    ("waits.heartbeat_s=inf", "waits.heartbeat_s must be a finite number, got inf.", ""),
    ("engine.lr=inf", "engine.lr must be a finite number, got inf.", ""),
    (
        "checkpoint.keep_best=2",
        "checkpoint.keep_best needs eval/reward: set eval.every_steps, or checkpoint.best_",
        "",
    ),
    (
        "sampling.top_p=0.9",
        "sampling.top_p=0.9 needs sampling.top_k in training",
        "set sampling.top_k=100, say.",
    ),
    ("sampling.top_k=-1", "sampling.top_k must be between 0 and 500000, got -1.", ""),
    ("sampling.temperature=0", "sampling.temperature must be above 0 in training", ""),
    ("sampling=3", "sampling is a section, got 3.", "max_tokens"),
    ("data.args=3", "data.args takes a mapping", ""),
    ("sampling.stop=x", "sampling.stop takes a list [...] of text, got 'x'.", ""),
    ("model.path=''", "model.path is empty: set it to", ""),
    ("data.source=''", "data.source is empty: set it to", ""),
    ("reward.target=''", "reward.target is empty: set it to", ""),
    ("eval.every_steps=5", "eval.data.source is empty: set it to", ""),
    ("sync.in_flight=abort", "sync.in_flight=abort needs max_staleness above 0", ""),
    ("~steps", "'~steps': options cannot be deleted.", ""),
    ("steps", "'steps' is no override.", "key=value"),
    ("run_dir=a=b", "the value of run_dir cannot be read: a=b", "'a=b'"),
    ("engine=[1]", "engine takes the name of a plugin's backend or preset, got [1].", ""),
]


@pytest.mark.parametrize(
    ("override", "sentence", "hint"), BAD, ids=[override for override, _, _ in BAD]
)
def test_bad_option(plugins: Plugins, override: str, sentence: str, hint: str) -> None:
    with pytest.raises(ConfigError) as error:
        good(plugins, override)
    first, *rest = str(error.value).splitlines()
    assert first.startswith(sentence)
    assert hint in str(error.value)
    assert "+" not in str(error.value)
    assert all(line.startswith("  ") for line in rest)


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("engine=acne", "did you mean: engine=acme"),
        ("engine=fasst", "did you mean: engine=fast"),
        ("rollout=sglang", "pip install coupler-rollout-sglang"),
        ("trackers=[consol]", "did you mean: tracker=console"),
        ("sync.transport=disc", "did you mean: transport=disk"),
        ("sync.manager=nope", "no sharding named 'nope' is installed"),
        ("engine=wrong", "the preset engine=wrong does not say which backend it is for"),
        ("engine=lost", "no engine named 'fasst' is installed.\n  did you mean: engine=fast"),
        (
            "engine=circle",
            "the preset engine=round cannot be composed: it builds on circle, which builds on it.",
        ),
        (
            "engine=odd",
            (
                "the preset engine=odd cannot be composed: its defaults are [{'override': 'x'}], "
                "and must be"
            ),
        ),
        ("engine=broken", "the preset engine=broken cannot be composed: while parsing"),
        ("engine=row", "the preset engine=row cannot be composed: it is no mapping"),
    ],
)
def test_bad_choice(plugins: Plugins, override: str, text: str) -> None:
    with pytest.raises(PluginError) as error:
        good(plugins, override)
    assert text in str(error.value)


def test_several_problems_are_reported_at_once(plugins: Plugins) -> None:
    with pytest.raises(
        ConfigError, match=r"2 problems:\n  - steps must be.*\n  - model.path is empty"
    ):
        good(plugins, "steps=0", "model.path=''")


def test_section_that_is_not_chosen(plugins: Plugins) -> None:
    with pytest.raises(
        ConfigError, match=r"^engine is not chosen.\n  try:  engine=NAME\n  installed:  .*acme"
    ):
        compose(plugins, NEEDED[1:])
    with pytest.raises(ConfigError, match="rollout is not chosen"):
        compose(plugins, [t for t in NEEDED if t != "rollout=toy"])
    assert good(plugins, "reward.target=''", job=Job.SFT).config.engine.name == "acme"
    sft = [t for t in NEEDED if not t.startswith(("rollout", "reward"))]
    assert compose(plugins, sft, job=Job.SFT).config.rollout is None


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("engine: [", "is not readable as YAML"),
        ("- a\n", "is a list"),
        ("engine: {name: acme, lrr: 1}", "unknown option engine.lrr"),
        ("steps: 1\nsteps: 2\n", "is not readable as YAML"),
    ],
)
def test_bad_file(plugins: Plugins, tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        good(plugins, file=str(tmp_path / "run.yaml"))


def test_top_p_is_of_evaluation_with_a_rollout_that_knows_it(plugins: Plugins) -> None:
    evaluates = ["eval.data.source=x", "eval.temperature=1", "eval.top_p=0.9"]
    for job, more in ((Job.EVAL, []), (Job.TRAIN, ["eval.at_start=true"])):
        assert good(plugins, *evaluates, *more, job=job).config.eval.top_p == 0.9
        with pytest.raises(
            ConfigError, match=r"^eval.top_p=0.9: rollout=blunt cannot; leave it out."
        ):
            good(plugins, *evaluates, *more, "rollout=blunt", job=job)
        with pytest.raises(ConfigError, match=r"^eval.top_p=0.9 needs eval.temperature above 0: "):
            good(plugins, *evaluates, *more, "eval.temperature=0", job=job)
    good(plugins, *evaluates, "rollout=blunt")  # there is no evaluation
    with pytest.raises(
        ConfigError, match=r"^sampling.top_p=0.9 is not of evaluation: set eval.top_p.$"
    ):
        good(plugins, "eval.data.source=x", "sampling.top_p=0.9", job=Job.EVAL)


def test_top_k_is_of_training_with_backends_that_know_masks(plugins: Plugins) -> None:
    knows = ("engine=toy", "sampling.top_k=20", "sampling.top_p=0.9")
    assert good(plugins, *knows).config.sampling.top_k == 20
    for choice, sentence in (
        ("rollout=blunt", r"rollout=blunt cannot \(output:sampling_mask\)"),
        ("engine=acme", r"engine=acme cannot \(input:sampling_mask\)"),
    ):
        with pytest.raises(ConfigError, match=rf"^sampling.top_k=20: {sentence}; set "):
            good(plugins, *knows, choice)

    with pytest.raises(ConfigError, match=r"^sampling.top_k must not be 1 in training: "):
        good(plugins, "engine=toy", "sampling.top_k=1")
    with pytest.raises(
        ConfigError, match=r"^sampling.top_k=20 is not of evaluation: leave it out.$"
    ):
        good(plugins, "eval.data.source=x", "sampling.top_k=20", job=Job.EVAL)


def test_pass_through_options_are_announced(plugins: Plugins) -> None:
    composed = good(plugins, "engine.extra_args.chunk=3")
    assert composed.config.engine.extra_args == {"chunk": 3}
    assert composed.notes == ("engine.extra_args is passed through unchecked: chunk",)


def test_preset_that_takes_the_name_of_a_backend_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    install(
        tmp_path,
        "coupler-engine-thief",
        plugin("engine", "thief") + PRESETS.replace("acme_conf", "thief_conf"),
    )
    (tmp_path / "thief_conf" / "engine").mkdir(parents=True)
    (tmp_path / "thief_conf" / "__init__.py").touch()
    (tmp_path / "thief_conf" / "engine" / "toy.yaml").write_text("name: thief\n")
    (tmp_path / "thief_conf" / "engine" / "other.yaml").write_text("name: thief\n")
    install(tmp_path, "coupler-engine-other", plugin("engine", "other"))
    with pytest.raises(
        PluginError,
        match=r"several meanings, from thief \(coupler-engine-thief 0.1.0\) and other \(coupler",
    ):
        # A loaded machine reads late what nobody asked for.
        compose(Plugins.load().complete(), [*NEEDED, "engine=other"])

    plugins = Plugins.load().complete()
    assert compose(plugins, [*NEEDED, "engine=toy"]).config.engine.name == "toy"
    (warned,) = [text for text in plugins.warnings() if "preset engine=toy" in text]
    assert warned.startswith("the preset engine=toy of thief (coupler-engine-thief 0.1.0) is not")


# ---- explain


def test_explain_an_option_and_a_section(plugins: Plugins) -> None:
    composed = good(plugins, "engine.lr=0.5")
    text = explain(composed, "engine.lr")
    for part in (
        "learning rate",
        "a number",
        "0.001",
        "0.5  (command line)",
        "coupler_engine_acme:Config",
    ):
        assert part in text
    assert "engine.inner.width" in explain(composed, "engine")
    assert "which it needs below 1" in explain(composed, "sampling.top_p")
    with pytest.raises(ConfigError, match=r"unknown option engine\.lrr"):
        explain(composed, "engine.lrr")


def test_differences_from_the_defaults(plugins: Plugins) -> None:
    lines = differences(good(plugins, "steps=5", "engine=fast", "seed=0")).splitlines()
    assert "steps: 5  # default 100; command line" in lines
    assert "engine.lr: 0.5  # default 0.001; preset fast" in lines
    assert not [line for line in lines if line.startswith(("seed", "samples_per_prompt"))]


# ---- options that nothing reads


def test_unread_options(plugins: Plugins) -> None:
    composed = good(
        plugins, "engine.lr=0.5", "seed=1", "engine.inner.width=3", "data.args.n=1", "data.args.m=2"
    )
    config, reads = track(composed.config)
    assert reads.unread(composed.set_keys) == composed.set_keys
    assert (config.engine.lr, config.engine.inner.width, config.data.args["n"]) == (0.5, 3, 1)
    unread = reads.unread(composed.set_keys)
    assert "seed" in unread
    assert not {"engine.lr", "engine.inner.width", "data.args.n", "data.args.m"} & set(unread)


def test_tracked_configuration_behaves_like_the_original(plugins: Plugins) -> None:
    plain = good(plugins, "engine.lr=0.5").config
    config, reads = track(plain)
    assert isinstance(config, RunConfig)
    assert isinstance(config.engine, type(plain.engine))
    assert config == plain
    assert plain == config
    assert repr(config) == repr(plain)
    assert not reads.keys
    assert original(config.engine) is plain.engine
    assert original(plain) is plain
    with pytest.raises(AttributeError, match=r"sampling\.top_p cannot be set"):
        config.sampling.top_p = 0.5
    assert dataclasses.asdict(config.engine) == dataclasses.asdict(plain.engine)
    assert "engine.lr" in reads.keys
    assert "seed" not in reads.keys


def test_replace_keeps_tracking_and_reads_nothing(plugins: Plugins) -> None:
    config, reads = track(good(plugins).config)
    other = dataclasses.replace(config, seed=9)
    engine = dataclasses.replace(config.engine, lr=7.0)
    assert not reads.keys
    assert (other.seed, engine.lr, engine.inner.width) == (9, 7.0, 2)
    assert reads.keys == {"seed", "engine.lr", "engine.inner.width"}


def test_copies_that_leave_the_process_count_as_read() -> None:
    config, reads = track(RunConfig())
    sent = pickle.loads(pickle.dumps(config.reward))
    assert type(sent) is type(RunConfig().reward)
    assert "reward.timeout_s" in reads.keys
    assert type(copy.deepcopy(config.eval)) is type(RunConfig().eval)
