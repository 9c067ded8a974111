"""Read a YAML file that a person wrote, within bounds of time and memory."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError
from yaml.nodes import MappingNode, Node, ScalarNode

from coupler.system.files import DamagedFile, read_bytes

MAX_BYTES = 256 << 10
# Values of a file, where an alias counts as all that it stands for.
MAX_VALUES = 10_000
MAX_DEPTH = 40
# Digits of an integer. Python refuses to read more than 4,300.
MAX_DIGITS = 1000
INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)$")
NUMBER = re.compile(
    r"[-+]?(?:(?:[0-9][0-9_]*)\.[0-9_]*(?:[eE][-+]?[0-9]+)?|\.[0-9_]+(?:[eE][-+]?[0-9]+)?"
    r"|[0-9][0-9_]*[eE][-+]?[0-9]+|\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)


class _Loader(yaml.SafeLoader):
    """Builds plain data. Integers are decimal, dates are text, and no key comes
    twice.
    """

    depth = count = 0

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        self.depth += 1
        self.count += 1
        if self.depth > MAX_DEPTH or self.count > MAX_VALUES:
            raise ValueError(
                f"it is deeper than {MAX_DEPTH} levels, or has more than {MAX_VALUES} values"
            )
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        written = [key.value for key, _ in node.value if isinstance(key, ScalarNode)]
        twice = [key for key, count in Counter(written).items() if count > 1 and key != "<<"]
        if twice:
            raise ConstructorError(None, None, f"{twice[0]} is given twice", node.start_mark)
        return super().construct_mapping(node, deep=deep)

    def construct_yaml_int(self, node: ScalarNode) -> int:
        text = str(self.construct_scalar(node)).replace("_", "")
        if not INTEGER.match(text) or len(text) > MAX_DIGITS:
            raise ConstructorError(None, None, f"{text[:40]} is no integer", node.start_mark)
        return int(text)


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """Return what makes a plain scalar an integer or a number, instead of YAML 1.1."""
    numbers = ("tag:yaml.org,2002:" + name for name in ("timestamp", "int", "float"))
    own = frozenset(numbers)
    return {
        start: [(tag, pattern) for tag, pattern in rules if tag not in own]
        for start, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.yaml_implicit_resolvers = _resolvers()
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", INTEGER, list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", NUMBER, list("-+0123456789."))
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def read_yaml(path: Path) -> Any:
    """Return what a YAML file holds, or None where it is empty.

    Raises:
        DamagedFile: it cannot be read, is no YAML, or is larger than any configuration.
    """
    try:
        text = read_bytes(path, MAX_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise DamagedFile(f"{path} is not readable as YAML: it is no UTF-8 text.") from None
    return parse_yaml(text, path)


def parse_yaml(text: str, path: Path) -> Any:
    """Return what ``text`` of the file ``path`` holds, within the same bounds.

    Raises:
        DamagedFile: it is no YAML, or is larger than any configuration.
    """
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()

            if node is not None and _size(node, {}) > MAX_VALUES:
                raise ValueError(f"with its aliases it has more than {MAX_VALUES} values")
            return loader.construct_document(node) if node is not None else None
        finally:
            loader.dispose()
    except RecursionError:
        raise DamagedFile(f"{path} is not readable as YAML: it is too deep.") from None
    except Exception as error:
        # A tag that does not fit its value fails with nearly every type there is.
        why = " ".join(str(error).replace('in "<unicode string>", ', "at ").split())[:300]
        raise DamagedFile(f"{path} is not readable as YAML: {why}.") from None


def _size(node: Node, known: dict[int, int]) -> int:
    """Count the values that a node stands for, with those of its aliases.

    Raises:
        ValueError: a node stands within itself.
    """
    if (size := known.get(id(node))) is not None:
        if not size:
            raise ValueError("an alias stands for what it stands in")
        return size

    known[id(node)] = 0
    inner = node.value if isinstance(node.value, list) else ()
    parts = [part for entry in inner for part in (entry if isinstance(entry, tuple) else (entry,))]
    known[id(node)] = 1 + sum(_size(part, known) for part in parts)
    return known[id(node)]
