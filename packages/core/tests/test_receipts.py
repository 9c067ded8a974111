"""What several model workers loaded, as one receipt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from toy_run import ToyRun, small

from coupler.builtin.transports.inproc import InprocTransport
from coupler.engine_kit.inference.receipts import join
from coupler.errors import WeightSyncError
from coupler.interfaces import Model, Named, SyncReceipt, WeightUpdate
from coupler.testing.toy import ToyEngine, ToyRollout
from coupler.testing.toy_config import ToyEngineConfig


def answer(
    unused: tuple[str, ...] = (), missing: tuple[str, ...] = (), received: int = 5
) -> dict[str, Any]:
    return {
        "num_received": received,
        "num_bytes": 40,
        "unused": unused,
        "missing": missing,
        "seconds": {"load": 0.5},
    }


def test_one_worker() -> None:
    receipt = join(3, [answer(("x",), ("b", "a"))])
    assert (receipt.version, receipt.num_received, receipt.num_loaded, receipt.num_bytes) == (
        3,
        5,
        4,
        40,
    )
    assert (receipt.missing, receipt.unexpected, receipt.seconds) == (
        ("a", "b"),
        ("x",),
        {"load": 0.5},
    )


def test_a_name_is_unexpected_where_no_worker_has_it() -> None:
    """Stages of a pipeline have layers of their own."""
    receipt = join(0, [answer(("first", "nobody")), answer(("second", "nobody"))])
    assert (receipt.unexpected, receipt.num_loaded) == (("nobody",), 4)


def test_a_parameter_is_missing_wherever_it_is() -> None:
    assert join(0, [answer(), answer(missing=("w",))]).missing == ("w",)


def test_a_worker_that_received_less_shows() -> None:
    assert join(0, [answer(), answer(received=4)]).num_received == 4


class NoReceipt(ToyRollout):
    async def update(self, update: WeightUpdate) -> SyncReceipt:
        await super().update(update)
        return None  # type: ignore[return-value]


def test_a_rollout_without_a_receipt_is_named(tmp_path: Path) -> None:
    run = ToyRun(tmp_path, small(), rollout="test_receipts:NoReceipt")
    with pytest.raises(WeightSyncError, match="rollout replica 0 returned a NoneType"):
        run.run()


def test_a_transport_without_a_receipt_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = InprocTransport.send

    def silent(*given: Any) -> None:
        send(*given)

    monkeypatch.setattr(InprocTransport, "send", silent)
    with pytest.raises(WeightSyncError, match=r"the transport .* returned a NoneType"):
        ToyRun(tmp_path, small()).run()


class CoarseRollout(ToyRollout):
    """Says that its parameters have 8 bits."""

    async def update(self, update: WeightUpdate) -> SyncReceipt:
        return replace(await super().update(update), dtype="torch.float8_e4m3fn")


class CoarseConfig(ToyEngineConfig):
    """Says that products round to 8 bits."""

    @property
    def rounds_to(self) -> str:
        return "float8_e4m3fn"


class CoarseEngine(ToyEngine):
    def __init__(self, config: ToyEngineConfig, model: Model) -> None:
        super().__init__(CoarseConfig(**vars(config)), model)


TOY = "coupler.testing.toy:ToyEngine", "coupler.testing.toy:ToyRollout"


@pytest.mark.parametrize(
    ("engine", "rollout", "limit"),
    [
        (*TOY, 5e-3),
        (TOY[0], "test_receipts:CoarseRollout", 0.5),
        ("test_receipts:CoarseEngine", TOY[1], 0.5),
    ],
)
def test_the_probe_s_limit_is_that_of_the_least_precise_side(
    tmp_path: Path, engine: str, rollout: str, limit: float
) -> None:
    run = ToyRun(tmp_path, small(steps=1), engine=engine, rollout=rollout)
    run.run()
    assert run.weights.limit == limit


def test_a_worker_may_say_how_precise_its_parameters_are() -> None:
    torch = pytest.importorskip("torch")
    from coupler.engine_kit.inference.loading import least_precise

    assert join(0, [answer()]).dtype == ""
    assert join(0, [{**answer(), "dtype": "torch.bfloat16"}]).dtype == "torch.bfloat16"
    model = torch.nn.Linear(2, 2)
    assert least_precise(model) == "torch.float32"
    model.weight = torch.nn.Parameter(model.weight.to(torch.float8_e4m3fn), requires_grad=False)
    assert least_precise(model) == "torch.float8_e4m3fn"


def test_a_transport_that_fails_is_not_taken_for_a_tensor_that_does_not_fit() -> None:
    torch = pytest.importorskip("torch")
    from coupler.engine_kit.inference.loading import Ledger

    class Loads(torch.nn.Linear):
        def load_weights(self, weights: Iterable[Named]) -> None:
            for name, tensor in weights:
                self.get_parameter(name).data.copy_(tensor)

    def broken() -> Iterator[Named]:
        yield "weight", torch.ones(2, 2)
        raise RuntimeError("NCCL error: invalid argument")

    def of_another_shape() -> Iterator[Named]:
        yield "weight", torch.ones(3, 3)

    model = Loads(2, 2)
    with pytest.raises(WeightSyncError, match="did not arrive: RuntimeError: NCCL error"):
        Ledger(model, frozenset()).feed(model, broken())
    with pytest.raises(WeightSyncError, match="weight does not fit the rollout's model"):
        Ledger(model, frozenset()).feed(model, of_another_shape())
