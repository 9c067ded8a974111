"""Choose what turns messages into ids: the chat template, or an installed renderer."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from coupler.conversation.bridge import TemplateRenderer
from coupler.conversation.rendering import Renderer
from coupler.data.templates import Codec
from coupler.errors import ConfigError, CouplerError, PluginError

# Entry points by the names that environment.renderer takes. Each is called as
# name(codec, tools=, stop=, keep_reasoning=, family=), and returns a Renderer or raises
# a CouplerError that says why it cannot.
GROUP = "coupler.renderers"
AUTO, TEMPLATE = "auto", "template"
INSTALL = "pip install 'coupler-agents[renderers]', which knows some families of models"


def choose_renderer(
    codec: Codec,
    wanted: str = AUTO,
    *,
    tools: bool = False,
    stop: Iterable[str] = (),
    keep_reasoning: bool = True,
) -> Renderer:
    """Make the renderer that ``environment.renderer`` names.

    ``auto`` takes the chat template where it is proved, and else the first installed
    renderer that is proved for the model.

    Args:
        wanted: auto, template, or NAME or NAME:FAMILY of an installed renderer.
        tools, stop, keep_reasoning: see
            :class:`~coupler.conversation.TemplateRenderer`.

    Raises:
        ConfigError: none is proved, or there is no such renderer.
    """
    given: dict[str, Any] = {
        "tools": tools,
        "stop": tuple(stop),
        "keep_reasoning": keep_reasoning,
    }

    if wanted not in (AUTO, TEMPLATE):
        name, _, family = wanted.partition(":")
        return _made(
            _named(name),
            codec,
            given,
            family,
        )
    try:
        return TemplateRenderer(codec, **given)
    except ConfigError as error:
        if wanted == TEMPLATE or "cannot be continued exactly" not in str(error):
            raise
        return _instead(
            codec,
            given,
            error,
        )


def installed() -> dict[str, EntryPoint]:
    """Return the renderers that distributions bring, by name."""
    return {entry.name: entry for entry in sorted(entry_points(group=GROUP))}


def described(wanted: str) -> str:
    """Say in words which renderer a run takes, as far as it is known before the run."""
    if wanted == TEMPLATE:
        return "the chat template, if it is proved"
    if wanted != AUTO:
        return f"{wanted}, if it is proved for the model"
    others = ", ".join(installed())
    return "the chat template, if it is proved" + (f", else {others}" if others else "")


def _instead(codec: Codec, given: dict[str, Any], refusal: ConfigError) -> Renderer:
    """Make an installed renderer in the place of a template that is refused."""
    reasons = [] if installed() else [f"  or:  {INSTALL}"]
    for name, entry in installed().items():
        try:
            return _made(
                entry,
                codec,
                given,
            )
        except CouplerError as error:
            reasons.append(f"  {name}:  " + str(error).replace("\n", "\n  "))
    raise ConfigError("\n".join([str(refusal), *reasons])) from None


def _named(name: str) -> EntryPoint:
    found = installed()
    if name not in found:
        there = ", ".join([AUTO, TEMPLATE, *found])
        hint = "" if found else f"\n  or:  {INSTALL}"
        raise ConfigError(
            f"environment.renderer={name} is no renderer.\n  there are:  {there}{hint}"
        )
    return found[name]


def _made(entry: EntryPoint, codec: Codec, given: dict[str, Any], family: str = "") -> Renderer:
    try:
        make = entry.load()
    except Exception as error:  # a plugin's boundary
        raise PluginError(
            f"environment.renderer={entry.name} cannot be imported: {error}\n"
            f"  try:  installing the distribution of {entry.value} again"
        ) from error

    return make(
        codec,
        family=family,
        **given,
    )
