"""Describe tools to a policy: from the signature and docstring of a function."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from coupler import CouplerError

HIDDEN = inspect.Parameter.KEYWORD_ONLY


def schema_of(function: Callable[..., Any], where: str) -> dict[str, Any]:
    """Return the JSON schema of a function, as OpenAI's ``tools`` have it.

    Parameters that can only be given by keyword come from a row's ``tools_kwargs``. The
    policy is not shown them.

    Args:
        where: the target that the function comes from, for messages.

    Raises:
        CouplerError: a parameter has no type, or the docstring does not describe it.
    """
    from transformers.utils import get_json_schema

    try:
        return get_json_schema(_shown(function))
    except Exception as error:  # the library has no class for all of them
        raise CouplerError(
            f"{where}: the tool {function.__name__} cannot be described: {error}\n"
            "  it needs:  a docstring with a line for each argument under 'Args:', and types"
        ) from None


def _shown(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that has the shown parameters alone. It is only looked at."""
    signature = inspect.signature(function)
    hidden = {n for n, p in signature.parameters.items() if p.kind is HIDDEN or n == "self"}

    @wraps(function)
    def shown() -> None:
        raise AssertionError("only looked at")

    kept = [p for name, p in signature.parameters.items() if name not in hidden]
    hints = inspect.get_annotations(inspect.unwrap(function), eval_str=True)
    shown.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    shown.__annotations__ = {name: hint for name, hint in hints.items() if name not in hidden}
    del shown.__wrapped__
    return shown


def hidden_of(function: Callable[..., Any]) -> set[str]:
    """Return the names of the parameters that the policy is not shown."""
    found = inspect.signature(function).parameters.items()
    return {name for name, parameter in found if parameter.kind is HIDDEN}
