"""Define the options of engines that train low-rank updates, once for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from coupler.engine_kit.adamw import AdamWConfig
from coupler.errors import ConfigError

ALL = "all-linear"
EXPERTS = "experts"


@dataclass
class LoRAConfig(AdamWConfig):
    """Options of LoRA (arXiv 2106.09685), which an engine's configuration extends."""

    lora_rank: int = 0
    """The rank of the low-rank updates of the layers' linear maps (LoRA). 0 trains the
    weights themselves.
    """
    lora_alpha: float = 16.0
    """The low-rank updates are scaled by lora_alpha / lora_rank."""
    target_modules: list[str] = field(default_factory=lambda: [ALL])
    """Name the linear maps that get an update, as in [q_proj,v_proj]. all-linear takes
    all of the layers but the experts of a mixture, which experts takes, as in
    [all-linear,experts].
    """
    lora_adapter_path: str = ""
    """Training starts from the adapter of this PEFT folder. Empty starts from the model
    as it is.
    """

    @property
    def adapter_rank(self) -> tuple[str, int]:
        return "lora_rank", self.lora_rank

    def __post_init__(self) -> None:
        self._require(self.lora_rank >= 0, "lora_rank", "must not be negative")
        self._require(self.lora_alpha > 0, "lora_alpha", "must be above 0")
        targets = list(self.target_modules)
        why = f"must name linear maps, or be [{ALL}]"
        self._require(bool(targets) and all(targets), "target_modules", why)
        for key, default in (("target_modules", [ALL]), ("lora_adapter_path", "")):
            in_vain = not self.lora_rank and getattr(self, key) != default
            self._require(not in_vain, key, "needs engine.lora_rank above 0")
        super().__post_init__()

    @property
    def adapts_experts(self) -> bool:
        """Tell if matrices of experts get an update."""
        return self.lora_rank > 0 and any(map(_is_experts, self.target_modules))

    def targets(self, weight: str) -> bool:
        """Tell if a weight of a layer's linear map gets an update, by its name in the
        checkpoint, or the experts of a layer by the name of their module.
        """
        module = weight.removesuffix(".weight")
        return any(_hits(target, module) for target in self.target_modules)

    def folder_problems(self, path: str) -> Iterator[str]:
        """Say if ``lora_adapter_path`` is no folder of PEFT.

        Args:
            path: the place of this configuration in that of the run.
        """
        folder = Path(self.lora_adapter_path)
        if self.lora_adapter_path and not (folder / "adapter_config.json").is_file():
            yield (
                f"{path}.lora_adapter_path={folder} has no adapter_config.json: set it to a "
                "folder that PEFT saved, or to the adapter folder of an export."
            )

    def check_targets(self, weights: Iterable[str]) -> None:
        """Refuse a target that no linear map is called.

        Args:
            weights: names of the weights of all linear maps of the layers, and of the
                modules of experts that can get an update.

        Raises:
            ConfigError: names the first such target, and the maps that there are.
        """
        modules = [weight.removesuffix(".weight") for weight in weights]

        for target in self.target_modules:
            if not any(_hits(target, module) for module in modules):
                there = sorted({module.rpartition(".")[2] for module in modules})
                raise ConfigError(
                    f"engine.target_modules names {target}, and no linear map of the model's "
                    f"layers is called so.\n  it has:  {', '.join(there) or 'none'}"
                )


def _is_experts(module: str) -> bool:
    return module.rpartition(".")[2] == EXPERTS


def _hits(target: str, module: str) -> bool:
    """Tell if a target is the name of a linear map, or the end of it."""
    if target == ALL:
        return not _is_experts(module)
    return f".{module}".endswith(f".{target}")
