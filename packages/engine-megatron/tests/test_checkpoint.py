"""Files of a checkpoint: each rank's share, as it was at the call; and files that are
not what was written.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest
import torch
from ranks import Arrays, on_ranks
from safetensors.torch import load_file, save_file

from coupler.engine_kit.process_group import join
from coupler.engine_kit.saved import INDEX, State, open_saved
from coupler.errors import CouplerError
from coupler.interfaces import Rank
from coupler_engine_megatron.checkpoint import Save

NAMES = ("params/a", "params/b", "exp_avg/a", "exp_avg/b", "exp_avg_sq/a")


def tensors() -> dict[str, torch.Tensor]:
    return {name: torch.arange(6.0).view(2, 3) + 10 * i for i, name in enumerate(NAMES)}


def parts(name: str) -> tuple[State, str]:
    state, _, weight = name.partition("/")
    return ("param" if state == "params" else cast(State, state)), weight


def write(rank: Rank, into: str) -> Arrays:
    """Save, and change every tensor before the files can be there."""
    join(rank, torch.device("cpu"))
    state = tensors()
    pending = Save(Path(into), state.items(), {"num_steps": 7})
    for tensor in state.values():
        tensor.zero_()
    pending.wait(30.0)
    return {}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks saved."""
    folder = tmp_path_factory.mktemp("checkpoint")
    on_ranks("test_checkpoint:write", 2, folder / "ranks", into=str(folder))
    return folder


@pytest.fixture
def copied(written: Path, tmp_path: Path) -> Path:
    for path in written.glob("*.*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def test_ranks_write_shares_of_what_was_there_at_the_call(written: Path) -> None:
    shards = [load_file(written / f"shard-0000{rank}-of-00002.safetensors") for rank in (0, 1)]
    assert [list(shard) for shard in shards] == [sorted(NAMES[rank::2]) for rank in (0, 1)]
    index = json.loads((written / INDEX).read_text())
    assert index.keys() == {"tensors", "num_steps"} and index["tensors"].keys() == set(NAMES)
    with open_saved(written) as saved:
        assert saved.num_steps == 7
        for name, tensor in tensors().items():
            assert torch.equal(saved.tensor(*parts(name)), tensor), name
            assert torch.equal(load_file(written / index["tensors"][name])[name], tensor), (
                "the index names its file"
            )


def test_a_tensor_that_is_not_there_is_named(written: Path) -> None:
    with (
        open_saved(written) as saved,
        pytest.raises(CouplerError, match="does not fit this engine: it has no params/c"),
    ):
        saved.tensor("param", "c")


def test_a_folder_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(CouplerError, match=f"{tmp_path} holds no checkpoint of an engine"):
        open_saved(tmp_path)


@pytest.mark.parametrize("how", ["missing", "truncated", "emptied", "another"])
@pytest.mark.parametrize("name", [INDEX, "shard-00001-of-00002.safetensors"])
def test_a_damaged_file_is_named(copied: Path, how: str, name: str) -> None:
    path = copied / name
    if how == "missing":
        path.unlink()
    elif how == "another" and name == INDEX:
        path.write_text("{}")
    elif how == "another":
        save_file({"params/z": torch.zeros(1)}, path)
    else:
        path.write_bytes(path.read_bytes()[:-1] if how == "truncated" else b"")
    # either may raise
    with pytest.raises(CouplerError, match=name), open_saved(copied) as saved:
        saved.tensor("param", "b")
