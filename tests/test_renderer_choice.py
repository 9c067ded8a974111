"""What turns messages into ids: the chat template, or a renderer that a distribution
brings.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_conversations import KEEPS, PLAIN, folder

from coupler.conversation import Codec, TemplateRenderer
from coupler.conversation.choice import choose_renderer, described
from coupler.errors import ConfigError, PluginError
from coupler.interfaces import Model

# brings a renderer for folders whose name has the family in it
MODULE = """
from coupler.conversation import TemplateRenderer
from coupler.errors import CouplerError

class Acme(TemplateRenderer):
    def __init__(self, codec, *, tools, stop, keep_reasoning, family):
        if tools and family not in ("", "known"):
            raise CouplerError(f"there is no family {family}.\\n  there is:  known")
        if not family and "known" not in codec.folder.name:
            raise CouplerError(f"it does not know {codec.folder.name}.")
        super().__init__(codec, stop=stop, keep_reasoning=keep_reasoning)

    def __str__(self):
        return "acme"
"""


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A distribution that is installed for one test."""
    info = tmp_path / "site" / "acme-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[coupler.renderers]\nacme = coupler_acme_renderer:Acme\n"
        "aaa = coupler_no_such_module:Acme\n"
    )
    (info.parent / "coupler_acme_renderer.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(info.parent))
    return info


def codec_of(path: Path, template: str = PLAIN) -> Codec:
    return Codec(Model(str(folder(path, template))))


def test_auto_takes_the_template_where_it_is_proved(acme: Path, tmp_path: Path) -> None:
    found = choose_renderer(codec_of(tmp_path / "known", KEEPS), tools=True)
    assert type(found) is TemplateRenderer
    assert str(found) == f"the chat template of {tmp_path / 'known'}"


def test_auto_takes_another_where_the_template_is_refused(acme: Path, tmp_path: Path) -> None:
    codec = codec_of(tmp_path / "known")
    assert str(choose_renderer(codec, tools=True)) == "acme"
    with pytest.raises(ConfigError, match=r"case: a tool call.*does not show the tools"):
        choose_renderer(codec, "template", tools=True)


def test_a_refusal_says_why_no_other_is_taken(acme: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        choose_renderer(codec_of(tmp_path / "mine"), tools=True)
    lines = str(error.value).splitlines()
    assert "cannot be continued exactly (case: a tool call)" in lines[0]
    assert "  acme:  it does not know mine." in lines
    assert any(line.startswith("  aaa:  ") and "cannot be imported" in line for line in lines)


def test_one_is_taken_by_its_name(acme: Path, tmp_path: Path) -> None:
    codec = codec_of(tmp_path / "mine", KEEPS)
    assert str(choose_renderer(codec, "acme:known", tools=True)) == "acme"
    with pytest.raises(Exception, match=r"there is no family new\.\n  there is:  known"):
        choose_renderer(codec, "acme:new", tools=True)
    with pytest.raises(PluginError, match=r"environment.renderer=aaa cannot be imported"):
        choose_renderer(codec, "aaa")
    with pytest.raises(ConfigError, match=r"renderer=acne is no renderer.\n  there are:  auto, t"):
        choose_renderer(codec, "acne")


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ("template", "the chat template, if it is proved"),
        ("acme:known", "acme:known, if it is proved for the model"),
    ],
)
def test_the_plan_says_which(wanted: str, says: str) -> None:
    assert described(wanted) == says


def test_the_plan_names_what_is_installed(acme: Path) -> None:
    said = described("auto")
    assert said.startswith("the chat template, if it is proved, else ") and "acme" in said


def test_without_any_the_refusal_names_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    none: dict[str, Any] = {}
    monkeypatch.setattr("coupler.conversation.choice.installed", lambda: none)
    codec = codec_of(tmp_path / "mine")
    for wanted, says in (("auto", "cannot be continued"), ("acme", "is no renderer")):
        with pytest.raises(ConfigError, match=says) as error:
            choose_renderer(codec, wanted, tools=True)
        assert "  or:  pip install 'coupler-agents[renderers]'" in str(error.value)
    assert described("auto") == "the chat template, if it is proved"
