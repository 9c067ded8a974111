"""Fixtures of this folder: a tokenizer with a chat template that knows tools."""

from __future__ import annotations

import pytest
from playing import TEMPLATE

from coupler.conversation import Codec
from coupler.interfaces import Model
from coupler.testing.models import write_tokenizer


@pytest.fixture(scope="session")
def codec(tmp_path_factory: pytest.TempPathFactory) -> Codec:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    made = Codec(Model(str(folder)))
    made.tokenizer.chat_template = TEMPLATE
    return made
