"""Give commands wrong settings, on the command line and in a file."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from tests.faults import run
from tests.faults.commands import Commands, Ended
from tests.faults.setting_files import broken_files, yaml_files
from tests.faults.setting_paths import wrong_paths
from tests.faults.toy_runs import write_inputs

from coupler.config.options import Option, Options
from coupler.plugins.manager import Plugins

# A case must be answered with this much of a processor, after the imports.
MOST_S = 1.2
FIXES = (
    "try:", " takes ", "must be", "must not", "set ", "needs", "did you mean", "write it as",
    "installed", "options of", "looked up from", "for a list", "quote it", "it has", "counts from",
    "set to", "its options", "refuse", "leave it out", "in use", "known once", "cannot be deleted",
    "it may be", "one of", "a row is", "set by:", "at:",
)  # fmt: skip
JOBS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "grpo": ("train", "", ("engine=fsdp", "rollout=hf", "algorithm=grpo")),
    "ppo": ("train", "critic.engine", ("engine=fsdp", "rollout=hf", "algorithm=ppo")),
    "vllm": ("train", "", ("engine=megatron", "rollout=vllm", "algorithm=rloo")),
    "toy": ("train", "", ("engine=toy", "rollout=toy", "algorithm=toy")),
    "plan": ("plan", "", ("engine=fsdp", "rollout=hf", "algorithm=dapo")),
    "sft": ("sft", "", ("engine=fsdp", "algorithm=sft")),
    "eval": ("eval", "", ("engine=fsdp", "rollout=hf")),
    "config": ("config", "", ("engine=fsdp", "rollout=hf", "algorithm=grpo")),
}


@dataclass(frozen=True, slots=True)
class Case:
    """Holds one wrong setting."""

    job: str
    given: tuple[str, ...] = ()
    # What the answer must name.
    key: str = ""
    # The text of a configuration file.
    file: str = ""


def check(seed: int, cases: int) -> Iterator[str]:
    """Yield a line for each wrong setting that is not refused at once, by its name."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        folder = Path(name)
        write_inputs(folder)
        classes = every_case(folder)
        chosen = [_pick(chance.choice(classes), chance) for _ in range(cases)]
        with Commands(cwd=folder) as commands:
            for number, case in enumerate(chosen):
                yield from _try(commands, folder, number, case)


def _pick(cases: list[Case], chance: random.Random) -> Case:
    """Take a case out of a class, so that none comes twice while there are more."""
    return cases.pop(chance.randrange(len(cases))) if len(cases) > 1 else cases[0]


def every_case(folder: Path) -> list[list[Case]]:
    """Return the whole space of cases, by classes."""
    plugins = Plugins.load()
    options: list[Case] = []
    names: list[Case] = []
    for job, (_, critic, chosen) in JOBS.items():
        sections = dict(text.split("=") for text in chosen)
        sections |= {critic: sections["engine"]} if critic else {}
        kinds = {
            path: plugins.get(path.rpartition(".")[2], {"dapo": "grpo"}.get(name, name)).config
            for path, name in sections.items()
        }
        for option in Options(kinds).table.values():
            if not option.key.endswith(("engine.name", "rollout.name", "algorithm.name")):
                options += _of_option(job, option)
        names += _of_backends(job)

    paths = [
        Case(job, (f"{key}={value}",), key)
        for key, value, jobs in wrong_paths(folder)
        for job in jobs
    ]
    together = [Case("grpo", given, key) for given, key in TOGETHER]
    together += [Case(job, given, key) for job, given, key in OF_JOBS]
    jobs = ("grpo", "sft", "eval", "plan", "config")
    files = [Case(job, file=text) for text in yaml_files() for job in jobs]
    broken = [Case(job, ("--config", path)) for path in broken_files(folder) for job in jobs[:4]]
    found = (options, options, names, paths, paths, together, files, broken)
    return [list(dict.fromkeys(cases)) for cases in found]


def arguments(folder: Path, case: Case, run_dir: Path) -> list[str]:
    """Return the command line of a case.

    It lacks the option that is wrong in the file of the case.
    """
    command, _, chosen = JOBS[case.job]
    explains = case.given[:1] == ("explain",)
    right = [
        *chosen,
        f"model.path={folder / 'toy'}",
        *([] if case.job == "eval" else [f"data.source={folder / 'rows.jsonl'}"]),
        *([f"eval.data.source={folder / 'rows.jsonl'}"] if case.job == "eval" else []),
        *([] if case.job == "sft" else [f"reward.target={folder / 'reward.py'}:score"]),
        *(["optimizer_steps_per_batch=1"] if case.job != "eval" else []),
        f"run_dir={run_dir}",
    ]
    if case.file and case.key:
        right = [each for each in right if not each.startswith(f"{case.key}=")]
    given = (*case.given, *right) if explains else (*right, *case.given)
    return [command, *given]


