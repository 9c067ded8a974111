"""Put hostile files where commands read models, records and checkpoints."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import random
import shutil
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tests.faults import run
from tests.faults.commands import HEAVY, Commands
from tests.faults.toy_runs import arguments, write_inputs

from coupler.run.manifest import OF_THE_REST, seal
from coupler.system.hashing import hash_files
from coupler.testing.models import write_qwen2, write_tokenizer

OF_RUNS = ("resume", "export", "replay", "eval")
MOST_S, MOST_BYTES = 8.0, 1 << 30
Make = Callable[[bytes, random.Random, Path], bytes]


class _Runs:
    """Is a pickle that makes a file when it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (Path.touch, (self.marker,))


def check(seed: int, cases: int) -> Iterator[str]:
    """Yield a line for each file that runs, hangs, fills memory or is not answered."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="faults-") as name, Commands(HEAVY) as commands:
        folder = Path(name)
        write_inputs(folder)
        write_qwen2(folder / "real", tied=True)
        write_tokenizer(folder / "real")
        made = commands.run(*arguments(folder, folder / "whole", "steps=2"))
        assert made.code == 0, made
        for number in range(cases):
            yield from _try(commands, folder, folder / f"case{number}", chance)


def size_of_space() -> int:
    """Return how many kinds of files there are, by the commands that read them."""
    of_runs = (len(ARCHIVES) * 6 + len(TENSORS) + len(TEXTS) * 12) * len(OF_RUNS) * 2
    return of_runs + (len(TENSORS) + len(TEXTS) * 3 + len(TEMPLATES)) * 4


def _try(commands: Commands, folder: Path, case: Path, chance: random.Random) -> Iterator[str]:
    shutil.copytree(folder / "whole", case / "run")
    command = chance.choice(sorted(COMMANDS))
    shutil.copytree(folder / ("real" if command == "real engine" else "toy"), case / "toy")
    marker = case / "executed"
    if command in OF_RUNS:
        place, kinds = case / "run", (_archive, _archive, _tensors, _text)
    else:
        place, kinds = case / "toy", (_tensors, _text, _template)
    what = chance.choice(kinds)(place, marker, chance)
    if command in OF_RUNS and chance.random() < 0.6:
        _forge(place)
        what = f"{what}, with hashes that fit"
    given = COMMANDS[command](folder, case)
    ended = commands.run(*given, limit_s=60)

    why = ended.problem()
    if command == "doctor" and ended.code == 1 and why == "it ends with 1":
        why = ""
    if marker.exists():
        why = "CODE OF THE FILE RAN"
    elif ended.seconds > MOST_S:
        why = why or f"it takes {ended.seconds:.1f} s"
    elif ended.grown_bytes > MOST_BYTES:
        why = why or f"it takes {ended.grown_bytes >> 20} MiB"
    if why:
        yield f"{what}: {command}: {why}: {ended.text[-900:]}"
    shutil.rmtree(case, ignore_errors=True)


def _of_toy(folder: Path, case: Path, command: str, *more: str) -> list[str]:
    given = arguments(folder, case / "new", "steps=1", f"model.path={case / 'toy'}", *more)
    return [command, *given[1:]]


COMMANDS: dict[str, Callable[[Path, Path], list[str]]] = {
    "train": lambda folder, case: _of_toy(folder, case, "train"),
    "plan": lambda folder, case: _of_toy(folder, case, "plan"),
    "doctor": lambda folder, case: _of_toy(folder, case, "doctor"),
    "real engine": lambda folder, case: _of_toy(folder, case, "train", "engine=fsdp", "rollout=hf", "algorithm=grpo"),
    "resume": lambda folder, case: arguments(folder, case / "run", "steps=3"),
    "export": lambda folder, case: ["export", str(case / "run"), "--out", str(case / "out")],
    "replay": lambda folder, case: ["replay", str(case / "run"), "--step", "2", "--stage", "train"],
    "eval": lambda folder, case: [
        "eval", str(case / "run"), f"run_dir={case / 'eval'}",
        f"eval.data.source={folder / 'rows.jsonl'}", "eval.data.max_prompt_tokens=64",
    ],
}  # fmt: skip


def _archive(place: Path, marker: Path, chance: random.Random) -> str:
    path = chance.choice(sorted(place.rglob("*.npz")))
    return _changed_file(path, ARCHIVES, place, marker, chance)


def _tensors(place: Path, marker: Path, chance: random.Random) -> str:
    path = chance.choice(sorted(place.rglob("*.safetensors")))
    what = _changed_file(path, TENSORS, place, marker, chance)
    if what.endswith("pickled beside"):
        path.unlink()
        path.with_name("pytorch_model.bin").write_bytes(_pickle(marker))
    return what


def _text(place: Path, marker: Path, chance: random.Random) -> str:
    path = chance.choice(sorted([*place.rglob("*.json"), *place.glob("config.yaml")]))
    return _changed_file(path, TEXTS, place, marker, chance)


def _template(place: Path, marker: Path, chance: random.Random) -> str:
    source = chance.choice(TEMPLATES).replace("MARKER", str(marker))
    (place / "chat_template.jinja").write_text(source)
    return f"template {source[:80]!r}"


def _changed_file(
    path: Path, ways: dict[str, Make], place: Path, marker: Path, chance: random.Random
) -> str:
    name = chance.choice(sorted(ways))
    path.write_bytes(ways[name](path.read_bytes(), chance, marker))
    return f"{path.relative_to(place)} {name}"


def _forge(run_dir: Path) -> None:
    """Let manifests and records vouch for the files as they are now."""
    for path in run_dir.rglob("MANIFEST.json"):
        with contextlib.suppress(ValueError, TypeError, AttributeError, RecursionError):
            manifest = json.loads(path.read_text())
            files = [name for name in manifest["files"] if (path.parent / name).is_file()]
            hashes = hash_files([path.parent / name for name in files])
            for name, each in zip(files, hashes, strict=True):
                size = (path.parent / name).stat().st_size
                manifest["files"][name] = {"bytes": size, "sha256": each}
            path.write_text(json.dumps({**manifest, OF_THE_REST: seal(manifest)}))

    for path in run_dir.rglob("record.json"):
        with contextlib.suppress(ValueError, TypeError, AttributeError, RecursionError):
            about = json.loads(path.read_text())
            names = list(about["sha256"])
            hashes = hash_files([path.parent / name for name in names])
            path.write_text(json.dumps({**about, "sha256": dict(zip(names, hashes, strict=True))}))


def _pickle(marker: Path) -> bytes:
    return pickle.dumps(_Runs(marker))


def _npz(*members: tuple[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", method) as made:
        for name, content in members:
            made.writestr(name, content)
    return data.getvalue()


def _npy(
    shape: str = "(1,)", dtype: str = "'<i8'", data: bytes = bytes(8), version: int = 1
) -> bytes:
    head = f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    size = struct.pack("<H" if version == 1 else "<I", len(head) % 65536)
    return b"\x93NUMPY" + bytes((version, 0)) + size + head + data


def _with_object(content: bytes, marker: Path) -> bytes:
    """Put an array of Python objects in the place of the first member."""
    array = np.empty(1, object)
    array[0] = _Runs(marker)
    data = io.BytesIO()
    np.lib.format.write_array(data, array, allow_pickle=True)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = [(m.filename, archive.read(m)) for m in archive.infolist()]
    return _npz((members[0][0], data.getvalue()), *members[1:])


def _renamed(content: bytes, name: str) -> bytes:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = [(m.filename, archive.read(m)) for m in archive.infolist()]
    return _npz((name, members[0][1]), *members[1:])


def _flags(content: bytes, at: int, value: int) -> bytes:
    found = content.find(b"PK\x01\x02")
    return content[: found + at] + bytes([value]) + content[found + at + 1 :]


def _doubled_name(content: bytes, *_: Any) -> bytes:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        member = archive.infolist()[0]
        pair = (member.filename, archive.read(member))
    return _npz(pair, pair)


ARCHIVES: dict[str, Make] = {
    "a pickle": lambda _, __, marker: _pickle(marker),
    "of objects": lambda content, _, marker: _with_object(content, marker),
    "with a pickle inside": lambda _, __, marker: _npz(("tokens.npy", _pickle(marker))),
    "torn": lambda content, chance, _: content[: chance.randrange(len(content))],
    "compressed": lambda *_: _npz(("tokens.npy", bytes(1 << 26)), method=zipfile.ZIP_DEFLATED),
    "with a long shape": lambda *_: _npz(("tokens.npy", _npy("(999999999999,)"))),
    "with a negative shape": lambda *_: _npz(("tokens.npy", _npy("(-1,)"))),
    "with a deep shape": lambda *_: _npz(("tokens.npy", _npy("(" * 5000 + ")" * 5000))),
    "with a shape of code": lambda _, __, m: _npz(("tokens.npy", _npy(f"__import__('pathlib').Path('{m}').touch()"))),
    "of objects by name": lambda *_: _npz(("tokens.npy", _npy(dtype="'|O'"))),
    "of a nested type": lambda *_: _npz(("tokens.npy", _npy(dtype=str([("a", "<i8")] * 500)))),
    "of text": lambda *_: _npz(("tokens.npy", _npy(dtype="'<U999999999'"))),
    "of no width": lambda *_: _npz(("tokens.npy", _npy("(99999999999,)", "'<U0'", b""))),
    "of an unknown version": lambda *_: _npz(("tokens.npy", _npy(version=9))),
    "outside of the archive": lambda content, *_: _renamed(content, "../../out.npy"),
    "at the root": lambda content, *_: _renamed(content, "/etc/out.npy"),
    "with a NUL in a name": lambda content, *_: _renamed(content, "a\0b.npy"),
    "with two of a name": _doubled_name,
    "encrypted": lambda content, *_: _flags(content, 8, 1),
    "of an unknown method": lambda content, *_: _flags(content, 10, 99),
    "with a long size": lambda content, *_: _flags(content, 27, 0x7F),
    "with many members": lambda *_: _npz(*((f"{i}.npy", b"") for i in range(70_000))),
    "with no members": lambda *_: _npz(),
    "with a comment": lambda content, *_: content[:-2] + b"\xff\xff" + b"x" * 65535,
    "with a bit flipped": lambda content, chance, _: _flip(content, chance),
    "random": lambda content, chance, _: chance.randbytes(len(content)),
    "of another shape": lambda content, *_: _npz(("tokens.npy", _npy("(2, 2)", data=bytes(32)))),
    "of floats": lambda content, *_: _npz(("tokens.npy", _npy("(2,)", "'<f8'", bytes(16)))),
}  # fmt: skip


def _flip(content: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(content))
    return content[:at] + bytes([content[at] ^ (1 << chance.randrange(8))]) + content[at + 1 :]


def _head(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def _entry(shape: Any, offsets: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def _changed(change: Callable[[dict[str, Any]], object]) -> Make:
    def make(content: bytes, *_: Any) -> bytes:
        size = struct.unpack("<Q", content[:8])[0]
        header = json.loads(content[8 : 8 + size])
        change(header)
        return _head(header, content[8 + size :])

    return make


def _first(header: dict[str, Any]) -> dict[str, Any]:
    return next(value for key, value in header.items() if key != "__metadata__")


TENSORS: dict[str, Make] = {
    "a pickle": lambda _, __, marker: _pickle(marker),
    "pickled beside": lambda content, *_: content,
    "with a long header": lambda *_: struct.pack("<Q", 2**63) + b"{}",
    "with the longest header": lambda *_: b"\xff" * 8 + b"{}",
    "with a header of a gigabyte": lambda *_: struct.pack("<Q", 1 << 30) + bytes(99),
    "of an empty header": lambda *_: _head(b""),
    "of no JSON": lambda *_: _head(b"<html>"),
    "of a list": lambda *_: _head([1]),
    "deep": lambda *_: _head(b"[" * 200_000),
    "deep within": lambda *_: _head(b'{"a": ' + b"[" * 90_000 + b"]" * 90_000 + b"}"),
    "with a name twice": lambda *_: _head(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', bytes(4)),
    "that overlaps": lambda *_: _head({"a": _entry([1], [0, 4]), "b": _entry([1], [2, 6])}, bytes(6)),
    "out of range": lambda *_: _head({"a": _entry([1], [0, 4])}),
    "of negative places": lambda *_: _head({"a": _entry([1], [-4, 0])}, bytes(4)),
    "of a negative shape": lambda *_: _head({"a": _entry([-1], [0, 4])}, bytes(4)),
    "of an unknown type": lambda *_: _head({"a": _entry([1], [0, 4], "PICKLE")}, bytes(4)),
    "of a type that is a list": lambda *_: _head({"a": _entry([1], [0, 4], [1])}, bytes(4)),
    "of a large shape": lambda *_: _head({"a": _entry([2**62, 2**62], [0, 4])}, bytes(4)),
    "of many dimensions": lambda *_: _head({"a": _entry([1] * 9999, [0, 4])}, bytes(4)),
    "of fractions": lambda *_: _head({"a": _entry([1.5], [0, 4])}, bytes(4)),
    "of texts": lambda *_: _head({"a": _entry("1", "04")}, bytes(4)),
    "of truths": lambda *_: _head({"a": _entry([True], [False, 4])}, bytes(4)),
    "without a shape": lambda *_: _head({"a": {"dtype": "F32"}}, bytes(4)),
    "of nulls": lambda *_: _head({"a": None}, bytes(4)),
    "with metadata of a number": lambda *_: _head({"__metadata__": 5}),
    "with deep metadata": lambda *_: _head({"__metadata__": {"a": [[[]]]}}),
    "with long metadata": lambda *_: _head({"__metadata__": {"a": "x" * 9_000_000}}),
    "with a NUL in a name": _changed(lambda header: header.update({"a\0b": header.pop(next(iter(header)))})),
    "with a name of a path": _changed(lambda header: header.update({"../../x": header.pop(next(iter(header)))})),
    "of an empty name": _changed(lambda header: header.update({"": header.pop(next(iter(header)))})),
    "of half the type": _changed(lambda header: _first(header).update(dtype="F16")),
    "of another shape": _changed(lambda header: _first(header).update(shape=_first(header)["shape"][::-1])),
    "of one dimension": _changed(lambda header: _first(header).update(shape=[int(np.prod(_first(header)["shape"]))])),
    "of integers": _changed(lambda header: _first(header).update(dtype="I32")),
    "without a tensor": _changed(lambda header: header.pop(next(iter(header)))),
    "torn": lambda content, chance, _: content[: chance.randrange(len(content))],
    "longer": lambda content, *_: content + b"x" * 9,
    "with a bit flipped": lambda content, chance, _: _flip(content[:300], chance) + content[300:],
    "of NaN": lambda content, *_: content[: 8 + struct.unpack("<Q", content[:8])[0]] + b"\xff" * (len(content) - 8 - struct.unpack("<Q", content[:8])[0]),
    "empty": lambda *_: b"",
    "zeros": lambda content, *_: bytes(len(content)),
}  # fmt: skip


def _json_with(name: str, value: Any) -> Make:
    def make(content: bytes, *_: Any) -> bytes:
        try:
            found = json.loads(content)
        except ValueError:
            return content + f"\n{name}: {json.dumps(value)}\n".encode()
        if not isinstance(found, dict):
            return json.dumps(value).encode()
        return json.dumps({**found, name: value}).encode()

    return make


BOMB = b"a: &a [x, x, x, x, x, x, x, x, x]\n" + b"".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 9)}]\n".encode() for i in range(12)
)  # fmt: skip
TEXTS: dict[str, Make] = {
    "nested": lambda *_: b"[" * 200_000,
    "nested objects": lambda *_: b'{"a":' * 200_000,
    "a YAML bomb": lambda *_: BOMB,
    "a YAML tag": lambda _, __, m: f"!!python/object/apply:pathlib.Path.touch ['{m}']\n".encode(),
    "a pickle": lambda _, __, marker: _pickle(marker),
    "a long number": lambda *_: b"9" * 100_000,
    "a long text": lambda *_: b'"' + b"x" * 9_000_000 + b'"',
    "random": lambda content, chance, _: chance.randbytes(len(content) + 1),
    "zeros": lambda content, *_: bytes(len(content)),
    "torn": lambda content, chance, _: content[: chance.randrange(len(content) + 1)],
    "empty": lambda *_: b"",
    "in UTF-16": lambda content, *_: content.decode("latin-1").encode("utf-16"),
    "a list": lambda *_: b"[1, 2]",
    "null": lambda *_: b"null",
    "with code of its own": _json_with("auto_map", {"AutoConfig": "evil.Config", "AutoTokenizer": ["evil.T", None], "AutoModelForCausalLM": "evil.M"}),
    "of another tokenizer": _json_with("tokenizer_class", "EvilTokenizer"),
    "of a list as tokenizer": _json_with("tokenizer_class", [1]),
    "of another model": _json_with("model_type", "../../etc"),
    "of a number as model": _json_with("model_type", 5),
    "of a huge vocabulary": _json_with("vocab_size", 10**12),
    "of a negative vocabulary": _json_with("vocab_size", -1),
    "of a text as vocabulary": _json_with("vocab_size", "many"),
    "of no positions": _json_with("max_position_embeddings", -5),
    "of added tokens": _json_with("added_tokens", [{"id": -1, "content": "x"}]),
    "of an unknown model of text": _json_with("model", {"type": "Evil", "vocab": {}}),
    "of an empty model of text": _json_with("model", {}),
    "of a normalizer that runs long": _json_with("normalizer", {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "b"}),
    "of a normalizer that fills memory": _json_with("normalizer", {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"Regex": "."}, "content": "xx"}] * 12}),
    "of an unknown normalizer": _json_with("normalizer", {"type": "Evil"}),
    "of a template": _json_with("chat_template", "{{ ''.__class__.__mro__ }}"),
    "of a template list": _json_with("chat_template", [{"name": 5, "template": 6}]),
    "of an end that is none": _json_with("eos_token_id", "x"),
    "of a text as format": _json_with("format", "x"),
    "of a huge step": _json_with("step", 10**300),
    "of a list as files": _json_with("files", [1]),
    "of files outside": _json_with("files", {"../../../etc/passwd": {"bytes": 1, "sha256": []}}),
    "of a weight map outside": _json_with("weight_map", {"a": "../../x.safetensors"}),
    "of nested text_config": _json_with("text_config", [1]),
    "of a large dtype": _json_with("dtype", "float" * 999),
    "of quantization": _json_with("quantization_config", {"quant_method": "evil"}),
    "compressed": lambda content, *_: zlib.compress(content),
}  # fmt: skip
TEMPLATES = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "{{ 9 ** 9 ** 9 ** 9 }}", "{{ 'a' * 1000000000 }}",
    "{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}", "{{ ''.__class__.__base__.__subclasses__() }}",
    "{{ messages.__class__.__init__.__globals__ }}", "{% include '/etc/passwd' %}", "{% import 'os' as os %}{{ os.system('touch MARKER') }}", "{{ cycler.__init__.__globals__.os.popen('touch MARKER').read() }}",
    "{{ self.__init__.__globals__.__builtins__.open('MARKER', 'w') }}", "{{ lipsum.__globals__['os'].system('touch MARKER') }}", "{{ ().__class__.__bases__[0].__subclasses__()[40]('MARKER', 'w') }}",
    "{{ namespace.__init__.__globals__ }}", "{{ (", "{% for %}", "{{ undefined.x.y }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "", "{{ '%1000000000d' % 1 }}", "{{ [0] * 1000000000 }}",
    "{{ raise_exception('no') }}", "{{ 1 / 0 }}", "{{ messages[99].content }}", "{{ 'a'.ljust(1000000000) }}", "{{ '{0.__class__}'.format(messages) }}", "{{ '{:1000000000}'.format(1) }}", "{{ request.application.__globals__ }}",
    "{{ strftime_now('%' * 100000) }}", "{{ messages | attr('__class__') }}", "{{ x" + " + x" * 20_000 + " }}", "{{ " + "(" * 5000 + ")" * 5000 + " }}", "{% if 1 %}" * 3000, "x" * 3_000_000, "{{ messages | tojson(indent=1000000000) }}",
    "{{ 'a b ' * 9000 }}", "{{ range(1000000000) | list }}", "{{ range(10 ** 9) | join }}", "{{ 'x' | center(10 ** 9) }}", "{{ 'ab' | replace('', 'x' * 100000) * 99 }}", "{{ dict(a=1).update({}) }}", "{% set _ = messages.append(1) %}{{ messages }}",
    "{{ messages | sum(start=[]) }}", "{{ messages | map('string') | join | wordwrap(1) }}", "{{ 'a' | indent(10 ** 9) }}", "{{ 1.5 ** 99999 }}", "{% set x = messages %}{% for m in x %}{% for n in x %}{{ m }}{% endfor %}{% endfor %}",
    "{{ 'x' | format(*range(10 ** 8)) }}", "{{ lipsum(n=10 ** 7) }}", "{{ ['a'] | batch(10 ** 9, 'x') | list }}", "{{ ['a'] | slice(10 ** 9) | list }}", "{{ 'a' | urlize | xmlattr }}", "{{ 'a' | random }}", "{{ joiner('x' * 10 ** 7)() }}",
)  # fmt: skip


if __name__ == "__main__":
    run(check, 300)
