"""Make paths and targets that settings must not name."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path

TRAINS = ("grpo", "sft")
SAMPLES = ("grpo", "eval")
EVERY = ("grpo", "sft", "eval")
Paths = list[tuple[str, str, tuple[str, ...]]]
CODE = {
    "empty.py": "",
    "syntax.py": "def score(completion:\n",
    "indent.py": "def score(completion):\nreturn 1\n",
    "tabs.py": "def score(completion):\n\tif 1:\n        return 1\n",
    "nul.py": "def score(completion): return 1\n\0",
    "latin.py": "def score(completion): return '\xfc'\n",
    "other.py": "def scores(completion):\n    return 1\n",
    "value.py": "score = 5\n",
    "text.py": "score = 'x'\n",
    "none.py": "score = None\n",
    "listed.py": "score = [1]\n",
    "mapped.py": "score = {}\n",
    "nothing.py": "def score():\n    return 1\n",
    "misses.py": "def score(text):\n    return 1\n",
    "needs.py": "def score(completion, label):\n    return 1\n",
    "inner.py": "def outer():\n    def score(completion):\n        return 1\n",
    "method.py": "class Score:\n    def score(self, completion):\n        return 1\n",
    "deep.py": "score = " + "(" * 5000 + ")" * 5000 + "\n",
    "chain.py": "score = " + "-" * 90_000 + "1\n",
    "deleted.py": "def score(completion): return 1\ndel score\n",
    "keyword.py": "def score(*, answer):\n    return 1\n",
    "python2.py": "print 'x'\ndef score(completion): return 1\n",
    "json.py": "{\"score\": tru}",
    "conflict.py": "<<<<<<< HEAD\ndef score(completion): return 1\n=======\n>>>>>>> x\n",
}  # fmt: skip
TARGETS = (
    "reward", "reward.py", "reward.py:", ":score", "reward:scor", "reward.py:scor", "reward.py:Score",
    "reward.py:score ", "reward.py:score:x", "reward.py::score", "missing.py:score", "no_such:score",
    "no.such.module:score", "json:nothing", "json.nothing:loads", "os.path:nothing", "json:__doc__x",
    "math:pi", "reward.py:score()", "reward.score", "./reward:score", "/reward.py:score", "toy:score",
    "rows.jsonl:score", "~/reward.py:score", "reward.PY:score", "a\0b.py:score", "\udcff.py:score",
    "x" * 300 + ".py:score", "..:score", ".:score", "a-b:score", "1x:score", "reward.py:1", "reward.py:a-b",
    "reward.py:score.inner", " reward.py:score", "coupler.nothing:x", "coupler:nothing_here", "'':x",
    "http://host/reward.py", "/dev/zero:score", "/dev/null:score", "toy/:score", "None",
)  # fmt: skip


def wrong_paths(folder: Path) -> Paths:
    """Write what wrong paths name, and return options with their values and jobs."""
    odd = _odd_files(folder)
    found: Paths = []
    for key in ("model.path", "data.source", "eval.data.source", "run_dir"):
        jobs = {"eval.data.source": ("eval",), "data.source": TRAINS}
        values = [value for value in odd if not _fits(key, value)]
        found += [(key, _quoted(value), jobs.get(key, EVERY)) for value in values]

    found += [("model.path", _quoted(path), EVERY) for path in _models(folder)]
    for path in _rows(folder):
        found += [
            ("data.source", _quoted(path), TRAINS),
            ("eval.data.source", _quoted(path), ("eval",)),
        ]
    code = [f"{path}:score" for path in _modules(folder)]
    for target in (*TARGETS, *code):
        found.append(("reward.target", _quoted(target), SAMPLES))
    plain = [t for t in TARGETS if ":" in t and not t.startswith(("'", "rows.jsonl"))]
    for target in (*plain, *(f"{p}:rows" for p in _modules(folder) if p.endswith(ONLY_BAD))):
        found += [
            ("data.source", _quoted(target), TRAINS),
            ("eval.data.source", _quoted(target), ("eval",)),
        ]
        found.append(("model.path", _quoted(target), EVERY))
    for value in ("missing", str(folder / "rows.jsonl"), str(folder / "toy"), "Auto", "true", "a\0b",
                  "x" * 300, str(folder / "odd" / "pipe"), "/dev/zero", "no", "\udcff"):  # fmt: skip
        found.append(
            ("checkpoint.resume", _quoted(value) if value != "true" else value, ("grpo", "sft"))
        )
    for value in (
        "missing",
        str(folder / "rows.jsonl"),
        "a\0b",
        "x" * 300,
        str(folder / "odd/pipe"),
    ):
        found.append(("critic.model.path", _quoted(value), ("ppo",)))
    return found


ONLY_BAD = ("empty.py", "syntax.py", "indent.py", "nul.py", "conflict.py", "other.py", "tabs.py")


def _quoted(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _fits(key: str, value: str) -> bool:
    """Tell whether a path is no mistake for this option."""
    fine = {
        "run_dir": (
            "missing",
            "toy",
            "missing.jsonl",
            "missing/in/it",
            "empty",
            "dangling",
            "folder.jsonl",
        ),
        "model.path": (),
    }
    return any(value.endswith(f"/{name}") or value == name for name in fine.get(key, ()))


def _odd_files(folder: Path) -> list[str]:
    place = folder / "odd"
    if not place.exists():
        place.mkdir()
        os.mkfifo(place / "pipe")
        os.mkfifo(place / "pipe.jsonl")
        os.symlink("loop", place / "loop")
        os.symlink("nowhere", place / "dangling")
        os.symlink("/dev/zero", place / "zero.jsonl")
        (place / "empty").mkdir()
        (place / "folder.jsonl").mkdir()
        (place / "file").write_text("x")
        here = os.getcwd()
        os.chdir(place)
        with socket.socket(socket.AF_UNIX) as made:
            made.bind("socket")
        os.chdir(here)
    names = ("pipe", "pipe.jsonl", "loop", "dangling", "zero.jsonl", "empty", "folder.jsonl", "file",
             "socket", "missing", "missing.jsonl", "missing/in/it", "file/below", "pipe/below")  # fmt: skip
    return [
        *(str(place / name) for name in names),
        "~", "a\0b", "x" * 300, "x/" * 3000, "/dev/null", "/dev/zero", "/dev/tty", "/proc/self/mem",
        "/proc/nothing", "\udcff\udcfe\0", "/sys/kernel", "/dev/null/x",
    ]  # fmt: skip


def _models(folder: Path) -> list[str]:
    """Write folders of models that are none."""
    found = []

    def model(name: str, without: tuple[str, ...] = (), **files: str | bytes | None) -> None:
        path = folder / "models" / name
        found.append(str(path))
        if path.exists():
            return
        shutil.copytree(folder / "toy", path)
        for gone in without:
            (path / gone).unlink()
        for file, content in files.items():
            file = file.replace("__", ".")
            if content is None:
                (path / file).unlink(missing_ok=True)
                (path / file).mkdir()
            else:
                data = content.encode() if isinstance(content, str) else content
                (path / file).write_bytes(data)

    config = json.loads((folder / "toy" / "config.json").read_text())
    weights = (folder / "toy" / "model.safetensors").read_bytes()
    model("no_config", ("config.json",))
    model("no_weights", ("model.safetensors",))
    model("no_tokenizer", ("tokenizer.json",))
    bad_json = {
        "empty": "", "torn": json.dumps(config)[:20], "list": "[1]", "text": '"x"', "number": "5",
        "null": "null", "binary": bytes(range(256)), "nested": "[" * 99_999, "utf16": "{}".encode("utf-16"),
        "html": "<!DOCTYPE html><html>", "python": "{'a': 1}", "comment": "// x\n{}", "comma": '{"a": 1,}',
        "doubled": json.dumps(config) * 2, "nul": b"{\0}", "folder": None,
        "pointer": "version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 9\n",
    }  # fmt: skip
    for name, content in bad_json.items():
        model(f"config_{name}", config__json=content)
        model(f"tokenizer_{name}", tokenizer__json=content)
        if name != "html":
            model(f"tokenizer_config_{name}", tokenizer_config__json=content)
    for name, value in (("vocab_text", {"vocab_size": "many"}), ("type_list", {"model_type": [1]}),
                        ("type_number", {"model_type": 5}), ("positions_text", {"max_position_embeddings": "x"}),
                        ("architectures_text", {"architectures": 5}), ("text_config_list", {"text_config": [1]})):  # fmt: skip
        model(name, config__json=json.dumps({**config, **value}))
    bad_weights = {
        "empty": b"", "torn": weights[:-5], "short": weights[:6], "zeros": bytes(500),
        "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 9\n",
        "html": b"<!DOCTYPE html><html>" * 9, "longer": weights + b"x", "huge": b"\xff" * 400,
        "negative": b"\x00" * 7 + b"\x80" + bytes(90), "zip": b"PK\x03\x04" + bytes(300),
        "pickle": b"\x80\x04\x95" + bytes(300), "folder": None,
    }  # fmt: skip
    for name, content in bad_weights.items():
        model(f"weights_{name}", model__safetensors=content)
    path = folder / "models" / "pickled"
    model("pickled", ("model.safetensors",))
    (path / "pytorch_model.bin").write_bytes(b"\x80\x04\x95" + bytes(300))
    path = folder / "models" / "index_missing"
    model("index_missing", ("model.safetensors",))
    index = {"metadata": {}, "weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    path = folder / "models" / "index_list"
    model("index_list")
    (path / "model.safetensors.index.json").write_text("[1]")
    path = folder / "models" / "index_outside"
    model("index_outside")
    index = {"weight_map": {"a": "../../../etc/passwd"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return found


def _rows(folder: Path) -> list[str]:
    """Write files of rows that the first look refuses."""
    place = folder / "data"
    place.mkdir(exist_ok=True)
    good = '{"prompt": "a", "answer": "b"}\n'
    files: dict[str, str | bytes] = {
        "empty.jsonl": "", "blank.jsonl": "\n \n\n", "torn.jsonl": good[:12], "list.jsonl": "[1]\n",
        "number.jsonl": "5\n", "text.jsonl": '"x"\n', "null.jsonl": "null\n", "promt.jsonl": '{"promt": "a", "answer": "b"}\n',
        "prompt.jsonl": '{"prompt": 5, "answer": "b"}\n', "no_prompt.jsonl": '{"prompt": null, "answer": "b"}\n',
        "blank_prompt.jsonl": '{"prompt": " ", "answer": "b"}\n', "messages.jsonl": '{"prompt": [], "answer": "b"}\n',
        "role.jsonl": '{"prompt": [{"role": 5, "content": "x"}], "answer": "b"}\n', "csv.jsonl": "prompt,answer\na,b\n",
        "python.jsonl": "{'prompt': 'a'}\n", "yaml.jsonl": "- prompt: a\n", "nested.jsonl": "[" * 99_999 + "\n",
        "utf16.jsonl": good.encode("utf-16"), "binary.jsonl": bytes(range(256)), "zeros.jsonl": bytes(999),
        "answer.jsonl": '{"prompt": "a"}\n', "empty.json": "", "object.json": good, "none.json": "[]", "torn.json": "[{",
        "numbers.json": "[1, 2]", "nested.json": "[" * 99_999, "promt.json": '[{"promt": "a", "answer": "b"}]',
        "empty.parquet": "", "text.parquet": "hello", "magic.parquet": b"PAR1PAR1", "zeros.parquet": bytes(999),
        "long.parquet": b"PAR1" + bytes(99) + b"\xff\xff\xff\x7fPAR1", "rows.csv": "prompt,answer\n", "rows.txt": "x",
        "rows.arrow": "x", "rows": "x", "rows.JSONL": good, "rows.jsonl.gz": b"\x1f\x8b", "rows.json.zst": b"x", "rows.yaml": "- prompt: a",
        "many.json": '{"prompt": "a"}\n{"prompt": "b"}\n',
    }  # fmt: skip
    for name, content in files.items():
        (place / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return [str(place / name) for name in files]


def _modules(folder: Path) -> list[str]:
    place = folder / "code"
    place.mkdir(exist_ok=True)
    for name, content in CODE.items():
        (place / name).write_bytes(content.encode("latin-1"))
    if not (place / "pipe.py").exists():
        os.mkfifo(place / "pipe.py")
        (place / "folder.py").mkdir()
        os.symlink("loop.py", place / "loop.py")
    return [str(place / name) for name in (*CODE, "pipe.py", "folder.py", "loop.py")]