def _try(commands: Commands, folder: Path, number: int, case: Case) -> Iterator[str]:
    run_dir = folder / f"run{number}"
    given = arguments(folder, case, run_dir)
    if case.file:
        (folder / "case.yaml").write_text(case.file, encoding="utf-8", errors="surrogateescape")
        given += ["--config", str(folder / "case.yaml")]
    ended = commands.run(*given, strict=True)
    why = _problem(ended, case, run_dir)
    if why:
        shown = f"{case.job} {case.given} {case.file}"[:300].encode("ascii", "backslashreplace")
        yield f"{shown.decode()}: {why}: {ended.text[-700:]}"


def _problem(ended: Ended, case: Case, run_dir: Path) -> str:
    if ended.imported_torch:
        return "torch was imported first"
    if ended.started:
        return f"a process was started first: {ended.started[0]}"
    if why := ended.problem():
        return why
    if ended.code != 2:
        return "it is accepted"
    if [path for path in ended.made if path.startswith(str(run_dir))] or run_dir.exists():
        return "a run folder was made first"
    if ended.seconds > MOST_S:
        return f"it takes {ended.seconds:.1f} s of a processor"
    said = "\n".join(ended.complaint)
    if case.key and case.key not in said:
        return f"the answer does not name {case.key}"
    return "" if any(fix in said for fix in FIXES) else "the answer names no way out"


def _of_option(job: str, option: Option) -> Iterator[Case]:
    """Yield wrong values, wrong names and wrong spellings of one option."""
    key = option.key
    for text in wrong_texts(option):
        if job != "config" or text not in _out_of_range(option):
            yield Case(job, (f"{key}={text}",), key)
    for value in wrong_values(option):
        yield Case(job, key=key, file=yaml.safe_dump(_nested(key, value)))

    start, _, last = key.rpartition(".")
    prefix = f"{start}." if start else ""
    names = {
        f"{prefix}{last}s", f"{prefix}{last[:-1]}", f"{prefix}{last[1:]}", f"{prefix}{last.upper()}",
        f"{prefix}{last.replace('_', '-')}" if "_" in last else f"{prefix}-{last}",
        f"{prefix}{last}_", f"{prefix}{last}.x", f"x.{key}", f"{key}.{last}", f"{prefix}.{last}",
        f"{prefix}{last.replace('a', chr(0x430)).replace('e', chr(0x435)).replace('o', chr(0x43E))}",
        f"{prefix}{last}\u200b", f"eval.{key}", f"data.{last}x",
    }  # fmt: skip
    for name in sorted(names - {key}):
        if not _is_known(name, option):
            yield Case(job, (f"{name}=1",))
            yield Case(
                job, file=f"{yaml.safe_dump(name, allow_unicode=True).split(chr(10))[0]}: 1\n"
            )

    good = "1"
    spellings = (
        f"{key}", f"{key}:{good}", f"={good}", f"~{key}", f"~{key}={good}", f"--{key}={good}",
        f"-{key}={good}", f"{key}:={good}", f"{key}=[", f"{key}={{", f"{key}='", f'{key}="',
        f"{key}={good},2", f"{key}=${{nothing}}", f"{key}=${{nothing.at.all}}", f"{key}=${{{key}}}",
        f"{key}=${{oc.env:NOT_SET_AT_ALL}}", f"{key}=${{", f"{key}=${{a", f"{key}=${{unknown:x}}",
        f"{key}=$" + "{" * 60, f"{key}={'[' * 300}", f"{key}@x={good}", f"@{key}={good}",
        f"{key}={'9' * 5000}x", f"{key}=choice(1,2)", f"{key}=range(1,4)", f"{key}=glob(*)",
        f"{key}=(", f"{key}=a:b: c}}", f"+{key}@={good}",
    )  # fmt: skip
    for text in spellings:
        if get_origin(option.type) is not dict or "=" not in text:
            yield Case(job, (text,))


