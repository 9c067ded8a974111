"""Weights as safetensors files in a folder that both sides see.

This is slow, and it works everywhere.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from coupler.builtin.transports.shape_check import check_fits
from coupler.builtin.transports.waiting import num_bytes, wait_until
from coupler.interfaces import Endpoint, Named, Rank, SendReceipt, Shapes, Transport, WeightUpdate
from coupler.system.files import read_json, writing

# written last: the tensors before it are complete
DONE = "names.json"


class DiskTransport(Transport):
    """Writes one file per tensor as it streams, and keeps only the last version."""

    def __init__(self) -> None:
        self.folders: list[tempfile.TemporaryDirectory[str]] = []

    def bind(self, rank: Rank) -> Endpoint:
        if rank.index:
            return Endpoint()
        self.folders.append(tempfile.TemporaryDirectory(prefix="coupler-weights-"))
        return Endpoint(self.folders[-1].name)

    def send(self, weights: Iterable[Named], update: WeightUpdate, rank: Rank) -> SendReceipt:
        start = time.perf_counter()
        folder = _folder(update)

        if rank.index == 0:
            for old in folder.parent.iterdir():
                shutil.rmtree(old)
            folder.mkdir()

        names: list[str] = []
        framework, size = "np", 0
        for name, tensor in weights:
            if rank.index == 0:
                with writing(f"{folder}, with weights for rollouts,", SafetensorError):
                    framework = _write(folder / f"{len(names)}.safetensors", name, tensor)
            names.append(name)
            size += num_bytes(tensor)

        if rank.index == 0:
            part = folder / f"{DONE}.part"
            part.write_text(json.dumps({"framework": framework, "names": names}))
            part.rename(folder / DONE)

        return SendReceipt(update.version, len(names), size, time.perf_counter() - start)

    def receive(self, update: WeightUpdate, worker: Rank, shapes: Shapes) -> Iterator[Named]:
        folder = _folder(update)
        done = folder / DONE
        wait_until(
            done.exists, f"weights of version {update.version} in {folder}", update.deadline_s
        )
        sent = read_json(done)
        for i, name in enumerate(sent["names"]):
            with safe_open(folder / f"{i}.safetensors", framework=sent["framework"]) as file:
                check_fits(name, file.get_slice(name).get_shape(), shapes)
                yield name, file.get_tensor(name)


def _folder(update: WeightUpdate) -> Path:
    return Path(update.endpoints[0].address) / "-".join(map(str, update.key))


def _write(path: Path, name: str, tensor: Any) -> str:
    """Write one tensor, and return the framework that reads it back with its dtype."""
    if isinstance(tensor, np.ndarray):
        save_file({name: np.array(tensor, order="C")}, path)
        return "np"
    from safetensors.torch import save_file as save_torch

    save_torch({name: tensor.detach().cpu().contiguous()}, path)
    return "pt"
