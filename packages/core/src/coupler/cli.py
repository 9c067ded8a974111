"""Run the command line. Every command imports only the modules it needs: listing
plugins imports no Hydra.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import sys
import textwrap
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, is_dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from coupler.errors import CouplerError
from coupler.plugins.manager import CORE, Plugins, Row
from coupler.system.log import configure, get_logger

if TYPE_CHECKING:
    from coupler.config.compose import Composed
    from coupler.executors.torchrun.launch import Launch

log = get_logger(__name__)

USER_ERROR, INTERRUPTED, NO_READER = 2, 130, 141
DATA = "data"  # coupler doctor data
CHECKS = "check this machine and a configuration; 'doctor data' examines the rows of one"
HELP = "\n  try:  coupler COMMAND --help; options are written key=value"


def main(argv: list[str] | None = None) -> int:
    """Run one command and return the exit code.

    It is 2 for an error that the user can fix, which is printed without a traceback,
    130 for Ctrl-C, and 141 where nobody reads the output any more. ``doctor`` returns 1
    if it found a problem, and ``doctor data`` 2 if the run would be refused.
    """
    try:
        configure()
        arguments = _parse(sys.argv[1:] if argv is None else argv)
        code = arguments.command(arguments) or 0
        sys.stdout.flush()  # A pipe that was closed shows here, not at the exit.
        return code

    except CouplerError as exc:
        print(f"coupler: {_in_order(str(exc))}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print("coupler: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
        # Text that is still in the buffer of stdout must not raise at the exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NO_READER


def _in_order(text: str) -> str:
    """Indent what follows the first line, which may come from a library."""
    first, *rest = [line for line in text.splitlines() if line.strip()] or [""]
    return "\n".join([first, *(line if line.startswith(" ") else f"  {line}" for line in rest)])


def _reader_is_gone() -> bool:
    """Tell a closed stdout, as in ``coupler plugins | head -1``, from other pipes."""
    with suppress(OSError, ValueError, AttributeError):  # Windows has no poll.
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(events & select.POLLERR for _, events in poll.poll(0))
    return False


class _CommandParser(argparse.ArgumentParser):
    """A parser that ends its help with the way to the options of a run, which are no
    flags.
    """

    takes_options = True

    def error(self, message: str) -> NoReturn:
        """Raises CouplerError: always. The usage of argparse is no sentence."""
        raise CouplerError(f"{message}.\n  try:  {self.prog} --help")

    def format_help(self) -> str:
        if self.takes_options:
            self.epilog = _way_to_options()
            self.formatter_class = argparse.RawDescriptionHelpFormatter
        return super().format_help()


def _way_to_options() -> str:
    from coupler.config.options import SECTIONS
    from coupler.config.schema import RunConfig

    chosen = [path for path in SECTIONS if "." not in path]
    sections = [name for name, value in vars(RunConfig()).items() if is_dataclass(value)]
    others = [name for name in vars(RunConfig()) if name not in (*chosen, *sections)]
    listed = (
        ("sections", sections),
        ("sections of the chosen backends", chosen),
        ("options without a section", others),
    )
    wrapped = [
        textwrap.fill(f"{what}: {', '.join(names)}", 88, subsequent_indent="  ")
        for what, names in listed
    ]
    written = "every option is written key=value, in any order:  "
    lines = (
        written + "steps=50 sampling.max_tokens=512 engine=NAME",
        *wrapped,
        "",
        "what options mean, their defaults, and what they take:",
        "  coupler config explain                      every option",
        "  coupler config explain sampling             the options of a section",
        "  coupler config explain engine engine=NAME   the options of a backend; names: "
        "coupler plugins",
    )
    return "\n".join(lines)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = _CommandParser(
        prog="coupler",
        description="Post-train language models.",
        epilog="coupler COMMAND --help says more, and how to list the options of a run.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"coupler {version(CORE)}")
    parser.takes_options = False
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_CommandParser)

    _add_job(commands, "train", _train, "reinforcement learning")
    _add_job(commands, "sft", _sft, "supervised fine-tuning")
    _add_job(commands, "eval", _eval, "sample held-out prompts and score them")
    plan = _add_job(
        commands, "plan", _plan, "print what a configuration amounts to; takes no device"
    )
    doctor = _add_job(commands, "doctor", _doctor, CHECKS)
    doctor.add_argument("--json", action="store_true", help="for programs")

    plugins = commands.add_parser("plugins", help="list what is installed, and what does not load")
    plugins.add_argument("--json", action="store_true", help="for programs")
    plugins.set_defaults(command=_plugins, overrides=[])
    plugins.takes_options = False

    config = _add_job(
        commands,
        "config",
        _config,
        "print the resolved configuration; 'config explain KEY' explains one",
    )
    config.add_argument("--diff-default", action="store_true", help="only what is not the default")

    replay = commands.add_parser(
        "replay", help="run one stage of a recorded step again, in this process"
    )
    replay.add_argument("--step", type=int, required=True, help="recorded by record.every_steps")
    replay.add_argument(
        "--stage", choices=("advantages", "logprobs", "values", "train"), default="train"
    )
    show = commands.add_parser("show", help="print the conversations of a step")
    show.add_argument("--step", type=int, help="default: the last that was kept")
    show.add_argument("--group", type=int, help="default: every prompt group")
    export = commands.add_parser("export", help="write a checkpoint's model in Hugging Face layout")
    export.add_argument("--out", type=Path, metavar="DIR", help="default: RUN/export_step_N")
    export.add_argument("--step", type=int, help="default: the last whole checkpoint")
    for parser_of_run, run in ((replay, _replay), (show, _show), (export, _export)):
        parser_of_run.add_argument("run", type=Path, metavar="RUN", help="folder of the run")
        parser_of_run.add_argument(
            "overrides", nargs="*", metavar="key=value", help="options that differ from the run's"
        )
        parser_of_run.set_defaults(command=run)
    plan.add_argument("--job", choices=("train", "sft"), default="train", help="that it is for")
    plan.add_argument("--memory", action="store_true", help="estimate device memory, too")
    plan.add_argument("--device-gib", type=float, default=0, help="memory of one GPU; --memory")

    # Overrides may stand on both sides of --config.
    arguments, rest = parser.parse_known_args(argv)
    for text in rest:
        if text.startswith("-"):
            hint = f"\n  write it as:  {text.lstrip('-')}" if "=" in text else HELP
            raise CouplerError(f"unknown argument {text}.{hint}")
    if rest and arguments.command is _plugins:
        raise CouplerError(
            f"coupler plugins takes no {rest[0]}.\n  try:  coupler doctor, which checks every "
            "plugin"
        )
    arguments.overrides += rest
    return arguments


def _add_job(
    commands: argparse._SubParsersAction[_CommandParser],
    name: str,
    command: Callable[[argparse.Namespace], int | None],
    text: str,
) -> _CommandParser:
    parser = commands.add_parser(name, help=text, description=text, allow_abbrev=False)

    parser.add_argument("--config", metavar="FILE", help="YAML file of options")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="options; they win over the file's"
    )
    parser.set_defaults(command=command)
    return parser


def _train(arguments: argparse.Namespace) -> None:
    composed, plugins = _composed(arguments, "train")
    _check_inputs(composed, plugins, "train")
    from coupler.jobs import train

    train(composed, plugins)


def _sft(arguments: argparse.Namespace) -> int | None:
    from coupler.executors.torchrun.launch import launch_of

    launch = launch_of(os.environ)
    if launch and launch.rank:
        return _serve(arguments, launch)
    composed, plugins = _composed_for(launch, arguments)
    _check_inputs(composed, plugins, "sft")
    from coupler.jobs import supervise

    supervise(composed, plugins)
    return None


def _composed_for(launch: Launch | None, arguments: argparse.Namespace) -> tuple[Composed, Plugins]:
    """Compose the configuration of ``coupler sft``, with the processes of torchrun as
    the ranks of the engine, where it started them.
    """
    if launch:
        from coupler.config.overrides import read_file

        written = read_file(arguments.config) if arguments.config else {}
        arguments.overrides = launch.overrides(arguments.overrides, written)
    return _composed(arguments, "sft")


def _serve(arguments: argparse.Namespace, launch: Launch) -> int:
    """Be a rank of the engine. Rank 0 says what is wrong with the configuration."""
    from coupler.executors.torchrun.host import serve

    log.setLevel("ERROR")
    try:
        config = _composed_for(launch, arguments)[0].config
    except CouplerError:
        return USER_ERROR
    serve(launch, Path(config.run_dir).absolute(), config.waits.deadline_s)
    return 0


def _eval(arguments: argparse.Namespace) -> None:
    runs = [text for text in arguments.overrides if "=" not in text]
    composed, plugins = (
        _composed_of_export(arguments, Path(runs[0])) if runs else _composed(arguments, "eval")
    )
    _check_inputs(composed, plugins, "eval")
    from coupler.jobs import evaluate

    evaluate(composed, plugins)


def _composed_of_export(arguments: argparse.Namespace, run: Path) -> tuple[Composed, Plugins]:
    """Compose the configuration that evaluates the export of a run, in a new folder
    inside the run's.
    """
    from coupler.run.checkpoint import folders
    from coupler.run.resume import restore_config
    from coupler.run.run_folder import read_starts
    from coupler.run.saving import export_problem

    restore_config(run)
    path, export = run / "config.yaml", run / "export"

    if arguments.config or not path.is_file():
        why = (
            "--config names another configuration" if arguments.config else "it has no config.yaml"
        )
        raise CouplerError(
            f"coupler eval {run} needs the folder of a run: {why}.\n  try:  coupler eval RUN "
            "key=value"
        )
    read_starts(run)  # refuses a format that is not known
    if export.is_dir() and (problem := export_problem(export)):
        raise CouplerError(
            f"the export of {run} is damaged: {problem}.\n"
            f"  try:  the command that trained it, which writes {export} again"
        )
    if not export.is_dir():
        raise CouplerError(
            f"{run} has no export to evaluate.\n  try:  coupler export {run} --out {export}"
        )

    steps = [folder.name.removeprefix("step_") for folder in folders(run / "checkpoints")]
    folder = run / f"eval_{steps[0] if steps else 'export'}"
    given = [
        text for text in arguments.overrides if text != str(run) and text.rstrip("/") != str(run)
    ]
    arguments.config = str(path)
    arguments.overrides = [f"model.path={_quoted(export)}", f"run_dir={_quoted(folder)}", *given]
    composed, plugins = _composed(arguments, "eval")

    # The options of the run's file were set for its training, not for this evaluation.
    origin = {key: origin for key, origin in composed.origin.items() if origin != arguments.config}
    return replace(composed, origin=origin), plugins


def _quoted(path: Path) -> str:
    return "'" + str(path).replace("'", "\\'") + "'"


def _plan(arguments: argparse.Namespace) -> None:
    from coupler.config.schema import Job
    from coupler.run.plan_report import report

    composed, plugins = _composed(arguments, arguments.job)
    gib = arguments.device_gib if arguments.memory or arguments.device_gib else None
    print(report(composed.config, plugins, Job(arguments.job), gib))


def _doctor(arguments: argparse.Namespace) -> int:
    from coupler.config.compose import compose
    from coupler.doctor import Verdict, diagnose, examine, render

    about_data = DATA in arguments.overrides
    arguments.overrides = [text for text in arguments.overrides if text != DATA]
    plugins, config = Plugins.load(), None
    if arguments.config or arguments.overrides or about_data:
        config = compose(plugins, arguments.overrides, arguments.config, complete=False).config

    findings = []
    asked = examine(config, plugins) if config and about_data else diagnose(plugins, config)
    for finding in asked:
        findings.append(finding)
        if not arguments.json:
            print(render(finding), flush=True)

    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    wrong = any(finding.verdict is Verdict.PROBLEM for finding in findings)
    return wrong * (USER_ERROR if about_data else 1)


def _replay(arguments: argparse.Namespace) -> None:
    from coupler.jobs import Stage, replay

    composed, plugins = _composed_of_run(arguments)
    stage = Stage(arguments.stage)
    compared = replay(composed, plugins, arguments.run, arguments.step, stage)
    for name, (then, now) in compared.items():
        print(f"{name:28} recorded {then:<14.7g} now {now:<14.7g} difference {now - then:.2g}")


def _show(arguments: argparse.Namespace) -> None:
    from coupler.jobs import show

    composed, _ = _composed_of_run(arguments)
    for line in show(composed, arguments.run, arguments.step, arguments.group):
        print(line)


def _export(arguments: argparse.Namespace) -> None:
    from coupler.jobs import export_run
    from coupler.run.model_card import serving

    composed, plugins = _composed_of_run(arguments)
    out, step = export_run(composed, plugins, arguments.run, arguments.step, arguments.out)
    print(f"{out}: the policy after step {step}", *serving(plugins, out), sep="\n  serve it:  ")


def _composed_of_run(arguments: argparse.Namespace) -> tuple[Composed, Plugins]:
    """Compose the configuration that a run folder holds, to look into it with one
    process.
    """
    from coupler.config.overrides import read_file
    from coupler.run.resume import restore_config
    from coupler.run.run_folder import read_starts

    restore_config(arguments.run)
    path = arguments.run / "config.yaml"
    if not path.is_file():
        raise CouplerError(f"{arguments.run} is no run folder: it has no config.yaml.")
    read_starts(arguments.run)  # refuses a format that is not known

    arguments.config = str(path)
    plugins, written = Plugins.load(), read_file(str(path))
    engines = {
        "engine": written.get("engine"),
        "critic.engine": written.get("critic", {}).get("engine"),
        "teacher.engine": written.get("teacher", {}).get("engine"),
        "reward_model.engine": written.get("reward_model", {}).get("engine"),
    }
    one_rank = [
        f"{section}.{key}={value}"
        for section, engine in engines.items()
        if engine
        for key, value in plugins.get("engine", engine["name"]).config.one_rank.items()
    ]
    arguments.overrides = ["executor=local", *one_rank, *arguments.overrides]
    return _composed(arguments, "train", complete=False)


def _config(arguments: argparse.Namespace) -> None:
    from coupler.config.compose import dump_yaml
    from coupler.run.explain import differences, explain

    asked = arguments.overrides[:1] == ["explain"]
    keys = [text for text in arguments.overrides[1:] if "=" not in text] if asked else []
    arguments.overrides = [text for text in arguments.overrides[asked:] if text not in keys]
    composed, _ = _composed(arguments, "train", complete=False)
    if asked:
        print("\n\n".join(explain(composed, key) for key in keys or [""]))
    elif arguments.diff_default:
        print(differences(composed))
    else:
        print(dump_yaml(composed.config).rstrip())


def _composed(
    arguments: argparse.Namespace, job: str, *, complete: bool = True
) -> tuple[Composed, Plugins]:
    from coupler.config.compose import compose
    from coupler.config.options import SECTIONS, section
    from coupler.config.schema import Job

    plugins = Plugins.load()
    composed = compose(plugins, arguments.overrides, arguments.config, Job(job), complete=complete)
    chosen = [(kind, section(composed.config, path)) for path, kind in SECTIONS.items()]
    used = [(kind, inner.name) for kind, inner in chosen if inner is not None]
    for text in (*plugins.warnings(), *plugins.unknown(used), *composed.notes):
        log.warning(text)
    return composed, plugins


def _check_inputs(composed: Composed, plugins: Plugins, job: str) -> None:
    from coupler.config.schema import Job
    from coupler.run.inputs import check_inputs
    from coupler.run.plan import make_plan
    from coupler.run.row_form import sections

    if job != Job.EVAL:
        make_plan(composed.config, None, plugins, job=Job(job))
    check_inputs(composed.config, Job(job), sections(composed.config, plugins, Job(job)))


def _plugins(arguments: argparse.Namespace) -> None:
    plugins = Plugins.load()
    rows = plugins.rows()
    if arguments.json:
        print(
            json.dumps({"core": version(CORE), "plugins": [asdict(row) for row in rows]}, indent=2)
        )
    else:
        print(_table(rows))
        for text in (*plugins.stale, *plugins.unknown()):
            log.warning(text)


def _table(rows: list[Row]) -> str:
    head = ("kind", "name", "state", "distribution", "version", "capabilities")
    body = [
        (
            r.kind or "-",
            r.name,
            r.state,
            r.distribution or "-",
            r.version or "-",
            r.detail or " ".join(r.capabilities),
        )
        for r in rows
    ]

    table = (head, *body)
    widths = [max(len(line[i]) for line in table) for i in range(len(head) - 1)]
    lines = ["  ".join([*map(str.ljust, line, widths), line[-1]]).rstrip() for line in table]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
