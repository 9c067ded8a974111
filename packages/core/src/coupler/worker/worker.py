"""Host one engine rank in its process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from coupler.batch import Batch
from coupler.engine_kit.lora_names import random_like
from coupler.engine_kit.peft_folder import ADAPTER, write_adapter
from coupler.errors import WaitTimeout, WeightSyncError
from coupler.interfaces import (
    LORA,
    Endpoint,
    Engine,
    FileHashes,
    Head,
    Layout,
    Named,
    Output,
    Parts,
    Rank,
    SendReceipt,
    StepResult,
    WeightUpdate,
    open_transport,
)
from coupler.metrics import Metrics, merge, read
from coupler.system.files import writing
from coupler.system.imports import load_subclass
from coupler.system.process_memory import resident_bytes
from coupler.system.shapes import check_receipt
from coupler.worker.spec import MiniBatch, Trained, WorkerSpec, build_algorithm
from coupler.worker.torch.hf_export import export
from coupler.worker.train_infer import checked_loss


class Worker:
    """Hosts one Engine in one process, for the controller to call."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.role, self.profile = spec.role, spec.profile
        self.engine: Engine = load_subclass(spec.engine, Engine)(spec.engine_config, spec.model)
        self.algorithm = build_algorithm(spec)
        self.adapts = spec.engine_config.adapter_rank[1] > 0 and spec.model.head is Head.LM

    def setup(self, rank: Rank) -> Layout:
        """Load the engine as ``rank``."""
        self.rank = rank
        return self.engine.setup(rank)

    def forward(self, batch: Batch, want: tuple[Output, ...]) -> dict[str, np.ndarray]:
        """Return the wanted outputs of this rank's shard."""
        done = self.engine.forward(batch, want)
        return {output.name: done[output.name] for output in want}

    def train(self, mini_batches: list[MiniBatch]) -> Trained:
        """Take one optimizer step per mini-batch, in one call of the controller."""
        assert self.algorithm, f"role {self.role} is not trained"
        metrics: list[Metrics] = []
        steps: list[StepResult] = []

        for mini in mini_batches:
            loss = checked_loss(self.algorithm, mini.fresh_version, mini.num_replicas)
            with self.profile.of(self.role, self.rank.index, mini.info.index):
                metrics.append(
                    self.engine.forward_backward(mini.batch, self.algorithm.want, loss, mini.info)
                )
                steps.append(self.engine.step())

        return Trained(read(merge(metrics)), tuple(steps))

    def bind(self, transport: str) -> Endpoint:
        """Open ``transport`` here, and return the address of this rank."""
        return open_transport(transport).bind(self.rank)

    def push(self, update: WeightUpdate) -> SendReceipt:
        """Send the engine's weights. The receipt has their least precise dtype, or that
        which products of the engine round to.
        """
        dtypes: set[str] = set()
        count, whole = 0, False

        def stream() -> Iterator[Named]:
            nonlocal count, whole
            for name, tensor in self._sent(update):
                dtypes.add(str(tensor.dtype))
                count += 1
                yield name, tensor
            whole = True

        receipt = update.open().send(stream(), update, self.rank)
        check_receipt(receipt, SendReceipt, f"the transport {update.transport}")
        if not whole or (receipt.version, receipt.num_tensors) != (update.version, count):
            raise WeightSyncError(
                f"the transport {update.transport} took {count} tensors of version "
                f"{update.version}{'' if whole else ', not all there are'}, and reports "
                f"{receipt.num_tensors} of version {receipt.version}.\n"
                "  try:  another sync.transport"
            )
        half = sorted(d for d in dtypes if "16" in d or "8" in d)
        coarsest = self.engine.config.rounds_to or (half or sorted(dtypes) or [""])[0]
        return replace(receipt, dtype=coarsest)

    def _sent(self, update: WeightUpdate) -> Iterator[Named]:
        if update.adapter:
            sent = self.engine.adapter_weights()
        elif update.format == LORA:
            sent = self.engine.base_weights()
        else:
            sent = self.engine.weights()

        if not update.permuted:
            return sent
        if update.adapter:
            return ((name, random_like(name, tensor)) for name, tensor in sent)
        return ((name, reverse_elements(tensor)) for name, tensor in sent)

    def export(self, folder: Path, source: Path) -> int:
        """Write the weights to ``folder``, and return the number of tensors.

        An adapter goes to ``folder/adapter`` as well, apart from the weights beneath.
        """
        first = self.rank.index == 0
        count = export(self.engine.weights(), folder, source, self.engine.model.head, write=first)
        if self.adapts:
            tensors = self.engine.adapter_weights()
            write_adapter(tensors, folder / ADAPTER, str(source), write=first)
        return count

    def save(self, folder: Path, what: Parts) -> None:
        """Start a save. :meth:`saved` tells when it is done."""
        self.saved_as = f"the checkpoint {folder}"
        with writing(self.saved_as, SafetensorError):
            self.saving = self.engine.save(folder, what)

    def saved(self) -> FileHashes | None:
        """Return the hashes of the last save, or None while it is under way.

        Does not wait. Raises the error of a save that failed.
        """
        try:
            with writing(self.saved_as, SafetensorError):
                return self.saving.wait(0) or {}
        except WaitTimeout:
            return None

    def host_bytes(self) -> int:
        """Return the host memory of this process."""
        return resident_bytes()

    def load(self, folder: Path, what: Parts) -> None:
        """Read a folder of :meth:`save`."""
        self.engine.load(folder, what)

    def offload(self, what: Parts) -> None:
        """Move ``what`` from the device to the host."""
        self.engine.offload(what)

    def onload(self, what: Parts) -> None:
        """Undo :meth:`offload`."""
        self.engine.onload(what)

    def device_bytes(self) -> int:
        """Return the device memory that this process holds."""
        return self.engine.device_bytes()

    def close(self) -> None:
        """Close the engine, when the process or the run ends."""
        self.engine.close()


def reverse_elements(tensor: Any) -> Any:
    """Return a tensor of the same shape with its elements in reverse order.

    A model with such weights cannot be mistaken for the true one.
    """
    flat = tensor.reshape(-1)
    flat = flat[::-1] if isinstance(flat, np.ndarray) else flat.flip(0)
    return flat.reshape(tensor.shape)
