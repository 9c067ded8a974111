"""``sync.transport=shm``: one file in shared memory per update, read by every worker of
the host.
"""

import json
import os
import tempfile
import time
from pathlib import Path

import numpy as np

from coupler import Endpoint, SendReceipt, Transport
from coupler.errors import WaitTimeout, WeightSyncError

MEMORY = "/dev/shm"  # noqa: S108 - a folder with a random name is made in it


class ShmTransport(Transport):
    def bind(self, rank):
        if rank.index:
            return Endpoint()
        memory = MEMORY if os.path.isdir(MEMORY) else None
        self.folder = tempfile.TemporaryDirectory(prefix="coupler-", dir=memory)
        return Endpoint(self.folder.name)

    def send(self, weights, update, rank):
        start, header, size, path = time.perf_counter(), [], 0, path_of(update)
        if rank.index == 0:
            for old in path.parent.iterdir():
                old.unlink()  # a worker that still reads it has it open
        with open(path if rank.index == 0 else os.devnull, "wb") as file:
            for name, tensor in weights:
                library = "numpy" if isinstance(tensor, np.ndarray) else "torch"
                dtype = str(tensor.dtype).removeprefix("torch.")
                header.append([name, library, dtype, list(tensor.shape), tensor.nbytes])
                file.write(bytes_of(tensor))
                size += tensor.nbytes
        if rank.index == 0:
            part = path.with_suffix(".part")
            part.write_text(json.dumps(header))
            # it appears when the tensors are complete
            part.rename(path.with_suffix(".json"))
        return SendReceipt(update.version, len(header), size, time.perf_counter() - start)

    def receive(self, update, worker, shapes):
        path, end = path_of(update), time.monotonic() + update.deadline_s
        header, late = path.with_suffix(".json"), f"no weights of version {update.version} came."
        while not header.exists():
            if time.monotonic() > end:
                raise WaitTimeout(f"{late}\n  look at:  the engine's log")
            time.sleep(0.002)
        with path.open("rb") as file:
            for name, library, dtype, shape, size in json.loads(header.read_text()):
                if tuple(wanted := shapes.get(name, shape)) != tuple(shape):
                    said = f"{name} comes with shape {shape}, the model has {list(wanted)}."
                    raise WeightSyncError(said)
                yield name, tensor_of(np.fromfile(file, np.uint8, size), library, dtype, shape)


def path_of(update):
    return Path(update.endpoints[0].address) / "-".join(map(str, update.key))


def bytes_of(tensor):
    if isinstance(tensor, np.ndarray):
        return tensor.tobytes()
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def tensor_of(data, library, dtype, shape):
    if library == "numpy":
        return data.view(dtype).reshape(shape)
    import torch

    tensor = torch.empty(shape, dtype=getattr(torch, dtype))
    tensor.reshape(-1).view(torch.uint8).numpy()[:] = data
    return tensor
