"""Write configuration files that are none."""

from __future__ import annotations

import os
import socket
from pathlib import Path

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 9)}]\n" for i in range(12)
)
# Each stands as a whole file, and as the value of an option.
VALUES = (
    "yes", "no", "on", "off", "017", "0o17", "1:30", "190:20:30", "0x1F", "0b11", "2024-01-01",
    "2024-01-01 10:00:00", "!!python/object/apply:os.system ['touch /tmp/coupler-pwned']",
    "!!python/name:os.system", "!!python/module:os", "!!binary aGk=", "!!set {a, b}", "!!timestamp 2024-01-01",
    "!unknown x", "&a *a", "*nothing", "[1, 2", "{a: 1", "'open", '"open', "|\n  text\n", ">\n  a\n",
    "- a\n- b", ".inf", "-.inf", ".nan", "1e999", "1_000", "+5", "--5", "~", "null", "", "@x", "`x`",
    "%x", "\tx", "a: b: c", "? a", "<<: 5", "{<<: 5}", "{<<: [1]}", "'${nothing}'", "'${env:HOME}'",
    "${oc.env:HOME", "9" * 5000, "'\\0'", '"\\0"', '"\\ud800"', "[" * 2000, "{a: " * 2000,
    "!!int 'x'", "!!float 'x'", "!!bool 'x'", "!!null 'x'", "!!str [a]", "!!map [a]", "!!seq {a: 1}",
    "!!omap [a: 1]", "!!pairs [a: 1]",
)  # fmt: skip
KEYS = (
    "steps",
    "samples_per_prompt",
    "engine.ranks",
    "sampling.max_tokens",
    "data.max_prompt_tokens",
)
WHOLE = (
    "- steps\n- 5\n", "steps\n", "5\n", "'text'\n", "[]\n", "- {steps: 5}\n", "steps: 5\nsteps: 6\n",
    "sampling:\n  max_tokens: 5\nsampling:\n  max_tokens: 6\n", "sampling: {max_tokens: 5, max_tokens: 6}\n",
    "steps: 5\n\tseed: 6\n", "\tsteps: 5\n", "steps: 5\n  seed: 6\n", "sampling:\nmax_tokens: 5\n",
    "engine:\n  - name: toy\n", "engine: [fsdp]\n", "engine: {name: [fsdp]}\n", "engine: {name: 5}\n",
    "engine: 5\n", "engine: true\n", "sampling: 5\n", "sampling: [max_tokens, 5]\n",
    "sampling: text\n", "1: 2\n", "null: 2\n", "true: 2\n", "? [a]\n: 5\n", "? {a: 1}\n: 5\n", "1.5: 2\n",
    "'': 5\n", "' steps': 5\n", "'steps ': 5\n", "Steps: 5\n", "STEPS: 5\n", "step: 5\n", "steps : x\n",
    "sampling.max_token: 5\n", "sampling..max_tokens: 5\n", ".steps: 5\n", "steps.: 5\n", "a: &a {b: *a}\n",
    "a: &a [*a]\n", BOMB, "--- \nsteps: 5\n---\nsteps: 6\n", "%YAML 9.9\n---\nsteps: 5\n",
    "steps: 5\n...\nrest\n", "steps: 5 seed: 6\n", "steps=5\n", "steps = 5\n", "{\"steps\": 5,}\n]\n", "{'steps' 5}\n",
    "<xml>steps</xml>\n", "[run]\nsteps = 5\n", "#!/bin/sh\nexit 1\n", "steps: *x\n", "&x steps\n", "- - - a\n",
    "data:\n  args: 5\n", "trackers: console\n", "trackers: {a: b}\n",
    "trackers: [console, [jsonl]]\n", "trackers: [console, null]\n", "profile: {steps: [1, x]}\n",
    "unknown:\n  deep:\n    deeper: 1\n", "hydra:\n  run: x\n", "defaults:\n  - nothing\n", "defaults: fsdp\n", "_self_: 1\n",
    "steps: 5\nseed:\n  - 1\n", "critic: 5\n", "critic: {engine: [x]}\n", "critic: {engin: x}\n", "eval: {data: 5}\n",
    "eval: {data: {answer_key: {}}}\n", "model: toy\n", "model: [toy]\n", "run_dir: yes\n", "data: {answer_key: no}\n",
    "data: {prompt_key: on}\n", "reward: score.py\n", "steps: '5 steps'\n", "steps: 5 # ok\nseed: [\n",
    "x" * 100_000 + ": 5\n", "steps: " + "x" * 100_000 + "\n", "[" * 50_000, "{" * 50_000, "- " * 50_000 + "\n",
    "".join(f"k{i}: 1\n" for i in range(20_000)), "".join(f"{'  ' * i}a:\n" for i in range(900)),
)  # fmt: skip
# Whole files that are no wrong setting: what follows a document's end, and nothing.
BYTES: dict[str, bytes] = {
    "utf16.yaml": "steps: 5\nnothing: 1\n".encode("utf-16"),
    "utf32.yaml": "steps: x\n".encode("utf-32"),
    "latin1.yaml": "run_dir: h\xfctte\n".encode("latin-1"),
    "bom.yaml": b"\xef\xbb\xbfnothing: 5\n",
    "binary.yaml": bytes(range(256)) * 40,
    "zeros.yaml": bytes(9999),
    "gzip.yaml": b"\x1f\x8b\x08\x00" + bytes(200),
    "zip.yaml": b"PK\x03\x04" + bytes(200),
    "elf.yaml": b"\x7fELF" + bytes(500),
    "control.yaml": b"steps: \x07\n",
    "nul.yaml": b"steps: 5\x00\n",
    "surrogate.yaml": b"steps: \xed\xa0\x80\n",
    "large.yaml": b"# comment\n" * 900_000 + b"nothing: 1\n",
    "large_list.yaml": b"a: [" + b"1, " * 900_000 + b"1]\n",
    "pickle.yaml": b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix",
}


def yaml_files() -> list[str]:
    """Return texts of files that set something wrong."""
    harmless = {"+5", "1_000", "0x1F"}
    values = [value for value in VALUES if value not in harmless]
    return [*WHOLE, *(f"{key}: {value}\n" for key in KEYS for value in values)]


def broken_files(folder: Path) -> list[str]:
    """Write files that no configuration can be read from, and return their paths."""
    place = folder / "files"
    place.mkdir(exist_ok=True)
    for name, content in BYTES.items():
        (place / name).write_bytes(content)
    paths = [str(place / name) for name in BYTES]

    with (place / "sparse.yaml").open("wb") as file:
        file.truncate(1 << 30)
    if not (place / "pipe.yaml").exists():
        os.mkfifo(place / "pipe.yaml")
        os.symlink("loop.yaml", place / "loop.yaml")
        os.symlink("nowhere", place / "dangling.yaml")
        (place / "folder.yaml").mkdir()
        os.symlink("/dev/zero", place / "zero.yaml")
        here = os.getcwd()
        os.chdir(place)
        with socket.socket(socket.AF_UNIX) as made:
            made.bind("socket.yaml")
        os.chdir(here)
    names = ("sparse", "pipe", "loop", "dangling", "folder", "zero", "socket", "missing")
    paths += [str(place / f"{name}.yaml") for name in names]
    return [*paths, "", "/dev/zero", "/dev/tty", "a\0b", "x" * 300, "x/" * 3000, "/proc/self/mem",
            "\udcff.yaml", "~/missing.yaml", "http://localhost/x.yaml"]  # fmt: skip
