"""What no file of ours may do: unpickle, evaluate text, trust a model's code, open a
port to the network.
"""

from __future__ import annotations

import ast
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from coupler.builtin.transports.disk import DiskTransport
from coupler.interfaces import Rank
from coupler.rewards import Limits
from coupler.rewards.process import Mode, WorkerProcess
from coupler.system import supervisor

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    path
    for pattern in (
        "packages/*/src/**/*.py",
        "examples/**/*.py",
        "benchmarks/**/*.py",
        "docs/**/*.py",
        "recipes/**/*.py",
    )
    for path in ROOT.glob(pattern)
)
# (file, what is found there) -> why it is no danger
PROGRAM = "packages/agents/src/coupler_agents/inside/program.py"
IN_THE_SANDBOX = "it runs what the model wrote, in the sandbox alone, and nothing else does"
ALLOWED: dict[tuple[str, str], str] = {
    (PROGRAM, "compile()"): IN_THE_SANDBOX,
    (PROGRAM, "exec()"): IN_THE_SANDBOX,
    (PROGRAM, "eval()"): IN_THE_SANDBOX,
}
PICKLES = {
    "pickle",
    "_pickle",
    "cPickle",
    "marshal",
    "dill",
    "cloudpickle",
    "shelve",
    "joblib",
    "jsonpickle",
}
EVALUATES = {"eval", "exec", "compile", "__import__"}
EVERYWHERE = {"", "0.0.0.0", "::", "*"}
OBJECTS = {"send_pyobj", "recv_pyobj", "read_pickle", "to_pickle", "all_gather_object",
           "gather_object",
           "broadcast_object_list", "scatter_object_list", "send_object_list",
           "recv_object_list"}  # fmt: skip
LOADS = re.compile(r"Auto\w+\.from_(pretrained|config)")
DCP = "torch.distributed.checkpoint"


