"""Every problem is made for real, found, and given one line that fixes it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fake_plugins import install, plugin
from safetensors.numpy import save_file

from coupler.doctor import run
from coupler.doctor.devices import GIB, gpus
from coupler.plugins.finding import Finding, Verdict, problem
from coupler.testing.models import write_toy

ISOLATED = ["unshare", "--user", "--map-root-user", "--mount", "--uts", "--net", "sh", "-c"]


def command(
    *arguments: str, folders: tuple[Path, ...] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run in a fresh interpreter's environment that has ``folders`` first on its
    path.
    """
    path = os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    return subprocess.run(
        arguments, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def doctor(
    *arguments: str, folders: tuple[Path, ...] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    return command(
        sys.executable, "-m", "coupler.cli", "doctor", *arguments, folders=folders, **variables
    )


def found(done: subprocess.CompletedProcess[str], name: str) -> list[tuple[str, str]]:
    """(text, fix) of the problems that ``name`` has; each is one line, and so is its
    fix.
    """
    assert "Traceback" not in done.stderr, done.stderr
    lines = done.stdout.splitlines()
    at = [i for i, line in enumerate(lines) if line.startswith(f"problem  {name:14} ")]
    assert all(lines[i + 1].split()[0] == "fix:" for i in at), done.stdout
    assert sum("fix:" in line[:20] for line in lines) == sum(
        line.startswith("problem") for line in lines
    )
    return [(lines[i][24:], lines[i + 1].partition("fix:")[2].strip()) for i in at]


def in_namespace(script: str) -> subprocess.CompletedProcess[str]:
    """Run a shell script that may change this machine: it has a network, a host name
    and mounts of its own.
    """
    if not shutil.which("unshare") or command(*ISOLATED, "mount -t tmpfs none /mnt").returncode:
        pytest.skip("this machine does not let us make namespaces")
    return command(
        *ISOLATED, script.replace("doctor", f"exec {sys.executable} -m coupler.cli doctor")
    )


def test_a_good_machine_has_exit_code_0_and_says_what_was_checked() -> None:
    done = doctor("--json")
    findings = json.loads(done.stdout)
    problems = [f for f in findings if f["verdict"] == "problem"]
    assert done.returncode == bool(problems), problems
    checked = {
        "python",
        "host name",
        "ports",
        "shared memory",
        "torch",
        "plugins",
        "requirements",
        "disk",
    }
    assert checked <= {f["name"] for f in findings}


def test_a_problem_and_nothing_else_has_a_fix() -> None:
    with pytest.raises(ValueError, match="has a fix"):
        problem("x", "is wrong", "")
    with pytest.raises(ValueError, match="one line"):
        problem("x", "is wrong", "do this\nand that")
    with pytest.raises(ValueError, match="has a fix"):
        Finding("x", Verdict.OK, "is right", "do this")


def test_bad_input_ends_with_2() -> None:
    done = doctor("stepss=1")
    assert (done.returncode, done.stdout) == (2, "")
    assert "unknown option stepss" in done.stderr


def test_no_loopback() -> None:
    done = in_namespace("doctor")
    [(text, fix)] = found(done, "ports")
    assert done.returncode == 1
    assert "127.0.0.1" in text
    assert "ip link set lo up" in fix


def test_every_port_is_taken() -> None:
    done = in_namespace(
        "ip link set lo up && echo '50000 50010' > /proc/sys/net/ipv4/ip_local_port_range && doctor"
    )
    [(text, fix)] = found(done, "ports")
    assert "in use" in text
    assert "ip_local_port_range" in fix


def test_a_host_name_without_an_address() -> None:
    done = in_namespace("hostname nobody.invalid && doctor")
    [(text, fix)] = found(done, "host name")
    assert "nobody.invalid" in text
    assert fix == "echo '127.0.0.1 nobody.invalid' >> /etc/hosts"


def test_little_shared_memory() -> None:
    [(text, fix)] = found(
        in_namespace("mount -t tmpfs -o size=64m none /dev/shm && doctor"), "shared memory"
    )
    assert "64" not in fix
    assert "--shm-size=8g" in fix
    assert "too little" in text


def test_a_full_disk(tmp_path: Path) -> None:
    [(text, fix)] = found(
        in_namespace(f"mount -t tmpfs -o size=4m none {tmp_path} && cd {tmp_path} && doctor"),
        "disk",
    )
    assert str(tmp_path) in text
    assert "run_dir" in fix


def test_a_run_dir_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    [(text, fix)] = found(doctor(f"run_dir={tmp_path}/file/run"), "disk")
    assert "is a file" in text
    assert fix == "another run_dir"


def test_packages_of_the_user_leak_in(tmp_path: Path) -> None:
    code = "import site; print(site.getusersitepackages())"
    site = Path(command(sys.executable, "-c", code, PYTHONUSERBASE=str(tmp_path)).stdout.strip())
    (site / "leaky-1.0.dist-info").mkdir(parents=True)
    [(text, fix)] = found(doctor(folders=(site,), PYTHONUSERBASE=str(tmp_path)), "user site")
    assert "leaky" in text
    assert fix == "export PYTHONNOUSERSITE=1"


def distribution(folder: Path, name: str, version: str) -> None:
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


TESTED = 'capabilities=frozenset({"weights:full"}), tested={"heavylib": ">=1,<2"}'


@pytest.mark.parametrize(("version", "code"), [("1.5", 0), ("2.1+cu130", 1), ("0.9", 1)])
def test_a_version_outside_the_tested_range(tmp_path: Path, version: str, code: int) -> None:
    source = plugin("engine", "acme").replace('capabilities=frozenset({"weights:full"})', TESTED)
    assert "heavylib" in source
    install(tmp_path, "coupler-engine-acme", source, version="0.4.2")
    distribution(tmp_path, "heavylib", version)
    (tmp_path / "heavylib.py").write_text("raise AssertionError('a check imports nothing')")
    done = doctor(folders=(tmp_path,))
    expected = [
        (
            (
                f"{version} is outside the range >=1,<2 that acme (coupler-engine-acme 0.4.2) was "
                "tested with"
            ),
            "pip install 'heavylib>=1,<2'  or  pip install --upgrade coupler-engine-acme",
        )
    ]
    assert found(done, "heavylib") == expected * code
    assert done.returncode >= code


def test_a_plugin_that_fails_to_load_lacks_a_requirement_or_has_a_twin(tmp_path: Path) -> None:
    install(tmp_path, "coupler-engine-broken", "import acme_kernels")
    install(tmp_path, "coupler-engine-one", plugin("engine", "acme"), entry="one")
    install(tmp_path, "coupler-engine-two", plugin("engine", "acme"), entry="two")
    with (tmp_path / "coupler_engine_one-0.1.0.dist-info/METADATA").open("a") as file:
        file.write(
            "Requires-Dist: numpy>=99\nRequires-Dist: no-such-thing\nRequires-Dist: other; "
            "extra == 'x'\n"
        )
    done = doctor(folders=(tmp_path,))
    assert done.returncode == 1
    fixes = dict(found(done, "plugin"))
    broken = (
        "broken (coupler-engine-broken 0.1.0) failed to load: ModuleNotFoundError: No "
        "module named 'acme_kernels'"
    )
    assert fixes[broken] == "pip install --upgrade coupler-engine-broken"
    assert any("COUPLER_DISABLE_PLUGINS=coupler-engine-two" in fix for fix in fixes.values())
    unmet = found(done, "coupler-engine-one")
    assert [fix for _, fix in unmet] == ["pip install 'numpy>=99'", "pip install 'no-such-thing'"]


def test_a_plugin_brings_checks_and_a_failing_one_is_shown(tmp_path: Path) -> None:
    checks = """
    from coupler.doctor import ok, problem

    @hookimpl
    def coupler_doctor(config):
        yield problem("acme", f"the licence is missing, config {config is not None}", "acme login")
        raise RuntimeError("no server")
    """
    install(
        tmp_path, "coupler-engine-acme", plugin("engine", "acme") + checks.replace("\n    ", "\n")
    )
    done = doctor(folders=(tmp_path,))
    assert found(done, "acme") == [("the licence is missing, config False", "acme login")]
    [(text, _)] = found(done, "plugin")
    assert "RuntimeError: no server" in text
    assert "config False" in doctor("steps=1", folders=(tmp_path,)).stdout, "it is not selected"
    assert "config True" in doctor("engine=acme", folders=(tmp_path,)).stdout


def test_a_torch_that_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        "raise OSError('libcudart.so.99: cannot open shared object file')"
    )
    distribution(tmp_path, "torch", "2.12.0+cu130")
    done = doctor(folders=(tmp_path,))
    [(text, fix)] = found(done, "torch")
    assert "OSError: libcudart.so.99" in text
    assert fix == "pip install --force-reinstall torch==2.12.0"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    folder = write_toy(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    for i, name in enumerate("ab"):
        save_file({name: np.ones(4, np.float32)}, folder / f"model-{i}.safetensors")
    index = {"weight_map": {"a": "model-0.safetensors", "b": "model-1.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def verdicts(folder: Path) -> dict[str, Finding]:
    return {finding.name: finding for finding in run.model_files(folder)}


def test_a_whole_model(sharded: Path, tmp_path: Path) -> None:
    assert verdicts(sharded)["weights"].text == "2 tensors in 2 files"
    assert verdicts(write_toy(tmp_path / "single"))["weights"].verdict is Verdict.OK


@pytest.mark.parametrize(
    ("name", "content", "check"),
    [
        ("model-1.safetensors", None, "weights"),
        ("model-1.safetensors", b"\x10", "weights"),
        ("model-1.safetensors", b"\xff" * 64, "weights"),
        ("model.safetensors.index.json", b"{", "weights"),
        ("model.safetensors.index.json", b"{}", "weights"),
        # and then there is no model.safetensors
        ("model.safetensors.index.json", None, "weights"),
        ("config.json", None, "model"),
        ("config.json", b"{}", "model"),
        ("config.json", b"[", "model"),
    ],
)
def test_a_damaged_model(sharded: Path, name: str, content: bytes | None, check: str) -> None:
    (sharded / name).unlink()
    if content is not None:
        (sharded / name).write_bytes(content)
    finding = verdicts(sharded)[check]
    assert finding.verdict is Verdict.PROBLEM
    assert "--local-dir" in finding.fix
    assert (name if content or "index" not in name else "model.safetensors") in finding.text


def test_a_shard_that_lacks_a_tensor(sharded: Path) -> None:
    shutil.copy(sharded / "model-0.safetensors", sharded / "model-1.safetensors")
    assert "model-1.safetensors lacks b" in verdicts(sharded)["weights"].text


def test_a_truncated_shard(sharded: Path) -> None:
    path = sharded / "model-0.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert "model-0.safetensors is missing or damaged" in verdicts(sharded)["weights"].text


def test_no_model_folder(tmp_path: Path) -> None:
    done = doctor(f"model.path={tmp_path}/none")
    assert done.returncode == 1
    assert [text for text, _ in found(done, "model")] == [
        f"model.path={tmp_path}/none is no folder"
    ]


def test_a_driver_older_than_torch(tmp_path: Path) -> None:
    """A library in place of the driver's, and a torch of CUDA 13."""
    if not shutil.which("gcc"):
        pytest.skip("no compiler")
    (tmp_path / "cuda.c").write_text("int cuDriverGetVersion(int *v) { *v = 12040; return 0; }")
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-o", str(library), str(tmp_path / "cuda.c")], check=True)
    for built, name, fix in (
        ("'13.0'", "driver", "update the NVIDIA driver"),
        ("None", "torch", "/cu124"),
    ):
        (tmp_path / "torch.py").write_text(
            f"__version__ = '2.13.0'\nclass version:\n    cuda = {built}\n"
        )
        if not list(tmp_path.glob("torch-*")):
            distribution(tmp_path, "torch", "2.13.0")
        done = doctor(folders=(tmp_path,), LD_LIBRARY_PATH=str(tmp_path))
        assert any(fix in given for _, given in found(done, name)), done.stdout
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)


def on_a_host(
    *free: float, available: bool = True, apart: Collection[tuple[int, int]] = ()
) -> dict[str, Finding]:
    """What is found, by name, where torch sees GPUs of 80 GiB, so much of each free,
    with no access between some.
    """
    cuda = SimpleNamespace(
        is_available=lambda: available,
        device_count=lambda: len(free),
        mem_get_info=lambda i: (int(free[i] * GIB), 80 * GIB),
        get_device_name=lambda i: "H100",
        nccl=SimpleNamespace(version=lambda: (2, 27, 3)),
        can_device_access_peer=lambda i, j: (i, j) not in apart,
    )
    return {finding.name: finding for finding in gpus(SimpleNamespace(cuda=cuda))}


def test_gpus_as_torch_sees_them() -> None:
    assert {name: f.text for name, f in on_a_host(79).items()} == {
        "GPU 0": "H100, 79.0 of 80.0 GiB free"
    }
    found = on_a_host(79, 12.5)
    assert [found[f"GPU {i}"].verdict for i in range(2)] == [Verdict.OK, Verdict.WARNING]
    assert found["GPU 1"].text == "H100, 12.5 of 80.0 GiB free: another process holds the rest"
    assert (found["NCCL"].text, found["peer-to-peer"].text) == ("2.27.3", "between all 2 GPUs")
    apart = on_a_host(79, 79, 79, apart={(0, 2), (2, 0)})["peer-to-peer"]
    assert apart.verdict is Verdict.WARNING and "between GPUs 0-2, 2-0: " in apart.text


@pytest.mark.parametrize(
    ("free", "fix"), [((), "unset CUDA_VISIBLE_DEVICES"), ((79,), "nvidia-smi")]
)
def test_a_driver_whose_gpus_torch_does_not_find(free: tuple[float, ...], fix: str) -> None:
    [finding] = on_a_host(*free, available=False).values()
    assert (
        finding.verdict is Verdict.PROBLEM
        and "torch finds no GPU" in finding.text
        and fix in finding.fix
    )
