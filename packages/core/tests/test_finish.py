"""The finish of a completion that several stays in an engine sampled."""

from __future__ import annotations

import pytest

from coupler.engine_kit.inference.gated import Sampled
from coupler.interfaces import Request


@pytest.mark.parametrize(
    ("tokens", "finish"),
    [([5, 6], ""), ([5, 9], "stop"), ([5, 6, 7], "length"), ([5, 6, 9], "stop"), ([], "")],
)
def test_the_tokens_say_how_it_ended(tokens: list[int], finish: str) -> None:
    """Also where the engine said that it was cut off, behind the last token."""
    request = Request((1, 2), 8, stop=(9,))
    assert Sampled(tokens).ended(request, room=3) == finish