def _is_known(name: str, option: Option) -> bool:
    """Tell whether a changed name is that of another option, or inside of a mapping."""
    if get_origin(option.type) is dict and name.startswith(f"{option.key}."):
        return True
    return name in ("eval.data.source", "rollout.replica") or name.startswith(
        ("eval.data.", "rollout.extra_args.", "data.args.")
    )


def wrong_texts(option: Option) -> list[str]:
    """Return texts for the command line that are no value of the option."""
    kind = option.type
    optional = type(None) in get_args(kind)
    kind = next((k for k in get_args(kind) if k is not type(None)), kind) if optional else kind
    if isinstance(kind, type) and issubclass(kind, Enum):
        found = ["nope", "[x]", "{a: 1}", "''", "17", "1.5", f"{next(iter(kind))}x", "nan", "[]"]
    elif get_origin(kind) is list:
        inner = get_args(kind)[0]
        found = ["5", "abc", "true", "{a: b}", "[[a]]", "[null]", "[{a: 1}]", "''", "1.5"]
        found += ["[a]", "[1.5]", "[true]", "[nan]", f"[{10**400}]", "[-]"] if inner is int else []
        found += ["[a\0b]", "[true]"] if inner is str else []
    elif get_origin(kind) is dict:
        found = ["5", "abc", "[1]", "true", "1.5", "''"]
    else:
        found = TEXTS.get(kind, [])
    return [*found, *([] if optional else ["null"]), *_out_of_range(option)]


def _out_of_range(option: Option) -> list[str]:
    metadata = next(f for f in _fields(option) if f.name == option.key.rpartition(".")[2]).metadata
    found = []
    if "ge" in metadata:
        least = metadata["ge"]
        found += [str(least - 1), "-1", "-1000000000000", str(-(2**62))]
        found += ["0"] if least > 0 else []
    if "le" in metadata:
        most = metadata["le"]
        found += [str(most + 1), str(most * 2)]
    return found


def _fields(option: Option) -> Any:
    from dataclasses import fields

    return fields(option.owner)


TEXTS: dict[Any, list[str]] = {
    int: [
        "abc", "1.5", "[1]", "{a: 1}", "true", "''", "nan", "inf", "1e400", str(10**400),
        str(-(10**400)), "0x10", "1,2", "1e3", "007", "'1 2'", "[]", "9" * 5000, "--1", "1-", "٣",
        "2**3", "-inf",
    ],
    float: [
        "abc", "[1.0]", "{a: 1}", "true", "''", "nan", "inf", "-inf", "1e400", "-1e400", "1e-3x",
        "1,5", "10%", str(10**400), "[]", "9" * 5000, "0x1p3", "1e", "1..2", "'nan'", "'inf'",
        "'1e999'", "٣",
    ],
    bool: [
        "maybe", "2", "-1", "[true]", "{a: true}", "''", "nan", "1.5", "tru", "yess", "[]", "10",
        "0.0", "truefalse",
    ],
    str: ["[a]", "{a: b}", "a\0b", "\udcff", "[]", "true", "false", "x\ud800y", "{}"],
}  # fmt: skip


def wrong_values(option: Option) -> list[Any]:
    """Return values for a YAML file that are none of the option."""
    kind = option.type
    if isinstance(kind, type) and issubclass(kind, Enum):
        return ["nope", 3, [1], {"a": 1}, 2.5, [], {}]
    if get_origin(kind) is list:
        return [5, "abc", True, {"a": 1}, [[1]], [None], [{"a": 1}]]
    if get_origin(kind) is dict:
        return [5, "abc", True, [1], 1.5]
    values: dict[Any, list[Any]] = {
        int: ["abc", 1.5, [1], {"a": 1}, True, "", float("nan"), 10**400, None, [], {}, "1_0"],
        float: ["abc", [1.0], {"a": 1}, True, "", float("nan"), float("inf"), 10**400, None, []],
        bool: ["maybe", 2, -1, [True], {"a": 1}, "", 1.5, None, 0.0],
        str: [[1], {"a": 1}, None, ["a"], {}, True, "a\0b"],
    }
    return values.get(kind, [])


