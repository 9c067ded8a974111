"""Count how the sources read: docstrings, option comments, blank lines, tokens a line.

``python benchmarks/voice.py`` prints one row per package. ``--write`` stores the values
in ``benchmarks/voice.json``, where ``tests/test_voice.py`` reads them: a value may only
fall. ``--root FOLDER`` counts another checkout, for example one unpacked from ``git
archive``.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import token
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
KEPT = Path(__file__).with_suffix(".json")
OPENERS = {"What", "Whether", "Where", "Of", "Those", "As", "See"}
LEANING = (
    " above added among and as at before below but by each else from in into its more of on "
    "or over so such than "
    "that the their them then these this those to under upon what when where which while "
    "whose with without "
)
WIDTH = 88
LONG_FUNCTION = 12
LAYOUT = {
    token.NEWLINE,
    token.INDENT,
    token.DEDENT,
    token.ENDMARKER,
    tokenize.NL,
    tokenize.COMMENT,
    tokenize.ENCODING,
}
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

COUNTERS = {
    "noun clauses": "% of docstrings that open with What, Whether, Where, Of, Those, As or See",
    "semicolons": "semicolons in 1,000 words of docstrings",
    "leaning options": "option comments that begin with a word like of, as, and, its, the",
    "lower-case options": "option comments that begin with a lower-case letter",
    "long doc lines": f"% of docstring lines above {WIDTH} columns",
    "solid functions": f"% of functions of {LONG_FUNCTION} lines or more without a blank line",
    "tokens a line": "tokens of code on a line of code",
}


def measure(root: Path = ROOT) -> dict[str, dict[str, float]]:
    """Return every counter of every package under ``root``."""
    return {
        package.name: count(sorted((package / "src").rglob("*.py"))) for package in packages(root)
    }


def packages(root: Path) -> list[Path]:
    """Return the folders of the packages, without those that hold no source."""
    return [folder for folder in sorted((root / "packages").iterdir()) if (folder / "src").is_dir()]


def count(files: list[Path]) -> dict[str, float]:
    """Return the counters of some files, rounded to two digits."""
    total: Counter[str] = Counter()
    for file in files:
        total += count_source(file.read_text(encoding="utf-8"))

    def share(part: str, whole: str, scale: float = 100.0) -> float:
        return round(scale * total[part] / total[whole], 2) if total[whole] else 0.0

    return {
        "noun clauses": share("openers", "docstrings"),
        "semicolons": share("semicolons", "words", 1000.0),
        "leaning options": float(total["leaning"]),
        "lower-case options": float(total["lower"]),
        "long doc lines": share("long lines", "doc lines"),
        "solid functions": share("solid", "functions"),
        "tokens a line": share("tokens", "code lines", 1.0),
    }


def count_source(source: str) -> Counter[str]:
    """Count one file; every key is a plain number that adds up over files."""
    tree, lines = ast.parse(source), source.splitlines()
    comments = {
        t.start[0]: t.string.lstrip("#").strip()
        for t in tokens(source)
        if t.type == tokenize.COMMENT
    }
    total: Counter[str] = Counter()

    doc_lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, Documented) and (expression := docstring(node)) is not None:
            numbers = range(expression.lineno, (expression.end_lineno or expression.lineno) + 1)
            doc_lines |= set(numbers)
            text = ast.literal_eval(expression)
            total["docstrings"] += 1
            total["openers"] += text.split(maxsplit=1)[0].rstrip(",:;.") in OPENERS
            total["semicolons"] += text.count(";")
            total["words"] += len(text.split())
            total["doc lines"] += len(numbers)
            total["long lines"] += sum(len(lines[number - 1]) > WIDTH for number in numbers)

    for text in option_comments(tree, comments):
        total["options"] += 1
        total["lower"] += text[:1].islower()
        total["leaning"] += (
            text[:1].islower() and f" {text.split(maxsplit=1)[0].rstrip(',:;.')} " in LEANING
        )

    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (body := code_of(node)):
            total["functions"] += len(body) >= LONG_FUNCTION
            total["solid"] += len(body) >= LONG_FUNCTION and all(
                lines[number - 1].strip() for number in body
            )

    code = [t for t in tokens(source) if t.type not in LAYOUT and t.start[0] not in doc_lines]
    total["tokens"] += len(code)
    total["code lines"] += len({t.start[0] for t in code})
    return total


def docstring(node: Documented) -> ast.Constant | None:
    """Return the docstring of a module, class or function, if it has a text."""
    first = node.body[0] if node.body else None
    if not isinstance(first, ast.Expr) or not isinstance(first.value, ast.Constant):
        return None
    text = first.value.value
    return first.value if isinstance(text, str) and text.strip() else None


def code_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> range:
    """Return the line numbers of a function without its docstring: the ``def`` and its
    body.
    """
    end = (node.end_lineno or node.lineno) + 1
    expression = docstring(node)
    if expression is None:
        return range(node.lineno, end)
    return range(min((expression.end_lineno or 0) + 1, end), end)


def option_comments(tree: ast.Module, comments: dict[int, str]) -> Iterator[str]:
    """Yield what is written at each field of a configuration: on its line, or under
    it.
    """
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef) or not node.name.endswith("Config"):
            continue
        for field, under in zip(node.body, [*node.body[1:], None], strict=True):
            if not isinstance(field, ast.AnnAssign):
                continue
            if isinstance(under, ast.Expr) and isinstance(under.value, ast.Constant):
                yield str(under.value.value).strip()
            elif text := comments.get(field.end_lineno or field.lineno):
                yield text


def tokens(source: str) -> list[tokenize.TokenInfo]:
    return list(tokenize.generate_tokens(io.StringIO(source).readline))


def table(measured: dict[str, dict[str, float]]) -> str:
    """Render the counters as a table in Markdown, a row per package."""
    lines = [f"| package | {' | '.join(COUNTERS)} |", "|---" * (len(COUNTERS) + 1) + "|"]
    for package, values in measured.items():
        lines.append(f"| {package} | {' | '.join(f'{values[name]:g}' for name in COUNTERS)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to count")
    parser.add_argument("--write", action="store_true", help=f"store the values in {KEPT.name}")
    arguments = parser.parse_args()
    measured = measure(arguments.root)
    print(table(measured))
    if arguments.write:
        KEPT.write_text(json.dumps(measured, indent=2) + "\n")


if __name__ == "__main__":
    main()
