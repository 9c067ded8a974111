"""Check the configuration of one run.

These are its model folder, tokenizer, chat template, data and reward, if they are set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import shorten

from safetensors import SafetensorError, safe_open

from coupler.config.schema import DataConfig, RewardConfig, RunConfig
from coupler.data import Codec, encode_prompts, load_rows
from coupler.data.columns import Columns
from coupler.data.model_folder import model_folder
from coupler.doctor.host import DISK_MIN_BYTES, disk
from coupler.errors import CouplerError
from coupler.interfaces import Model
from coupler.jobs.forms import Form
from coupler.plugins.finding import Finding, first_line, from_error, ok, problem, warning
from coupler.rewards import Invalid, check_rewards
from coupler.rewards.classifier import check_classifier
from coupler.rewards.judge import Question
from coupler.rewards.options import opinions_of
from coupler.run.row_form import ColumnsOf
from coupler.system.files import DamagedFile, read_json

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
NUM_SAMPLES, MAX_ENCODED = 2, 1000
# Digits, words, signs and spaces, which tokenizers cut by rules of their own.
CUT = "it's 1,234 + 5  ?\n\n x"
# A checkpoint and an export take so many times the model's own files: fp32 weights and
# moments, from bf16.
BYTES_OF_MODEL = 8


def configured(
    config: RunConfig, columns: Mapping[str, ColumnsOf], form: Form | None = None
) -> Iterator[Finding]:
    """Check everything that ``config`` names.

    Args:
        columns: what names the columns of each section of data.
        form: that of rows of supervised training.
    """
    try:
        model = Model(model_folder(config.model.path), config.model.trust_remote_code)
    except CouplerError as error:
        yield from_error("model", error, "correct model.path")
        return

    yield from disk(Path(config.run_dir), needed_bytes(Path(model.path)))
    if config.model.trust_remote_code:
        yield warning(
            "model",
            "model.trust_remote_code=true: Python files of the model's folder run with your rights",
        )
    if model.path:
        yield from model_files(Path(model.path))
        yield from tokenizer(model)

    for key, source in (("data", config.data), ("eval.data", config.eval.data)):
        if source.source and model.path:
            named = columns.get(key, Columns)
            if form and (key == "data" or form.validates):
                yield from taught(source, key, model, form, named)
            else:
                yield from data(source, key, model, named)
    models = config.reward_model, config.judge
    source = config.data if config.data.source else config.eval.data
    yield from opinions(config)
    asks = not form and not opinions_of(*models)
    if config.reward.named and source.source and asks:
        yield from reward(config.reward, source)


def model_files(folder: Path) -> Iterator[Finding]:
    """Check config.json, and every tensor that the index names."""
    again = f"hf download ORG/NAME --local-dir {folder}"
    if not folder.is_dir():
        yield problem("model", f"model.path={folder} is no folder", again)
        return

    try:
        kind = read_json(folder / "config.json")["model_type"]
    except DamagedFile as error:
        yield problem("model", str(error).rstrip("."), again)
        return
    except KeyError:
        yield problem("model", f"{folder / 'config.json'} has no model_type", again)
        return
    yield ok("model", f"{folder}, of type {kind}")

    index: dict[str, str] = {}
    try:
        if (folder / INDEX).exists():
            index = read_json(folder / INDEX)["weight_map"]
    except DamagedFile as error:
        yield problem("weights", str(error).rstrip("."), again)
        return
    except KeyError:
        yield problem("weights", f"{folder / INDEX} is damaged: it has no weight_map", again)
        return

    held: dict[str, set[str]] = {}
    for file in sorted({*index.values()} or {SINGLE}):
        try:
            with safe_open(folder / file, framework="np") as tensors:
                held[file] = set(tensors.keys())
        except (OSError, SafetensorError) as error:
            yield problem(
                "weights", f"{folder / file} is missing or damaged: {first_line(error)}", again
            )
            return

    lost = [name for name, file in index.items() if name not in held[file]]
    if lost:
        yield problem(
            "weights",
            f"{index[lost[0]]} lacks {lost[0]}, and {len(lost) - 1} more are not there",
            again,
        )
    else:
        yield ok("weights", f"{sum(map(len, held.values()))} tensors in {len(held)} files")


def tokenizer(model: Model) -> Iterator[Finding]:
    """Check the tokenizer, its end of turn, and that its chat template renders.

    A template that rewrites earlier turns is a warning.
    """
    fix = f"copy tokenizer.json and tokenizer_config.json of the model into {model.path} again"
    try:
        codec = Codec(model)
        end = codec.tokenizer.convert_ids_to_tokens(codec.end_of_turn)
        codec.prompt_ids("hi", "")
        rewritten = codec.probe_prefix_preserving()
        differs = _differs_from_file(model, codec)
    except CouplerError as error:
        yield from_error("tokenizer", error, fix)
        return
    except ImportError as error:
        yield problem(
            "tokenizer", f"cannot be loaded: {first_line(error)}", "pip install transformers"
        )
        return
    # A broken file makes transformers raise anything, even Exception itself.
    except Exception as error:
        yield problem("tokenizer", f"of {model.path} cannot be loaded: {first_line(error)}", fix)
        return

    yield ok("tokenizer", f"a turn ends with {end}")
    if differs:
        yield warning("tokenizer.json", differs)
    if not codec.tokenizer.chat_template:
        yield warning("chat template", "there is none: prompts are encoded as they stand")
    elif rewritten:
        yield warning(
            "chat template", shorten(f"{rewritten}; only single-turn runs are right with it", 300)
        )
    else:
        yield ok("chat template", "renders, and never rewrites earlier turns")


def _differs_from_file(model: Model, codec: Codec) -> str:
    """Say if transformers cuts text otherwise than the file of the tokenizer does.

    For some types of models it takes the rules of their own tokenizer, whatever the
    file says.
    """
    file = Path(model.path) / "tokenizer.json"
    if not file.is_file():
        return ""
    from tokenizers import Tokenizer

    plain = Tokenizer.from_file(str(file)).encode(CUT, add_special_tokens=False)
    if codec.tokenizer.encode(CUT, add_special_tokens=False) == plain.ids:
        return ""
    return (
        f"transformers cuts {CUT!r} otherwise than this file says: its ids are trained, and a "
        "server that follows the file reads others"
    )


def data(
    config: DataConfig, key: str, model: Model, columns: ColumnsOf = Columns
) -> Iterator[Finding]:
    """Check that rows can be read, and their prompts encoded."""
    try:
        rows = load_rows(config, key, columns)
        prompts, dropped = encode_prompts(rows[:MAX_ENCODED], Codec(model), config, key)
    except CouplerError as error:
        yield from_error(key, error, f"look at {key}.source={config.named}")
        return

    longest = max(len(prompt.ids) for prompt in prompts)
    drops = f", {dropped} dropped" if dropped else ""
    yield ok(
        key,
        f"{len(rows)} rows of {config.named}; of the first {len(prompts)}, "
        f"at most {longest} tokens{drops}",
    )


def taught(
    config: DataConfig, key: str, model: Model, form: Form, columns: ColumnsOf
) -> Iterator[Finding]:
    """Check that rows of supervised training can be read and encoded."""
    try:
        rows = load_rows(config, key, columns)
        first = rows[:MAX_ENCODED]
        kept, dropped, _ = form.encode(first, Codec(model), config, None, key)
    except CouplerError as error:
        yield from_error(key, error, f"look at {key}.source={config.named}")
        return

    longest = max(len(example) for _, example in kept)
    drops = f", {dropped} dropped" if dropped else ""
    text = (
        f"{len(rows)} rows of {config.named}; of the first {len(first)}, at most {longest} tokens"
    )
    yield ok(key, f"{text}{drops}")


def opinions(config: RunConfig) -> Iterator[Finding]:
    """Check the classifier and the question to the judge, if the run has them.

    They are not asked, so that a function that gets their opinions is not called.
    """
    try:
        if path := config.reward_model.model.path:
            check_classifier(Path(model_folder(path, "reward_model.model")))
            yield ok("reward model", f"{path} is a sequence classifier with one label")
        if path := config.judge.model.path:
            Question.of(config.judge)
            yield ok("judge", f"{config.judge.prompt} asks {path}")
    except CouplerError as error:
        yield from_error("reward model", error, "correct reward_model.* or judge.*")


def reward(config: RewardConfig, source: DataConfig) -> Iterator[Finding]:
    """Score the first rows of ``source`` with the right answer, and with nothing."""
    fix = f"correct {config.words}"
    try:
        rows = load_rows(source)[:NUM_SAMPLES]
        samples = [(row.answer, row.answer, row.as_mapping()) for row in rows]
        samples += [("", row.answer, row.as_mapping()) for row in rows]
        scored = check_rewards(config, samples)
    except CouplerError as error:
        yield from_error("reward", error, fix)
        return

    bad = next((s.result.reason for s in scored if isinstance(s.result, Invalid)), None)
    if bad is not None:
        yield problem(
            "reward",
            f"{config.words} gave no number: {bad}",
            f"{fix}: a finite number for any completion",
        )
    else:
        given = [s.result for s in scored]
        right, nothing = given[: len(rows)], given[len(rows) :]
        yield ok(
            "reward",
            f"{config.words} gives {right} for the answers of {len(rows)} rows, "
            f"{nothing} for nothing",
        )


def needed_bytes(folder: Path) -> int:
    """Estimate the bytes of disk that one checkpoint and the export take."""
    return max(
        DISK_MIN_BYTES,
        BYTES_OF_MODEL * sum(path.stat().st_size for path in folder.glob("*.safetensors")),
    )