def _nested(key: str, value: Any) -> dict[str, Any]:
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def _of_backends(job: str) -> Iterator[Case]:
    """Yield names of backends that do not exist."""
    _, _, chosen = JOBS[job]
    sections = [text.split("=")[0] for text in chosen]
    for section in sections:
        for name in ("nope", "Toy", "fsdpp", "''", "null", "[toy]", "{a: 1}",
                     "5", "true", "toy/x", "../toy", "a.b", "a" * 3000, "toy\0", "\udcff", "тoy",
                     "coupler_engine_fsdp", "fsdp,toy", "{name: nope}", "{name: 5}", "tgi"):  # fmt: skip
            if name not in ("null", "''") or job not in ("eval", "config"):
                yield Case(job, (f"{section}={name}",), section)
    if job not in ("config", "eval", "sft"):
        for key, names in (
            ("sync.manager", ("nope", "", "Stream", "[stream]")),
            ("sync.transport", ("nope", "NCCL", "tcp ", "[tcp]")),
            ("trackers", ("[nope]", "[Console]", "[console, nope]", "[console,console.]", "['']")),
        ):
            yield from (Case(job, (f"{key}={name}",)) for name in names)


# Options that contradict each other, and a key that the answer must name.
TOGETHER: list[tuple[tuple[str, ...], str]] = [
    (("sampling.top_p=0.9",), "sampling.top_p"),
    (("sampling.top_k=1",), "sampling.top_k"),
    (("sampling.temperature=0",), "sampling.temperature"),
    (("deterministic=true", "max_staleness=1", "algorithm.behaviour=rollout"), "deterministic"),
    (("offload=true", "max_staleness=1", "algorithm.behaviour=rollout"), "offload"),
    (("sync.in_flight=abort",), "sync.in_flight"),
    (("sync.in_flight=recompute",), "sync.in_flight"),
    (("sync.in_flight=stale_kv",), "sync.in_flight"),
    (("checkpoint.keep_best=1", "checkpoint.keep_last=0"), "checkpoint.keep_best"),
    (("checkpoint.keep_best=1",), "checkpoint.keep_best"),
    (("eval.every_steps=1",), "eval.data.source"),
    (("eval.at_start=true",), "eval.data.source"),
    (("engine.ranks=2",), "engine.ranks"),
    (("engine.ranks=0",), "engine.ranks"),
    (("engine.ranks=-1",), "engine.ranks"),
    (("rollout.replicas=2",), "rollout.replicas"),
    (("rollout.replicas=0",), "rollout.replicas"),
    (("engine.python=/usr/bin/python3",), "engine.python"),
    (("rollout.python=/usr/bin/python3",), "rollout.python"),
    (("executor=ray", "offload=true", "ray.placement=disjoint"), "offload"),
    (("profile.steps=[-1]",), "profile.steps"),
    (("profile.ranks=[-2]",), "profile.ranks"),
    (("samples_per_prompt=1",), "samples_per_prompt"),
    (("max_staleness=1",), "max_staleness"),
    (("optimizer_steps_per_batch=3",), "optimizer_steps_per_batch"),
    (("optimizer_steps_per_batch=1000000",), "optimizer_steps_per_batch"),
    (("critic.optimizer_steps_per_batch=7",), "critic.optimizer_steps_per_batch"),
    (("engine.max_tokens_per_gpu=20",), "engine.max_tokens_per_gpu"),
    (("engine.fsdp_size=2",), "engine.fsdp_size"),
    (("engine.sequence_parallel=2",), "engine.sequence_parallel"),
    (("engine.sequence_parallel=0",), "engine.sequence_parallel"),
    (("engine.schedule=wsd",), "engine.decay_steps"),
    (("engine.num_cycles=2",), "engine.num_cycles"),
    (("engine.min_lr_ratio=0.1",), "engine.min_lr_ratio"),
    (("engine.decay_steps=5",), "engine.decay_steps"),
    (("engine.init_lr_ratio=0.1",), "engine.init_lr_ratio"),
    (("engine.warmup_steps=1", "engine.warmup_ratio=0.1"), "engine.warmup_ratio"),
    (("engine.lr=0",), "engine.lr"),
    (("engine.lr=-1",), "engine.lr"),
    (("engine.beta1=1",), "engine.beta1"),
    (("engine.beta2=-0.1",), "engine.beta2"),
    (("engine.eps=0",), "engine.eps"),
    (("engine.weight_decay=-1",), "engine.weight_decay"),
    (("engine.max_grad_norm=-1",), "engine.max_grad_norm"),
    (("engine.warmup_steps=-1",), "engine.warmup_steps"),
    (("engine.warmup_ratio=1",), "engine.warmup_ratio"),
    (("engine.lora_rank=-1",), "engine.lora_rank"),
    (("engine.lora_rank=8", "engine.lora_alpha=0"), "engine.lora_alpha"),
    (("engine.lora_rank=8", "engine.lora_alpha=-1"), "engine.lora_alpha"),
    (("engine.logits_tile=-1",), "engine.logits_tile"),
    (("rollout.max_sequences=0",), "rollout.max_sequences"),
    (("rollout.max_prefill_tokens=0",), "rollout.max_prefill_tokens"),
    (("rollout.kv_cache_gib=0",), "rollout.kv_cache_gib"),
    (("algorithm.clip_low=1.5",), "algorithm.clip_low"),
    (("algorithm.clip_high=-1",), "algorithm.clip_high"),
    (("algorithm.dual_clip=0.5",), "algorithm.dual_clip"),
    (("algorithm.correction_cap=-1",), "algorithm.correction_cap"),
    (("algorithm.aggregation=constant",), "algorithm.aggregation"),
    (("algorithm.aggregation_constant=4",), "algorithm.aggregation_constant"),
    (("router_replay=R2",), "router_replay"),
    (("router_replay=R3",), "router_replay"),
    (("eval.every_steps=1", "eval.data.source=rows.jsonl", "eval.top_p=0.5"), "eval.top_p"),
    (("data.args={a: 1}",), "data.args"),
    (("data.limit=-1",), "data.limit"),
    (("steps=9223372036854775808",), "steps"),
    (("seed=9223372036854775808",), "seed"),
    (("executor=local", "ray.num_cpus_per_worker=0"), "ray.num_cpus_per_worker"),
    (("waits.deadline_s=0",), "waits.deadline_s"),
    (("prompts_per_step=10000000000000000000000",), "prompts_per_step"),
    (("data.system_prompt=\"a\0b\"",), "data.system_prompt"),
    (("reward.num_workers=0",), "reward.num_workers"),
    (("engine=toy", "rollout=vllm"), "engine"),
]  # fmt: skip
OF_JOBS: list[tuple[str, tuple[str, ...], str]] = [
    ("sft", ("max_staleness=1",), "max_staleness"),
    ("sft", ("epochs_per_batch=2",), "epochs_per_batch"),
    ("sft", ("algorithm=grpo",), "algorithm"),
    ("grpo", ("algorithm=sft",), "algorithm"),
    ("eval", ("sampling.top_p=0.5",), "sampling.top_p"),
    ("eval", ("sampling.top_k=5",), "sampling.top_k"),
    ("eval", ("eval.top_p=0.5",), "eval.top_p"),
    ("eval", ("eval.top_p=0",), "eval.top_p"),
    ("eval", ("eval.data.source=''",), "eval.data.source"),
    ("grpo", ("data.source=''",), "data.source"),
    ("sft", ("data.source=''",), "data.source"),
    ("grpo", ("model.path=''",), "model.path"),
    ("grpo", ("reward.target=''",), "reward.target"),
    ("eval", ("reward.target=''",), "reward.target"),
    ("grpo", ("run_dir=''",), "run_dir"),
    ("ppo", ("algorithm.lam=2",), "algorithm.lam"),
    ("ppo", ("algorithm.gamma=-1",), "algorithm.gamma"),
    ("ppo", ("engine@critic.engine=nope",), "nope"),
    ("ppo", ("engine@nothing=fsdp",), "engine@"),
    ("ppo", ("critic.engine=nope",), "critic.engine"),
    ("ppo", ("critic.engine.ranks=2",), "critic.engine.ranks"),
    ("ppo", ("critic.warmup_steps=-1",), "critic.warmup_steps"),
    ("plan", ("--job", "nope"), ""),
    ("plan", ("--nope",), ""),
    ("grpo", ("--steps", "5"), ""),
    ("grpo", ("-x",), ""),
    ("grpo", ("stray",), "stray"),
    ("config", ("explain", "engine.lrr"), "engine.lrr"),
    ("config", ("explain", "nothing.at.all"), "nothing"),
    ("grpo", ("--config",), ""),
    ("grpo", ("--config=",), ""),
    ("grpo", ("--config", "missing.yaml"), "missing.yaml"),
    ("grpo", ("--config", "."), ""),
    ("eval", ("stray", "other"), ""),
    ("eval", ("toy",), "toy"),
]


if __name__ == "__main__":
    if os.environ.get("COUNT"):
        with tempfile.TemporaryDirectory() as place:
            write_inputs(Path(place))
            print([len(cases) for cases in every_case(Path(place))])
    else:
        run(check, 1500)
