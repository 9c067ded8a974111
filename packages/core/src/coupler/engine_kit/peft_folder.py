"""Read and write adapters as PEFT does: ``adapter_config.json`` and
``adapter_model.safetensors``.

``peft.PeftModel.from_pretrained(model, folder)`` loads what is written here, and a
folder that PEFT saved is read.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coupler.engine_kit.lora import LoRAConfig
from coupler.engine_kit.lora_names import PREFIX, A, names_of, start_of
from coupler.errors import CouplerError
from coupler.interfaces import Named
from coupler.system.files import DamagedFile, read_json, writing

if TYPE_CHECKING:
    from torch import Tensor

ADAPTER = "adapter"
"""The folder of an adapter within an export."""
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
# Options of PEFT with which an adapter is more than A and B of one rank, and the value
# that says that it is not.
PLAIN: dict[str, Any] = {
    "use_dora": False,
    "bias": "none",
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "fan_in_fan_out": False,
}


class PeftFolder:
    """An adapter that PEFT saved, or this module.

    Attributes:
        rank: rows of every A.
        scale: the factor of every ``B A``.
    """

    def __init__(self, folder: Path) -> None:
        """Read the configuration and the tensors.

        Raises:
            CouplerError: the folder holds no adapter, or one of another kind.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        self.folder = folder
        try:
            config = read_json(folder / CONFIG)
            self.rank = int(config["r"])
            root = self.rank**0.5 if config.get("use_rslora") else self.rank
            self.scale = float(config["lora_alpha"]) / root
            self.tensors: dict[str, Tensor] = load_file(folder / TENSORS)
        except (DamagedFile, OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            why = str(error).rstrip(".") if isinstance(error, DamagedFile) else repr(error)
            raise CouplerError(
                f"engine.lora_adapter_path={folder} holds no adapter of PEFT: {why}.\n"
                f"  it needs:  {CONFIG} and {TENSORS}"
            ) from None

        odd = (
            {"peft_type": config["peft_type"]} if config.get("peft_type", "LORA") != "LORA" else {}
        )
        odd |= {
            key: config[key] for key, plain in PLAIN.items() if (config.get(key) or plain) != plain
        }
        for key, value in odd.items():
            raise CouplerError(
                f"engine.lora_adapter_path={folder} is no plain LoRA: {key}={value}.\n"
                "  try:  an adapter with A and B of one rank alone"
            )

    def check(
        self,
        weights: Collection[str],
        rank: int,
    ) -> None:
        """Hold the adapter against the weights that are to be adapted.

        Raises:
            CouplerError: the rank differs, or it adapts other weights.
        """
        if self.rank != rank:
            raise CouplerError(
                f"engine.lora_rank={rank} and the adapter {self.folder} has rank {self.rank}.\n"
                f"  try:  engine.lora_rank={self.rank}"
            )

        wanted = {name for weight in weights for name in names_of(weight)}
        missing, unexpected = wanted - self.tensors.keys(), self.tensors.keys() - wanted
        if missing or unexpected:
            there = sorted({_module(name) for name in self.tensors})
            raise CouplerError(
                f"the adapter {self.folder} does not fit engine.target_modules.\n"
                f"  missing:     {min(missing, default='none')}\n"
                f"  unexpected:  {min(unexpected, default='none')}\n"
                f"  try:  engine.target_modules=[{','.join(there)}]"
            )

    def pair(
        self,
        weight: str,
        shape: tuple[int, ...],
    ) -> tuple[Tensor, Tensor]:
        """Return A [rank, in] and B [out, rank] of a weight [out, in], in fp32.

        Raises:
            CouplerError: they have another shape.
        """
        a, b = (self.tensors[name].float() for name in names_of(weight))

        if (tuple(a.shape), tuple(b.shape)) != ((self.rank, shape[1]), (shape[0], self.rank)):
            raise CouplerError(
                f"{weight} has shape {list(shape)}, and the adapter {self.folder} has A "
                f"{list(a.shape)} and B {list(b.shape)} for it.\n  try:  the model that it was "
                "trained on"
            )
        return a, b


class Start:
    """The adapter that training starts from: a PEFT folder, or the model as it is."""

    def __init__(
        self,
        config: LoRAConfig,
        weights: Collection[str],
        seed: int,
    ) -> None:
        """Read ``lora_adapter_path``, if it is set.

        Args:
            weights: names of all weights that are adapted.

        Raises:
            CouplerError: the folder does not fit.
        """
        self.rank, self.seed = config.lora_rank, seed % 2**62
        self.folder: PeftFolder | None = None

        if config.lora_adapter_path:
            self.folder = PeftFolder(Path(config.lora_adapter_path))
            self.folder.check(weights, self.rank)
            self.ratio = self.folder.scale / (config.lora_alpha / config.lora_rank)

    def pair(
        self,
        weight: str,
        shape: tuple[int, ...],
    ) -> tuple[Tensor, Tensor]:
        """Return A [rank, in] and B [out, rank] of a weight [out, in], in fp32."""
        import torch

        if self.folder is None:
            drawn = start_of(
                weight,
                self.rank,
                shape[1],
                self.seed,
            )
            return torch.from_numpy(drawn), torch.zeros(shape[0], self.rank)
        a, b = self.folder.pair(weight, shape)
        return a, b * self.ratio


def write_adapter(
    tensors: Iterable[Named],
    folder: Path,
    model: str,
    *,
    write: bool,
) -> None:
    """Write an adapter's A and B to ``folder``.

    Every rank iterates, since producing a tensor is collective, and the one with
    ``write`` writes.

    Args:
        tensors: as :meth:`coupler.interfaces.Engine.adapter_weights` yields them. B
            holds the scale already, so that the file's lora_alpha is its rank.
        model: the name or path of the model beneath.

    Raises:
        CouplerError: the files cannot be written.
    """
    if not write:
        for _ in tensors:
            pass
        return

    from safetensors import SafetensorError
    from safetensors.torch import save_file

    held = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors}
    rank = next(len(tensor) for name, tensor in held.items() if name.endswith(A))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "target_modules": sorted({_module(name) for name in held}),
        "inference_mode": True,
        **PLAIN,
    }

    with writing(f"the adapter {folder}", SafetensorError):
        folder.mkdir(parents=True, exist_ok=True)
        save_file(
            held,
            folder / TENSORS,
            metadata={"format": "pt"},
        )
        (folder / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")


def _module(name: str) -> str:
    """Return the last part of the name of the module that a tensor adapts."""
    return name.removeprefix(PREFIX).split(".lora_")[0].rpartition(".")[2]
