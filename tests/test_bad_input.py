"""What users get wrong, each through the command line: exit code 2, one clear sentence,
a fix, and nothing lost.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from job_run import arguments, metrics, toy_train, write_inputs

from coupler.cli import main

Refused = Callable[..., list[str]]
PLUGIN = """
from dataclasses import dataclass
from coupler import Backend, EngineConfig, hookimpl

@dataclass
class Config(EngineConfig):
    name: str = "acme"

@hookimpl
def coupler_backends():
    yield Backend(kind="engine", name="acme", target="not_there:Never", config=Config, api={api})
"""


@pytest.fixture
def refused(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Refused:
    """Run a job that ends with code 2; return its complaint, a line each, without
    ``coupler: `` and warnings.
    """
    write_inputs(tmp_path)

    def run(job: str, *overrides: str, run_dir: Path = tmp_path / "run") -> list[str]:
        capfd.readouterr()
        assert main([*arguments(job, model, tmp_path, run_dir), *overrides]) == 2
        lines = [
            line
            for line in capfd.readouterr().err.splitlines()
            if not line.startswith("coupler: warning: ")
        ]
        (start,) = [i for i, line in enumerate(lines) if line.startswith("coupler: ")]
        assert not any("Traceback" in line for line in lines[:start])
        complaint = [lines[start].removeprefix("coupler: "), *lines[start + 1 :]]
        assert all(line.startswith("  ") for line in complaint[1:]), complaint
        return complaint

    return run


def no_traceback(lines: list[str]) -> str:
    text = "\n".join(lines)
    assert "Traceback" not in text
    return text


@pytest.mark.parametrize(
    ("override", "first", "fix"),
    [
        ("engine.lrr=1", "unknown option engine.lrr.", "did you mean:  engine.lr"),
        (
            "sampling.max_token=9",
            "unknown option sampling.max_token.",
            "did you mean:  sampling.max_tokens",
        ),
        ("engine=fdsp", "no engine named 'fdsp' is installed.", "did you mean: engine=fsdp"),
        ("rollout=hff", "no rollout named 'hff' is installed.", "did you mean: rollout=hf"),
        (
            "algorithm=gpro",
            "no algorithm named 'gpro' is installed.",
            "did you mean: algorithm=grpo",
        ),
        (
            "trackers=[wandbb]",
            "no tracker named 'wandbb' is installed.",
            "did you mean: tracker=wandb",
        ),
        ("engine.lr=fast", "engine.lr takes a number, got 'fast'.", ""),
        ("steps=2.5", "steps takes an integer, got 2.5.", ""),
        (
            "engine.schedule=cosin",
            "engine.schedule takes one of constant, linear, cosine, wsd, got 'cosin'.",
            "",
        ),
        ("engine.num_cycles=2", "engine.num_cycles needs engine.schedule=cosine, got 2.0.", ""),
        (
            "engine.init_lr_ratio=0.1",
            "engine.init_lr_ratio needs engine.warmup_steps above 0, got 0.1.",
            "",
        ),
        ("steps=0", "steps must be at least 1, got 0.", ""),
        ("algorithm.kl_coef=nan", "algorithm.kl_coef must be a finite number, got nan.", ""),
        ("engine.lora_rank=-1", "engine.lora_rank must not be negative, got -1.", ""),
        ("engine.lr=-1", "engine.lr must be above 0, got -1.0.", ""),
        (
            "reward.max_invalid_fraction=2",
            "reward.max_invalid_fraction must be between 0 and 1, got 2.0.",
            "",
        ),
        (
            "algorithm.clip_low=1.5",
            "algorithm.clip_low=1.5 must be at least 0 (off) and below 1, since",
            "",
        ),
        (
            "algorithm.aggregation_constant=9",
            "algorithm.aggregation_constant=9 is the divisor of algorithm.aggre",
            "",
        ),
        (
            "engine.fsdp_size=2",
            "engine.fsdp_size=2 does not divide engine.ranks=1: set it to a divisor, or to 0",
            "",
        ),
        (
            "engine.sequence_parallel=2",
            "engine.sequence_parallel=2 does not divide engine.ranks=1: set it to 1.",
            "",
        ),
        (
            "samples_per_prompt=1",
            "samples_per_prompt=1 leaves nothing to compare a sample with: set ",
            "",
        ),
        (
            "max_staleness=1",
            "max_staleness=1 trains on tokens that older weights sampled, but ",
            "",
        ),
        (
            "optimizer_steps_per_batch=3",
            "optimizer_steps_per_batch=3 does not divide",
            "try:  optimizer_steps_per_batch=",
        ),
        (
            "engine.max_tokens_per_gpu=20",
            "engine.max_tokens_per_gpu=20 is less than",
            "try:  engine.max_tokens_per_gpu=72",
        ),
        ("algorithm=sft", "algorithm=sft is for coupler sft, not for coupler train.", ""),
        ("critic.engin.lr=1", "unknown option critic.engin.", "did you mean:  critic.engine"),
        ("critic.warmup_steps=-1", "critic.warmup_steps must be at least 0, got -1.", ""),
    ],
)
def test_options(override: str, first: str, fix: str, refused: Refused, tmp_path: Path) -> None:
    """Where there is no line with a fix, the sentence itself says what may stand
    there.
    """
    lines = refused("train", override)
    assert lines[0].startswith(first)
    assert fix in no_traceback(lines[1:])
    assert not (tmp_path / "run").exists()


def test_ray_that_is_not_installed(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert refused("train", "executor=ray") == [
        "ray is not installed.",
        "  try:  pip install 'coupler-core[ray]'",
    ]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("overrides", "first", "fix"),
    [
        (["critic.engine.lr=-1"], "critic.engine.lr must be above 0, got -1.0.", ""),
        (
            ["critic.engine.num_cycles=2"],
            "critic.engine.num_cycles needs critic.engine.schedule=cosine, got 2.0.",
            "",
        ),
        (
            ["critic.engine.lrr=1"],
            "unknown option critic.engine.lrr.",
            "did you mean:  critic.engine.lr",
        ),
        (
            ["engine@critic.engine=fdsp"],
            "critic.engine=fdsp: no engine named 'fdsp' is installed.",
            "did you mean: engine=fsdp",
        ),
        (
            ["critic.optimizer_steps_per_batch=3"],
            "critic.optimizer_steps_per_batch=3 does not divide the 8",
            "try:  ",
        ),
        (
            ["critic.model.path=/not/there"],
            "critic.model.path=/not/there is no folder.",
            "try:  leaving it out",
        ),
        (["algorithm.lam=2"], "algorithm.lam=2.0 must be between 0 and 1.", ""),
        (
            ["algorithm.kl_target=1", "algorithm.kl=none"],
            "algorithm.kl_target=1.0 adapts a coefficient that ",
            "",
        ),
        (
            ["algorithm.dynamic_sampling=true"],
            "unknown option algorithm.dynamic_sampling.",
            "options of algorithm:  ",
        ),
    ],
)
def test_a_critic(
    overrides: list[str], first: str, fix: str, refused: Refused, tmp_path: Path
) -> None:
    lines = refused("train", "algorithm=ppo", *overrides)
    assert lines[0].startswith(first)
    assert fix in no_traceback(lines[1:])
    assert not (tmp_path / "run").exists()


def test_an_engine_that_computes_no_values(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "acme_blind.py").write_text(PLUGIN.format(api=1))
    monkeypatch.delitem(sys.modules, "acme_blind", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("COUPLER_PLUGINS", "acme_blind")
    (line,) = refused("train", "algorithm=ppo", "engine@critic.engine=acme")
    assert line.startswith(
        "algorithm=ppo trains a critic, and critic.engine=acme does not compute values (output:val"
    )
    assert "set engine@critic.engine to one of fsdp" in line


@pytest.mark.parametrize(
    ("sources", "chosen", "first", "fix"),
    [
        (
            {"acme_broken": "import acme_kernels"},
            "acme",
            "no engine named 'acme' is installed.",
            (
                "failed to load: acme_broken (module): ModuleNotFoundError: No module named "
                "'acme_kernels'"
            ),
        ),
        (
            {"acme": "import acme_kernels"},
            "acme",
            "engine=acme cannot be used: the plugin acme (module) failed to load.",
            "try:        correct the module acme, or take it out of COUPLER_PLUGINS",
        ),
        (
            {"acme_one": PLUGIN.format(api=1), "acme_two": PLUGIN.format(api=1)},
            "acme",
            "two plugins provide engine=acme: acme_one (module) and acme_two (module).",
            "COUPLER_DISABLE_PLUGINS",
        ),
        (
            {"acme_new": PLUGIN.format(api=9)},
            "acme",
            "engine=acme of acme_new (module) is written for API generation 9; ",
            "try:  pip install --upgrade coupler-core",
        ),
        (
            {"acme_old": PLUGIN.format(api=0)},
            "acme",
            "engine=acme of acme_old (module) is written for API generation 0; ",
            "try:  correct the module acme_old",
        ),
    ],
)
def test_plugins(
    sources: dict[str, str],
    chosen: str,
    first: str,
    fix: str,
    refused: Refused,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("COUPLER_PLUGINS", ",".join(sources))
    lines = refused("train", f"engine={chosen}")
    assert lines[0].startswith(first)
    assert fix in no_traceback(lines[1:])


GOOD = '{"prompt": "a", "answer": "b"}\n'
CODE = "def rows():\n    yield {'prompt': 'a', 'answer': 'b'}\n    raise ValueError('boom')\n"


@pytest.mark.parametrize(
    ("job", "key"), [("train", "data"), ("sft", "data"), ("eval", "eval.data")]
)
@pytest.mark.parametrize(
    ("file", "content", "first", "fix"),
    [
        (
            "a.jsonl",
            "",
            "{key}.source: {path} is empty.",
            '{{"prompt": "1 + 2 = ?", "answer": "3"}}',
        ),
        (
            "a.jsonl",
            "\n\n",
            "{key}.source: {path} has no rows.",
            '{{"prompt": "1 + 2 = ?", "answer": "3"}}',
        ),
        (
            "a.jsonl",
            GOOD + '{"prompt": \n',
            "{path}, line 2 is not JSON: ",
            '{{"prompt": "1 + 2 = ?", "answer": "3"}}',
        ),
        ("a.jsonl", GOOD + "[1]\n", "{path}, line 2 is a list, not a mapping of columns.", ""),
        (
            "a.jsonl",
            '{"promt": "a", "answer": "b"}\n',
            "{path}, line 1 has no 'prompt' - did you mean {key}.prompt_key=promt?",
            "it has:  promt, answer",
        ),
        (
            "a.jsonl",
            '{"prompt": "a", "x": 1}\n',
            "{path}, line 1 has no 'answer'.",
            "try:  {key}.answer_key=COLUMN",
        ),
        ("a.jsonl", None, "{key}.source: there is no file {path}.", "it is looked up from:"),
        ("a.py", CODE, "{key}.source={path}:rows raised ValueError: boom.", "at:  {path}, line 3"),
        (
            "a.py",
            "def rows(): raise SystemExit(3)\n",
            "{key}.source={path}:rows raised SystemExit: 3.",
            "at:  {path}",
        ),
        ("a.py", "exit(3)\n", "{key}.source={path}:rows cannot be imported: 3", ""),
        ("a.py", "def rows(:\n", "{key}.source={path}:rows cannot be imported: ", ""),
        (
            "a.py",
            "def rows(): pass\n",
            "{key}.source={path}:rows raised TypeError: 'NoneType' object is not iterable.",
            "",
        ),
    ],
)
def test_data(
    job: str,
    key: str,
    file: str,
    content: str | None,
    first: str,
    fix: str,
    refused: Refused,
    tmp_path: Path,
) -> None:
    path = tmp_path / file
    if content is not None:
        path.write_text(content)
    lines = refused(job, f"{key}.source={path}{':rows' if path.suffix == '.py' else ''}")
    assert lines[0].startswith(first.format(key=key, path=path))
    assert fix.format(key=key, path=path) in no_traceback(lines[1:])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("job", "key"), [("train", "data"), ("sft", "data"), ("eval", "eval.data")]
)
def test_a_prompt_over_the_limit(job: str, key: str, refused: Refused, tmp_path: Path) -> None:
    lines = refused(job, f"{key}.max_prompt_tokens=5")
    assert lines[0].startswith(
        f"6 of 6 prompts are longer than {key}.max_prompt_tokens=5; the first is row 0 "
    )
    assert lines[1] == f"  try:  {key}.max_prompt_tokens=24, or {key}.drop_overlong=true"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("job", "key"), [("train", "data"), ("eval", "eval.data")])
def test_a_prompt_that_leaves_the_model_no_position(
    job: str, key: str, refused: Refused, model: Path, tmp_path: Path
) -> None:
    lines = refused(job, f"model.path={short_model(model, tmp_path, 24)}")
    assert lines[0].startswith(
        "6 of 6 prompts are longer than 23 tokens, for the model has 24 positions, one of "
        "them for a completion; "
    )
    assert lines[1].startswith(
        "  try:  a model with more max_position_embeddings in its config.json, or "
    )
    assert not (tmp_path / "run").exists()


def test_a_row_that_is_longer_than_the_model_or_a_micro_batch(
    refused: Refused, model: Path, tmp_path: Path
) -> None:
    lines = refused("sft", "engine.max_tokens_per_gpu=25")
    assert lines[0].startswith(
        "6 of 6 rows are longer than engine.max_tokens_per_gpu=25; the first is row 0 "
    )
    assert lines[1] == "  try:  engine.max_tokens_per_gpu=26, or data.drop_overlong=true"
    lines = refused("sft", f"model.path={short_model(model, tmp_path, 25)}")
    assert (
        "rows are longer than 25 tokens, for the model has 25 positions, for a prompt with "
        "its answer;"
    ) in lines[0]
    assert not (tmp_path / "run").exists()


def short_model(model: Path, tmp_path: Path, positions: int) -> Path:
    """A copy of ``model`` that was made for so many positions."""
    folder = tmp_path / "short"
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "max_position_embeddings": positions})
    )
    return folder


@pytest.mark.parametrize(
    ("change", "first", "fix"),
    [
        (None, "model.path='{path}' is no folder.", "try:  a downloaded model"),
        (
            ("tokenizer.json", None),
            "model.path={path} holds no tokenizer.",
            "try:  copying tokenizer.json into it",
        ),
        (("tokenizer.json", "{"), "the tokenizer of model.path={path} cannot be loaded: ", ""),
        (("config.json", "{"), "the tokenizer of model.path={path} cannot be loaded: ", ""),
        (
            ("model.safetensors.index.json", "{}"),
            "{path}/model.safetensors.index.json is damaged: KeyError",
            "try:  ",
        ),
        (
            ("generation_config.json", "["),
            "{path}/generation_config.json is damaged: it is no JSON",
            "try:  ",
        ),
        (
            ("model.safetensors", None),
            "model.path={path} holds neither",
            "try:  save the model with save_pretrained",
        ),
    ],
)
def test_the_model_folder(
    change: tuple[str, str | None] | None,
    first: str,
    fix: str,
    refused: Refused,
    model: Path,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "other"
    if change:
        shutil.copytree(model, folder)
        file, content = change
        (folder / file).unlink(missing_ok=True)
        if content is not None:
            (folder / file).write_text(content)
    lines = refused("train", f"model.path={folder}")
    assert lines[0].startswith(first.format(path=folder))
    assert fix in no_traceback(lines[1:])


@pytest.mark.parametrize("content", ["[" * 99_999, '{"a":' * 99_999, "null", "3", ""])
@pytest.mark.parametrize("engine", ["fsdp", "megatron"])
def test_a_configuration_of_a_model_that_is_none(
    engine: str, content: str, refused: Refused, model: Path, tmp_path: Path
) -> None:
    """The plugin that looks at it first is not to blame."""
    folder = tmp_path / "other"
    shutil.copytree(model, folder)
    (folder / "config.json").write_text(content)
    first, fix = refused("sft", f"engine={engine}", f"model.path={folder}")
    assert f"{folder}/config.json is damaged: it " in first and "try:" in fix


def test_a_model_function_that_is_not_there(refused: Refused, tmp_path: Path) -> None:
    line, _ = refused("train", "model.path=no_such_module:build")
    assert line.startswith(
        "model.path=no_such_module:build is no folder, and no function either: No module named"
    )
    lines = refused("train", f"model.path={tmp_path / 'reward.py'}:build")
    assert lines[0].endswith("has no 'build'.") and lines[1] == "  it has:  score"
    (tmp_path / "model.py").write_text("def build():\n    raise KeyError('weights')\n")
    (line,) = refused("train", f"model.path={tmp_path / 'model.py'}:build")
    assert line.endswith("names a function that raised KeyError('weights').")


def test_a_run_dir_that_cannot_be_one(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        lines = refused("train", run_dir=folder)
        assert (
            lines[0].startswith(f"run_dir={folder} cannot be written: ")
            and lines[1] == "  try:  another run_dir"
        )
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize(
    ("target", "source", "first", "fix"),
    [
        (
            "none.py:score",
            None,
            "reward.target={target} cannot be used: there is no file ",
            "it is looked up from:",
        ),
        (
            "r.py:scor",
            "def score(completion): return 1",
            "reward.target={target} cannot be used: ",
            "it has:  score",
        ),
        (
            "r.py:score",
            "def score(text): return 1",
            "reward.target={target} cannot be used: ",
            "it is called with the keywords",
        ),
        (
            "r.py:score",
            "def score(:",
            "reward.target={target} cannot be imported: SyntaxError: ",
            "",
        ),
        (
            "r.py:score",
            "\nimport no_such",
            "reward.target={target} cannot be imported: ModuleNotFoundError: ",
            "r.py, line 2",
        ),
    ],
)
def test_a_reward_that_cannot_be_called(
    target: str, source: str | None, first: str, fix: str, refused: Refused, tmp_path: Path
) -> None:
    if source is not None:
        (tmp_path / "r.py").write_text(source)
    lines = refused("train", f"reward.target={tmp_path / target}")
    assert lines[0].startswith(first.format(target=tmp_path / target))
    assert fix in no_traceback(lines[1:])
    assert not (tmp_path / "run").exists()


def test_an_entry_point_that_nobody_can_read(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "acme-1.0.dist-info"
    record.mkdir()
    (record / "entry_points.txt").write_bytes("[acme]\na = b\n".encode("utf-16"))
    monkeypatch.syspath_prepend(tmp_path)
    (line, fix) = refused("train")
    assert line.startswith(f"{record} has an entry_points.txt that cannot be read, and torch reads")
    assert fix == "  try:  pip uninstall of that distribution"


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("math:pi", "cannot be used: pi of math is no function."),
        ("plain:score", "cannot be imported: plain is a folder without __init__.py."),
    ],
)
def test_a_target_that_names_no_function(
    target: str, says: str, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plain").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert refused("train", f"reward.target={target}")[0] == f"reward.target={target} {says}"
    assert refused("train", f"model.path={target}")[0].endswith(says.partition(": ")[2])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("fault", "reasons"),
    [
        (
            "raise KeyError('gold')",
            ["x KeyError: 'gold'", "Traceback (most recent call last):", "line 8, in score"],
        ),
        ("time.sleep(60)", ["x took longer than 0.3 s", "line 8 in score"]),
        ("return float('nan')", ["x returned nan"]),
    ],
)
def test_a_reward_that_fails_later_keeps_what_was_written(
    fault: str, reasons: list[str], refused: Refused, tmp_path: Path
) -> None:
    """The first step's eight calls are answered, and every one after them is not: a
    worker started again counts on.
    """
    (tmp_path / "late.py").write_text(
        "import time\nfrom pathlib import Path\ncalls = Path(__file__).with_name('calls')\n\n\n"
        "def score(completion):\n    if calls.exists() and calls.stat().st_size >= 8:\n      "
        f"  {fault}\n"
        "    calls.open('a').write('x')\n    return float(len(set(completion)))\n"
    )
    lines = refused(
        "train",
        f"reward.target={tmp_path / 'late.py'}:score",
        "reward.timeout_s=0.3",
        "checkpoint.every_steps=1",
    )
    assert lines[0].startswith("5 of ") and lines[0].endswith(
        f"calls of {tmp_path / 'late.py'}:score gave no valid number (5 of the last 13)."
    )
    assert lines[1] == "  limit:   reward.max_invalid_fraction=0.01"
    for reason in reasons:
        assert reason in "\n".join(lines)
    assert [line["step"] for line in metrics(tmp_path / "run")] == [0, 1]
    manifest = json.loads(
        (tmp_path / "run" / "checkpoints" / "step_1" / "MANIFEST.json").read_text()
    )
    assert manifest["step"] == 1


def test_an_option_that_nothing_reads(
    refused: Refused, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (first, fix) = refused("sft", "strict=true", "sampling.max_tokens=9")
    assert first == "you set sampling.max_tokens, and nothing read it."
    assert fix.startswith("  try:  ")
    (first, _) = refused("eval", "strict=true", "checkpoint.keep_last=1", run_dir=tmp_path / "eval")
    assert " checkpoint.keep_last, " in first
    given = arguments("sft", model, tmp_path, tmp_path / "warned")
    assert main([*given, "sampling.max_tokens=9"]) == 0
    assert (
        "coupler: warning: you set sampling.max_tokens, and nothing read it.\n"
        in capfd.readouterr().err
    )
    read = [
        *arguments("sft", model, tmp_path, tmp_path / "strict"),
        "strict=true",
        "data.drop_overlong=true",
    ]
    assert main(read) == 0
    assert main([*given, "sampling.max_tokens=9", "steps=4"]) == 0
    assert "you set sampling.max_tokens, and nothing read it.\n" in capfd.readouterr().err, (
        "nor when it goes on"
    )


@pytest.mark.skipif(find_spec("wandb") is not None, reason="the library is installed")
def test_a_tracker_whose_library_is_not_installed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(toy_train(tmp_path, "trackers=[jsonl,wandb]")) == 2
    assert capfd.readouterr().err.endswith(
        "coupler: tracker wandb needs the package wandb.\n"
        "  try:  pip install 'coupler-trackers[wandb]'\n"
    )
    assert not (tmp_path / "run" / "config.yaml").exists()
