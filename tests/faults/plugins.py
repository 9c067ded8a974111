"""Installed plugins with one fault each, tried with real commands.

Each case installs a faulty plugin into a folder of its own, and runs one command that
does not select it beside the same command without it, or one that selects it:

    python -m tests.faults.plugins SEED CASES
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from tests.faults import run
from tests.faults.toy_runs import OPTIONS, steps, write_inputs

# What a plugin may cost a command that does not select it, and what a busy machine adds
# to the difference of two commands.
SLOWER_S, NOISE = 0.2, 2.0
# One that is selected is given up after a minute.
LIMIT_S = 90.0
MARK = "POLLUTION"

GOOD = """
from dataclasses import dataclass
import coupler
import coupler.testing.toy_config
from coupler.plugins import Backend, hookimpl
@dataclass
class Config(coupler.{base}):
    name: str = "{name}"
BACKEND = dict(kind="{kind}", name="{name}", target="coupler.testing.toy:{toy}", config=Config,
               capabilities=frozenset({{"weights:full", "model:toy", "world:1"}}))
@hookimpl
def coupler_backends():
    return [Backend(**BACKEND)]
"""
KINDS = {
    "engine": {"base": "testing.toy_config.ToyEngineConfig", "toy": "ToyEngine"},
    "rollout": {"base": "RolloutConfig", "toy": "ToyRollout"},
}

# What a module does when it is imported, before or after it declares its backends.
IMPORTS = {
    "hangs": "import time; time.sleep(1000)",
    "spins": "while True: pass",
    "sleeps five seconds": "import time; time.sleep(5)",
    "exits hard": "import os; os._exit(3)",
    "exits hard with 0": "import os; os._exit(0)",
    "exits": "import sys; sys.exit(0)",
    "exits with text": "raise SystemExit('MARK')",
    "segfaults": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "reads address 0": "import ctypes; ctypes.string_at(0)",
    "aborts": "import os; os.abort()",
    "kills itself": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "kills its group": "import os, signal; os.killpg(0, signal.SIGKILL)",
    "kills its parent": "import os, signal; os.kill(os.getppid(), signal.SIGKILL)",
    "stops itself": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "interrupts": "raise KeyboardInterrupt",
    "raises": "raise RuntimeError('MARK')",
    "raises a BaseException": "raise BaseException('MARK')",
    "raises a group": "raise ExceptionGroup('MARK', [ValueError('a')])",
    "raises what has no text": (
        "class E(Exception):\n    def __str__(self): raise ValueError\nraise E"
    ),
    "raises many lines": "raise ValueError('MARK\\n' * 1000)",
    "raises escapes": "raise ValueError('\\x1b[31mMARK\\x07')",
    "lacks a module": "import acme_kernels",
    "lacks a name": "from json import acme",
    "is no Python": "def (",
    "is binary": "\\0\\0",
    "recurses": "def f(): f()\nf()",
    "prints": "print('MARK')",
    "prints to stderr": "import sys; sys.stderr.write('MARK\\n')",
    "prints below Python": "import os; os.write(1, b'MARK\\n'); os.write(2, b'MARK\\n')",
    "prints without end": "while True: print('MARK')",
    "prints at the exit": "import atexit; atexit.register(print, 'MARK')",
    "logs": "import logging; logging.basicConfig(level=0); logging.error('MARK')",
    "warns": "import warnings; warnings.simplefilter('always'); warnings.warn('MARK')",
    "closes stdout": "import os; os.close(1)",
    "closes every file": "import os; os.closerange(0, 256)",
    "replaces stdout": "import sys; sys.stdout = None",
    "reads stdin": "input()",
    "starts a thread": (
        "import threading, time; threading.Thread(target=time.sleep, args=(1000,)).start()"
    ),
    "starts a daemon thread": (
        "import threading\ndef f():\n    while True: print('MARK')\n"
        "threading.Thread(target=f, daemon=True).start()"
    ),
    "forks": "import os, time\nif not os.fork(): time.sleep(1000)",
    "leaves a daemon": (
        "import os, time\nif not os.fork():\n    os.setsid()\n    if os.fork(): os._exit(0)\n"
        "    time.sleep(1000)\ntime.sleep(.2)"
    ),
    "starts a program": "import subprocess; subprocess.Popen(['sleep', '1000'])",
    "allocates": "x = [bytearray(1 << 20) for _ in range(256)]",
    "patches json": "import json; json.dumps = json.loads = lambda *a, **k: 'MARK'",
    "patches builtins": "import builtins; builtins.open = builtins.len = None",
    "patches print": "import builtins; builtins.print = lambda *a, **k: None",
    "patches logging": "import logging; logging.disable(100); logging.Logger.warning = None",
    "patches warnings": "import warnings; warnings.simplefilter('error')",
    "patches signals": "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)",
    "sets an alarm": "import signal; signal.alarm(1)",
    "patches os.environ": "import os; os.environ.clear()",
    "patches sys.path": "import sys; sys.path.clear()",
    "patches sys.modules": "import sys; sys.modules['json'] = sys.modules['coupler'] = None",
    "patches the locale": "import locale; locale.setlocale(locale.LC_ALL, 'C')",
    "patches umask": "import os; os.umask(0o777)",
    "patches the folder": "import os; os.chdir('/')",
    "patches random": "import random, numpy; random.seed(0); numpy.random.seed(0)",
    "patches the hooks": "import sys; sys.excepthook = sys.displayhook = None",
    "patches the import": "import sys; sys.meta_path.clear(); sys.path_hooks.clear()",
    "patches time": "import time; time.monotonic = time.perf_counter = lambda: 0.0",
    "patches numpy": "import numpy; numpy.float32 = numpy.float64; numpy.seterr(all='raise')",
    "patches coupler": "import coupler.plugins.manager as m; m.Plugins.load = None",
    "patches the limits": "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (4, 4))",
    "patches recursion": "import sys; sys.setrecursionlimit(60)",
    "switches tracing on": "import sys; sys.settrace(lambda *a: print('MARK'))",
    "has weird names": "__name__ = 7; __file__ = object(); __spec__ = None",
}
# A change of the good module. The second text replaces the first.
CHANGES = {
    "name of another type": ('name="{name}", target', "name=7, target"),
    "name with a space": ('name="{name}", target', 'name="a b", target'),
    "name of a look-alike": ('name="{name}", target', 'name="t\\u043ey", target'),
    "name with escapes": ('name="{name}", target', 'name="\\x1b[2J", target'),
    "empty name": ('name="{name}", target', 'name="", target'),
    "long name": ('name="{name}", target', 'name="a" * 10000, target'),
    "name that is a subclass": (
        'BACKEND = dict(kind="{kind}", name="{name}"',
        "class S(str):\n    def __eq__(self, o): return True\n"
        "    def __hash__(self): raise OSError\n"
        'BACKEND = dict(kind="{kind}", name=S("{name}")',
    ),
    "kind of another type": ('kind="{kind}"', "kind=None"),
    "kind misspelt": ('kind="{kind}"', 'kind="{kind}s"'),
    "kind in upper case": ('kind="{kind}"', 'kind="{kind}".upper()'),
    "kind that nobody knows": ('kind="{kind}"', 'kind="motor"'),
    "no config": ("config=Config", "config=None"),
    "config that is no class": ("config=Config", "config=7"),
    "config that is no dataclass": ("@dataclass\n", ""),
    "config that raises": ("config=Config", "config=lambda: 1 / 0"),
    "config that hangs": ("config=Config", "config=lambda: __import__('time').sleep(1000)"),
    "config that returns another": ("config=Config", "config=dict"),
    "config without its base": ("(coupler.{base})", ""),
    "config of another name": ('name: str = "{name}"', 'name: str = "other"'),
    "config that does not check": (
        'name: str = "{name}"',
        'name: str = "{name}"\n    def __post_init__(self): raise ValueError("MARK")',
    ),
    "api of another type": ("config=Config", 'config=Config, api="one"'),
    "api of another generation": ("config=Config", "config=Config, api=99"),
    "no target": ("coupler.testing.toy:{toy}", ""),
    "target without a colon": ("coupler.testing.toy:{toy}", "coupler.testing.toy"),
    "target of another type": ('"coupler.testing.toy:{toy}"', "7"),
    "serves is a number": ("config=Config", "config=Config, serves=7"),
    "tested is text": ("config=Config", 'config=Config, tested="torch"'),
    "tested is no range": ("config=Config", 'config=Config, tested={{"torch": "newest"}}'),
    "capabilities are a text": (
        'frozenset({{"weights:full", "model:toy", "world:1"}})',
        '"weights:full"',
    ),
    "capabilities are a list": (
        'frozenset({{"weights:full", "model:toy", "world:1"}})',
        '["weights:full"]',
    ),
    "capabilities are None": ('frozenset({{"weights:full", "model:toy", "world:1"}})', "None"),
    "capabilities are numbers": (
        'frozenset({{"weights:full", "model:toy", "world:1"}})',
        "frozenset({{1}})",
    ),
    "capabilities that raise": (
        'frozenset({{"weights:full", "model:toy", "world:1"}})',
        "lambda c: 1 / 0",
    ),
    "capabilities that hang": (
        'frozenset({{"weights:full", "model:toy", "world:1"}})',
        "lambda c: __import__('time').sleep(1000)",
    ),
    "capabilities that exit": (
        'frozenset({{"weights:full", "model:toy", "world:1"}})',
        "lambda c: __import__('os')._exit(0)",
    ),
    "no hook": ("@hookimpl\n", ""),
    "hook misspelt": ("def coupler_backends", "def coupler_backend"),
    "hook with arguments": ("coupler_backends()", "coupler_backends(what)"),
    "hook that returns None": ("return [Backend(**BACKEND)]", "return None"),
    "hook that returns one": ("return [Backend(**BACKEND)]", "return Backend(**BACKEND)"),
    "hook that returns a dict": ("return [Backend(**BACKEND)]", "return BACKEND"),
    "hook that returns text": ("return [Backend(**BACKEND)]", "return 'engine'"),
    "hook that returns strangers": ("return [Backend(**BACKEND)]", "return [object(), None]"),
    "hook without end": (
        "return [Backend(**BACKEND)]",
        "while True: yield Backend(**BACKEND)",
    ),
    "hook that raises": ("return [Backend(**BACKEND)]", "raise RuntimeError('MARK')"),
    "hook that exits": ("return [Backend(**BACKEND)]", "raise SystemExit(0)"),
    "hook that raises late": (
        "return [Backend(**BACKEND)]",
        "yield Backend(**BACKEND); raise RuntimeError('MARK')",
    ),
    "hook that hangs": ("return [Backend(**BACKEND)]", "import time; time.sleep(1000)"),
    "the same name twice": (
        "return [Backend(**BACKEND)]",
        "return [Backend(**BACKEND), Backend(**BACKEND)]",
    ),
    "thousands of backends": (
        "return [Backend(**BACKEND)]",
        "return [Backend(kind='tracker', name=f't{{i}}', target='a:B') for i in range(5000)]",
    ),
    "a subclass of Backend": (
        "return [Backend(**BACKEND)]",
        "class B(Backend):\n        name = property(lambda self: 1 / 0)\n    return [B(**BACKEND)]",
    ),
    "a generator of backends that is none": ("return [Backend(**BACKEND)]", "return iter([1])"),
    "takes a name of core": ('name="{name}", target', 'name="toy", target'),
}
# Further hooks. None may be called where the plugin is not selected.
HOOKS = {
    "validate that refuses": "def coupler_validate(config): return ['MARK']",
    "validate that raises": "def coupler_validate(config): raise RuntimeError('MARK')",
    "validate that exits": "def coupler_validate(config): raise SystemExit(0)",
    "validate that returns text": "def coupler_validate(config): return 'MARK'",
    "validate that returns numbers": "def coupler_validate(config): return [1, 2]",
    "validate that returns a number": "def coupler_validate(config): return 7",
    "weight path that returns junk": "def coupler_weight_path(config): return 7",
    "weight path that raises": "def coupler_weight_path(config): raise OSError('MARK')",
    "weight path that names nothing": "def coupler_weight_path(config): return 'full', 'MARK'",
    "step end that raises": "def coupler_step_end(step): raise RuntimeError('MARK')",
    "config paths of text": "def coupler_config_paths(): return 'coupler'",
    "config paths of nothing": "def coupler_config_paths(): return ['acme.not.there']",
    "config paths of a module": "def coupler_config_paths(): return ['json.decoder']",
    "config paths of numbers": "def coupler_config_paths(): return [7]",
    "config paths that raise": "def coupler_config_paths(): raise RuntimeError('MARK')",
    "doctor that prints": "def coupler_doctor(config):\n    print('MARK')\n    return []",
    "a hook that nobody knows": "def coupler_nothing(): return []",
}
METADATA = "Metadata-Version: 2.1\nName: {dist}\nVersion: 1.0\n"
POINTS = "[coupler]\n{name} = {module}\n"
# Files of the metadata, as they come from somewhere else.
RECORDS: dict[str, tuple[str, bytes]] = {
    "empty METADATA": ("METADATA", b""),
    "METADATA without a name": ("METADATA", b"Metadata-Version: 2.1\nVersion: 1.0\n"),
    "METADATA without a version": ("METADATA", b"Metadata-Version: 2.1\nName: acme\n"),
    "METADATA in UTF-16": ("METADATA", METADATA.encode("utf-16")),
    "METADATA of bytes": ("METADATA", bytes(range(256))),
    "METADATA of another": ("METADATA", b"Metadata-Version: 2.1\nName: coupler-core\nVersion: 9\n"),
    "METADATA with escapes": ("METADATA", b"Name: \x1b[31mMARK\nVersion: \x1b[2J\n"),
    "entry points in UTF-16": ("entry_points.txt", POINTS.encode("utf-16")),
    "entry points of bytes": ("entry_points.txt", b"[coupler]\n\xff\xfe = \x80\n"),
    "no value": ("entry_points.txt", b"[coupler]\nacme =\n"),
    "no equals sign": ("entry_points.txt", b"[coupler]\nacme\n"),
    "value of junk": ("entry_points.txt", b"[coupler]\nacme = ;;; rm -rf\n"),
    "value with dots": ("entry_points.txt", b"[coupler]\nacme = ..acme..\n"),
    "value of a missing module": ("entry_points.txt", b"[coupler]\nacme = acme_not_there\n"),
    "value of a missing name": ("entry_points.txt", b"[coupler]\nacme = json:acme\n"),
    "value of a number": ("entry_points.txt", b"[coupler]\nacme = sys:maxsize\n"),
    "value of the library": ("entry_points.txt", b"[coupler]\nacme = json\n"),
    "value of core": ("entry_points.txt", b"[coupler]\nacme = coupler.cli\n"),
    "value of core's own plugin": (
        "entry_points.txt",
        b"[coupler]\ntoy = coupler.testing.toy_config\n",
    ),
    "value that prints": ("entry_points.txt", b"[coupler]\nacme = this\n"),
    "no section ends": ("entry_points.txt", b"[coupler\nacme = json\n"),
    "two of one name": ("entry_points.txt", b"[coupler]\na = json\na = this\na = antigravity\n"),
    "hundreds": (
        "entry_points.txt",
        b"[coupler]\n" + b"".join(b"a%d = acme_%d\n" % (i, i) for i in range(300)),
    ),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """Fault is one plugin with one fault, and what selecting it may come to."""

    name: str
    kind: str
    source: str
    record: str = ""

    def install(self, folder: Path) -> None:
        """Write the plugin and its metadata as pip would."""
        module, dist = "acme_plugin", f"coupler-{self.kind}-acme"
        (folder / f"{module}.py").write_text(self.source)
        info = folder / "coupler_acme-1.0.dist-info"
        info.mkdir(parents=True)
        values = {"dist": dist, "name": "acme", "module": module}
        (info / "METADATA").write_text(METADATA.format(**values))
        (info / "entry_points.txt").write_text(POINTS.format(**values))
        if self.record:
            file, content = RECORDS[self.record]
            for key, value in values.items():
                for code in ("utf-8", "utf-16-le"):
                    content = content.replace(f"{{{key}}}".encode(code), value.encode(code))
            (info / file).write_bytes(content.replace(b"MARK", MARK.encode()))


def faults() -> list[Fault]:
    """Return every fault."""
    found = []
    for kind, parts in KINDS.items():
        good = GOOD.format(kind=kind, name="acme", **parts)
        for (name, code), where in product(IMPORTS.items(), ("first", "last", "in a package")):
            text = code.replace("MARK", MARK)
            source = {
                "first": f"{text}\n{good}",
                "last": f"{good}\n{text}\n",
                "in a package": f"{good}\ndef __getattr__(name):\n    {text!r}\nexec({text!r})\n",
            }[where]
            found.append(Fault(f"{kind} whose module {name} {where}", kind, source))
        for name, (old, new) in CHANGES.items():
            old, new = (t.format(kind=kind, name="acme", **parts) for t in (old, new))
            assert old in good, name
            found.append(
                Fault(f"{kind}: {name}", kind, good.replace(old, new).replace("MARK", MARK))
            )
        for name, code in HOOKS.items():
            source = f"{good}\n@hookimpl\n{code.replace('MARK', MARK)}\n"
            found.append(Fault(f"{kind}: {name}", kind, source))
        found += [Fault(f"{kind}: {name}", kind, good, name) for name in RECORDS]
    return found


@dataclass(frozen=True, slots=True)
class Done:
    """Done is what one command did."""

    code: int
    out: str
    err: str
    seconds: float


class Place:
    """Place is a folder with the inputs of a toy run, and a cache of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.number = folder, 0
        write_inputs(folder / "inputs")
        # What a plugin changes must not come from the cache of somebody else.
        self.cache = folder / "cache"

    def command(self, which: str, chosen: str, run_dir: Path) -> list[str]:
        if which == "plugins":
            return ["plugins", "--json"]
        inputs = self.folder / "inputs"
        more = [f"{chosen}=acme"] if chosen else []
        given = [option for option in OPTIONS if not chosen or not option.startswith(f"{chosen}=")]
        given = [o for o in given if not (chosen == "engine" and o.startswith("engine."))]
        return [
            which, *given, *more, "steps=1",
            f"model.path={inputs / 'toy'}", f"data.source={inputs / 'rows.jsonl'}",
            f"reward.target={inputs / 'reward.py'}:score", f"run_dir={run_dir}",
        ]  # fmt: skip

    def run(self, which: str, chosen: str, plugins: Path | None) -> tuple[Done, Path]:
        self.number += 1
        run_dir = self.folder / ("run" if which == "plan" else f"run{self.number}")
        path = [str(plugins)] if plugins else []
        path += filter(None, [os.environ.get("PYTHONPATH")])
        environment = {k: v for k, v in os.environ.items() if not k.startswith("COUPLER_")}
        environment |= {"PYTHONPATH": os.pathsep.join(path), "XDG_CACHE_HOME": str(self.cache)}

        start = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "coupler.cli", *self.command(which, chosen, run_dir)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            return Done(-1, out, f"{err}\nit hangs", LIMIT_S), run_dir
        return Done(process.returncode, out, err, time.perf_counter() - start), run_dir