def dangers(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, what) for everything that is refused."""
    for node in ast.walk(ast.parse(source)):
        for what in (*_imported(node), *_called(node), *_trusted(node)):
            yield node.lineno, what


def _imported(node: ast.AST) -> Iterator[str]:
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module:
        names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    for name in names:
        if name.split(".")[0] in PICKLES:
            yield f"import {name}"
        if name == DCP:
            yield f"import {name}: its index is a pickle"


def _called(node: ast.AST) -> Iterator[str]:
    if not isinstance(node, ast.Call):
        return
    name = ast.unparse(node.func)
    last = name.rpartition(".")[2]
    given = {k.arg: k.value for k in node.keywords}
    if name.removeprefix("builtins.") in EVALUATES:
        yield f"{name}()"
    if name in ("torch.load", "th.load") and not _is(given.get("weights_only"), True):
        yield "torch.load without weights_only=True"
    if name in ("yaml.load", "yaml.load_all") and "Safe" not in ast.unparse(node):
        yield f"{name} without SafeLoader"
    if name in ("yaml.unsafe_load", "yaml.full_load"):
        yield name
    if name in ("np.load", "numpy.load") and not _is(given.get("allow_pickle"), False):
        yield "np.load without allow_pickle=False"
    if name in ("np.save", "numpy.save") and not _is(given.get("allow_pickle"), False):
        yield "np.save without allow_pickle=False"
    if last in OBJECTS:
        yield name
    if name in ("os.system", "os.popen") or not _is(given.get("shell", ast.Constant(False)), False):
        yield f"{name} through a shell"
    if last in ("bind", "create_server", "start_server") and _address(node) in EVERYWHERE:
        yield f"{name} on every interface"
    if last == "TCPStore" and _is(given.get("is_master"), True) and "master_listen_fd" not in given:
        yield f"{name} without master_listen_fd opens its port on every interface"
    for key in ("host", "hostname", "bind", "address", "dashboard_host", "node_ip_address"):
        value = given.get(key)
        if isinstance(value, ast.Constant) and value.value in EVERYWHERE - {""}:
            yield f"{name}({key}={value.value!r})"


def _trusted(node: ast.AST) -> Iterator[str]:
    """``trust_remote_code`` may be passed on, or be False; nothing in the code says
    True.
    """
    if isinstance(node, ast.keyword) and node.arg in (
        "trust_remote_code",
        "weights_only",
        "allow_pickle",
    ):
        safe = node.arg == "weights_only"
        if isinstance(node.value, ast.Constant) and node.value.value is not safe:
            yield f"{node.arg}={node.value.value}"
    if isinstance(node, ast.AnnAssign | ast.Assign) and node.value:
        targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
        if any(ast.unparse(t).endswith("trust_remote_code") for t in targets) and _is(
            node.value, True
        ):
            yield "trust_remote_code = True"
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if _is(key, "trust_remote_code") and _is(value, True):
                yield "'trust_remote_code': True"
    loads = isinstance(node, ast.Call) and LOADS.fullmatch(ast.unparse(node.func))
    if loads and not any(
        k.arg == "trust_remote_code" for k in node.keywords
    ):  # transformers would ask on the terminal
        yield f"{ast.unparse(node.func)} does not say trust_remote_code"


def _is(node: ast.AST | None, value: object) -> bool:
    return (
        isinstance(node, ast.Constant) and type(node.value) is type(value) and node.value == value
    )


def _address(call: ast.Call) -> object:
    """The constant host in ``bind((host, port))`` or ``start_server(handler, host,
    port)``, else None.
    """
    values = [
        element for a in call.args for element in (a.elts[:1] if isinstance(a, ast.Tuple) else [a])
    ]
    hosts = [v.value for v in values if isinstance(v, ast.Constant) and isinstance(v.value, str)]
    return hosts[0] if hosts else None


def test_no_source_does_what_is_refused() -> None:
    assert len(SOURCES) > 100
    found = {
        (str(path.relative_to(ROOT)), what): line
        for path in SOURCES
        for line, what in dangers(path.read_text("utf-8"))
    }
    new = [f"{file}:{found[file, what]}: {what}" for file, what in found.keys() - ALLOWED.keys()]
    assert not new, "\n".join(sorted(new))
    assert not ALLOWED.keys() - found.keys(), "an entry of ALLOWED outlives what it allowed"


def test_json_of_a_file_is_read_by_one_function() -> None:
    """For ``read_json`` a pipe and lists in lists without an end are damage, too."""
    own = re.compile(r"json\.loads?\([^\n]*read_text\(")
    files = [path for path in SOURCES if ROOT / "packages" in path.parents]
    assert [str(path) for path in files if own.search(path.read_text("utf-8"))] == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from cloudpickle import dumps",
        "import torch.distributed.checkpoint",
        "import torch.distributed.checkpoint as dcp",
        "from torch.distributed import checkpoint as dcp",
        "from torch.distributed.checkpoint import FileSystemReader",
        "def f():\n    import marshal",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=flag)",
        "something.load_state(weights_only=False)",
        "eval(text)",
        "exec(text)",
        "compile(text, '', 'exec')",
        "yaml.load(text)",
        "yaml.load(text, Loader=yaml.Loader)",
        "np.load(path)",
        "np.load(path, allow_pickle=True)",
        "np.savez(path, allow_pickle=True)",
        "subprocess.run(text, shell=True)",
        "subprocess.run(text, shell=flag)",
        "os.system(text)",
        "dist.all_gather_object(out, thing)",
        "dist.TCPStore(host, 0, is_master=True)",
        "pandas.read_pickle(path)",
        "AutoConfig.from_pretrained(path)",
        "AutoConfig.from_pretrained(path, trust_remote_code=True)",
        "trust_remote_code: bool = True",
        "options = {'trust_remote_code': True}",
        "server.bind(('', 80))",
        "server.bind(('0.0.0.0', 80))",
        "asyncio.start_server(handle, '0.0.0.0', 80)",
        "serve(host='0.0.0.0')",
        "ray.init(dashboard_host='0.0.0.0')",
    ],
)
def test_each_danger_is_seen(source: str) -> None:
    assert list(dangers(source))


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(path, weights_only=True)",
        "re.compile(text)",
        "policy.eval()",
        "yaml.load(text, Loader=yaml.SafeLoader)",
        "np.load(path, allow_pickle=False)",
        "AutoConfig.from_pretrained(path, trust_remote_code=model.trust_remote_code)",
        "trust_remote_code: bool = False",
        "server.bind(('127.0.0.1', 0))",
        "subprocess.run([sys.executable])",
        "import torch.distributed as dist",
    ],
)
def test_what_is_no_danger_passes(source: str) -> None:
    assert not list(dangers(source))


def _open_files(pid: int) -> set[str]:
    """Return what the descriptors of a process lead to, without numbers of pipes."""
    names = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        # One may be closed meanwhile.
        with suppress(FileNotFoundError):
            names.add(os.readlink(path).partition(":")[0])
    return names


def test_a_reward_process_has_pipes_and_no_file_or_port(tmp_path: Path) -> None:
    """Its protocol is on anonymous pipes, which nobody else can open; the reward itself
    sees neither of them.
    """
    (tmp_path / "reward.py").write_text(
        "import os, sys\n"
        "def score(completion):\n"
        "    return len(os.read(0, 9)) + (os.fstat(1).st_ino != os.fstat(2).st_ino)\n"
    )
    worker = WorkerProcess(f"{tmp_path}/reward.py:score", Limits(), Mode.OFF)
    try:
        worker.wait_ready("reward")
        (process,) = supervisor.below(worker.process.pid, supervisor.processes())
        assert _open_files(process) <= {"pipe", "/dev/null"}
        # The supervisor has a socket without a name, and reads the table of processes.
        left = _open_files(worker.process.pid) - {"pipe", "/dev/null", "socket"}
        assert all(name.startswith("/proc") for name in left)
        assert all(stat.S_ISFIFO(os.fstat(fd).st_mode) for fd in (worker.stdin, worker.stdout))
        worker.send(b'[[["x"], "", {}]]\n', 10)
        ((number, *_),) = json.loads(worker.receive(10)[0])[0]
        assert number == 0
    finally:
        worker.kill()


def test_weights_on_disk_are_the_users_alone() -> None:
    transport = DiskTransport()
    folder = Path(transport.bind(Rank()).address)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
