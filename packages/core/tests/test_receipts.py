"""What several model workers loaded, as one receipt."""

from __future__ import annotations

from typing import Any

from coupler.engine_kit.inference.receipts import join


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