def _is_slow(which: str, beside: Done, alone: Done) -> bool:
    limit = 6.0 if which == "plugins" else SLOWER_S
    return beside.seconds > alone.seconds * (1 + NOISE) + limit


def without(which: str, chosen: str, fault: Fault, place: Place) -> Iterator[str]:
    """Compare a command that does not select the plugin with one without it."""
    with tempfile.TemporaryDirectory(dir=place.folder) as folder:
        fault.install(Path(folder))
        alone, run_alone = place.run(which, chosen, None)
        beside, run_beside = place.run(which, chosen, Path(folder))
        if _is_slow(which, beside, alone):  # once more, since others use this machine
            alone, run_alone = place.run(which, chosen, None)
            beside, run_beside = place.run(which, chosen, Path(folder))
        left = survivors(folder)

    if beside.code == 2 and "torch reads it when it is imported" in beside.err:
        return  # Nothing that trains can be imported there.
    if beside.code != alone.code or "Traceback" in beside.err:
        yield f"ends with {beside.code}, without it with {alone.code}: {beside.err[-300:]!r}"
    # The listing is JSON, read below, and tells why a plugin failed in its own words.
    if MARK in beside.out and which != "plugins":
        yield f"its text is in the output: {beside.out[-200:]!r}"
    if "\x1b[" in beside.out + beside.err:
        yield "its escapes reach the terminal"
    if left:
        yield f"processes are left: {left}"
    if _is_slow(which, beside, alone):
        yield f"takes {beside.seconds:.1f} s, without it {alone.seconds:.1f} s"
    trained = which == "train" and not alone.code and not beside.code
    if trained and steps(run_alone) != steps(run_beside):
        yield "the run has other numbers"
    if which == "plan" and alone.out != beside.out:
        yield f"the plan differs: {beside.out[-300:]!r}"
    if which == "plugins" and not beside.code:
        ours = {json.dumps(row) for row in json.loads(alone.out)["plugins"]}
        if lost := ours - {json.dumps(row) for row in json.loads(beside.out)["plugins"]}:
            yield f"rows are lost or changed: {sorted(lost)[:2]}"


