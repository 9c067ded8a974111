"""Read the data of a run as the run would, and report what is wrong with it.

This is ``coupler doctor data``. It starts no engine and loads no weights.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

from coupler.config.schema import Job, RewardConfig, RunConfig
from coupler.data import Codec, Row
from coupler.data.columns import Columns
from coupler.data.dataset import records, row_of, source_named
from coupler.data.model_folder import model_folder
from coupler.data.options import DataConfig
from coupler.data.sampling import prompt_stream
from coupler.doctor.columns import Seen, column_findings
from coupler.doctor.prompts import Encoded, prompt_findings
from coupler.doctor.spotted import Spotted
from coupler.errors import CouplerError, DataError
from coupler.interfaces import Model
from coupler.jobs.forms import Form, form_of
from coupler.plugins.finding import Finding, first_line, from_error, ok, problem, warning
from coupler.plugins.manager import Plugins
from coupler.rewards import Invalid, Scored, check_rewards
from coupler.rewards.options import opinions_of
from coupler.run.inputs import check_no_sampler, check_sampler
from coupler.run.plan_checks import micro_batch_room
from coupler.run.row_form import ColumnsOf, columns_of, job_of

# Rows whose own answer the reward scores.
FIRST_SCORED, MAX_SCORED = 2, 100


@dataclass(slots=True)
class Section:
    """A section of data with the rows that could be read."""

    key: str
    config: DataConfig
    columns: ColumnsOf = Columns
    found: list[tuple[str, Row]] = field(default_factory=list)  # with their places
    rows: list[Row] = field(default_factory=list)

    def add(self, place: str, row: Row) -> None:
        self.found.append((place, row))
        self.rows.append(row)


def examine(config: RunConfig, plugins: Plugins) -> Iterator[Finding]:
    """Yield what is found in ``data`` and in ``eval.data``.

    A problem means that the run would be refused.
    """
    job = job_of(config, plugins)
    form = form_of(config, plugins) if job is Job.SFT else None
    both = [
        Section("data", config.data, columns_of(config, plugins, job)),
        Section("eval.data", config.eval.data, columns_of(config, plugins, job, "eval.data")),
    ]
    sections = [section for section in both if section.config.source]
    if not sections:
        fix = "data.source=train.jsonl, or --config run.yaml"
        yield problem("data", "data.source is not set", fix)
        return

    codec = yield from _codec(config)
    for section in sections:
        yield from _read(section)
        if codec and section.rows:
            yield from _encoded(section, codec, config, form)
        yield from _repeated(section)
        # What models say of an episode, no row has.
        alone = not opinions_of(config.reward_model, config.judge)
        if config.reward.named and alone and section.rows and job is not Job.SFT:
            yield from _scored(config.reward, section)

    if len(sections) == 2:
        yield from _shared(*sections)


def _codec(config: RunConfig) -> Iterator[Finding]:
    """Load the tokenizer. Without one, a problem is found and None returned."""
    fix = "model.path=FOLDER, a downloaded model"
    if not config.model.path:
        text = "model.path is not set: lengths and the chat template were not looked at"
        yield problem("tokenizer", text, fix)
        return None

    try:
        folder = model_folder(config.model.path)
        return Codec(Model(folder, config.model.trust_remote_code))
    except CouplerError as error:
        yield from_error("tokenizer", error, fix)
    except ImportError as error:
        text = f"cannot be loaded: {first_line(error)}"
        yield problem("tokenizer", text, "pip install transformers")
    return None


def _read(section: Section) -> Iterator[Finding]:
    """Read the rows, and say what their columns are and which rows are refused."""
    config, key = section.config, section.key
    mapping = section.columns(config, key)
    seen = Seen()
    refused = Spotted()

    def read() -> None:
        for index, (place, record) in enumerate(records(config, key)):
            seen.add(place, record)
            try:
                row = row_of(record, index, place, mapping)
            except DataError as error:
                refused.add(place, error)
                continue
            seen.judge(place, row.extra)
            section.add(place, row)
        mapping.check_found()

    try:
        with source_named(config, key):
            read()
    except CouplerError as error:
        yield from_error(key, error, f"look at {key}.source={config.named}")
    else:
        if not seen.total:
            yield problem(key, f"{config.named} has no rows", f"another {key}.source")

    if section.rows:
        yield ok(key, f"{len(section.rows)} of {seen.total} rows of {config.named} can be read")
    yield from refused.problems(key, seen.total)
    yield from column_findings(section.key, section.config, seen, mapping.needed)


def _encoded(
    section: Section, codec: Codec, config: RunConfig, form: Form | None
) -> Iterator[Finding]:
    """Encode the prompts, and hand them to what the run would make of them."""
    encoded = Encoded(section.key, section.config, codec)
    told = [row for row in section.rows if form and row.is_conversation]
    for place, row in section.found:
        if not told or not row.is_conversation:
            encoded.add(row, place)
    yield from prompt_findings(encoded)

    try:
        rows = [*(row for row, _ in encoded.fitting()), *told]
        yield from _taken(section, rows, codec, config, form)
    except CouplerError as error:
        yield from_error(section.key, error, "look at the rows")


def _taken(
    section: Section, rows: list[Row], codec: Codec, config: RunConfig, form: Form | None
) -> Iterator[Finding]:
    """Hand the rows to that part of the run which takes them.

    Raises:
        CouplerError: it refuses them.
    """
    if section.key != "data":
        check_no_sampler(section.config)
    else:
        check_sampler(config)

    if form and rows:
        rows = yield from _taught(section, rows, codec, config, form)
    if section.key == "data" and section.config.sampler and rows:
        prompt_stream(rows, rows, section.config, config.seed)
        yield ok("data.sampler", f"{section.config.sampler} takes {len(rows)} rows")


def _taught(
    section: Section, rows: list[Row], codec: Codec, config: RunConfig, form: Form
) -> Generator[Finding, None, list[Row]]:
    """Encode what supervised training imitates, and return what it would keep.

    Raises:
        CouplerError: it refuses a row.
    """
    key = section.key
    room = micro_batch_room(config.engine, "engine") if config.engine else None
    kept, dropped, warnings = form.encode(rows, codec, section.config, room, key)

    sizes = [len(example) for _, example in kept]
    trained = int(form.pack([example for _, example in kept])["loss_mask"].sum())
    yield ok(key, f"{len(kept)} examples of {min(sizes)} to {max(sizes)} tokens train {trained}")
    if dropped:
        yield warning(key, f"{dropped} examples are too long, and are left out")
    for text in warnings:
        yield warning(key, text)
    return [row for row, _ in kept]


def _repeated(section: Section) -> Iterator[Finding]:
    """Find prompts that the section has more than once."""
    first: dict[str, str] = {}
    again = Spotted()
    for place, row in section.found:
        at = first.setdefault(repr(row.prompt), place)
        if at != place:
            again.add(place, f"it is that of {at}")

    yield from again.warnings(section.key, len(section.rows), "prompts that came before")


def _shared(trained: Section, held_out: Section) -> Iterator[Finding]:
    """Find prompts that are trained on and evaluated."""
    places = {repr(row.prompt): place for place, row in trained.found}
    shared = Spotted()
    for place, row in held_out.found:
        at = places.get(repr(row.prompt))
        if at:
            shared.add(place, f"it is that of {at}")

    what = "prompts that data has, too"
    yield from shared.warnings(held_out.key, len(held_out.rows), what)


def _scored(config: RewardConfig, section: Section) -> Iterator[Finding]:
    """Score the own answer of the first rows."""
    key = section.key
    try:
        # A reward that hangs is not called for every row.
        scored = _own_answers(config, section.rows[:FIRST_SCORED])
        if not any(isinstance(one.result, Invalid) for one in scored):
            scored = _own_answers(config, section.rows[:MAX_SCORED])
    except CouplerError as error:
        yield from_error(key, error, f"correct {config.words}")
        return

    invalid = Spotted()
    low = Spotted()
    for one, (place, _) in zip(scored, section.found, strict=False):
        if isinstance(one.result, Invalid):
            invalid.add(place, one.result.reason)
        elif one.result < 1:
            low.add(place, f"it is {one.result:g}")

    yield from invalid.warnings(key, len(scored), "own answers that get no reward")
    yield from low.warnings(key, len(scored), "own answers that get a reward below 1")
    if not invalid and not low:
        yield ok(key, f"{config.words} gives 1 or more for {len(scored)} rows' own answers")


def _own_answers(config: RewardConfig, rows: list[Row]) -> list[Scored]:
    return check_rewards(config, [(row.answer, row.answer, row.as_mapping()) for row in rows])