def selecting(which: str, chosen: str, fault: Fault, place: Place) -> Iterator[str]:
    """Select the plugin: the run goes well, or ends in a sentence."""
    with tempfile.TemporaryDirectory(dir=place.folder) as folder:
        fault.install(Path(folder))
        done, _ = place.run(which, fault.kind, Path(folder))
        left = survivors(folder)
    if done.code not in (0, 2) or "Traceback" in done.err:
        yield f"selected, it ends with {done.code}: {done.err[-400:]!r}"
    if done.code == 2 and not done.err.strip():
        yield "selected, it ends without a sentence"
    if left:
        yield f"processes are left: {left}"


def survivors(folder: str) -> list[str]:
    """Return processes that have this folder on their path, and live on."""
    found = []
    for _ in range(20):
        found = []
        for environ in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if folder.encode() in environ.read_bytes():
                    state = (environ.parent / "stat").read_text().rpartition(")")[2].split()[0]
                    found += [environ.parent.name] if state != "Z" else []
        if not found:
            return []
        time.sleep(0.1)
    return found


# What a selected plugin does to its own process in the middle of its import is its
# user's business: these end or hang the run that asks for them.
OWN_BUSINESS = ("patches", "closes", "starts", "sets an alarm", "forks", "leaves", "switches",
                "replaces", "prints", "logs", "warns", "has weird", "allocates")  # fmt: skip
Try = Callable[[str, str, Fault, Place], Iterator[str]]


def check(seed: int, cases: int) -> Iterator[str]:
    """Try faults in a random order, each with a command that is drawn for it."""
    chance = random.Random(seed)
    every = faults()
    order = chance.sample(every, len(every))
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder))
        # The cache of the good plugins is warm in half of the cases.
        place.run("plugins", "", None)
        for case in range(cases):
            fault = order[case % len(order)]
            which = chance.choice(("plugins", "plan", "train", "plan"))
            may_select = which != "plugins" and not any(
                f"module {word}" in fault.name for word in OWN_BUSINESS
            )
            how: Try = selecting if may_select and chance.random() < 0.4 else without
            if chance.random() < 0.3:
                place.cache = Path(folder) / f"cache{case}"
            for wrong in how(which, "", fault, place):
                yield f"case {case}: coupler {which}, {fault.name}: {wrong}"


if __name__ == "__main__":
    run(check, 150)
