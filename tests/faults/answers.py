"""Answers that a verifier might execute, choke on, or never finish.

Each case wraps one payload as one task of reasoning-gym expects its answers, and has it
scored in a worker process, as in a run. A case comes through if the text was executed,
if something was tried that only text can have asked for, or if the call took longer
than its limit.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.faults import run

from coupler.data.reasoning_gym import library, rows
from coupler.errors import DataError
from coupler.rewards import Invalid, check_reward
from coupler.rewards.reasoning_gym import Score
from coupler.rewards.verifiers import EVALUATORS

LIMIT_S = 60.0
WATCHED = ("os.system", "subprocess.Popen", "socket.connect", "os.exec", "os.posix_spawn")
seen: list[str] = []


class Watched(Score):
    """Score, and report by an error what the interpreter was asked for meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        sys.addaudithook(lambda event, _: seen.append(event) if event in WATCHED else None)

    def __call__(self, completion: str, row: Any) -> Any:
        seen.clear()
        graded = super().__call__(completion, row)
        if seen:
            raise AssertionError(f"executed: {seen}")
        return graded


def payload(stream: random.Random, canary: Path) -> str:
    """Make one hostile text. Those that execute something leave ``canary`` behind."""
    touch = f"__import__('os').system('touch {canary}')"
    opened = f"open({str(canary)!r}, 'w')"
    size = stream.choice([10, 300, 5_000, 200_000])
    return stream.choice(
        [
            touch,
            opened,
            f"(lambda: {opened})()",
            f"[{touch} for _ in '1']",
            f"[y := {opened}]",
            f'f"{{{opened}}}"',
            f"exec({touch!r})",
            f"eval({opened!r})",
            f"import os\nos.system('touch {canary}')",
            f"().__class__.__base__.__subclasses__()[0].__init__.__globals__ or {opened}",
            f"Symbol('x').__class__.__init__.__globals__['__builtins__']['open']({str(canary)!r},'w')",
            f"sympify({touch!r})",
            f"S({touch!r})",
            f"lambdify([], {touch!r})()",
            f"x.func.__globals__[{touch}]",
            f"max(key=lambda _: {opened}, *[1, 2])",
            f"{{**{{'a': {opened}}}}}",
            f"1 if {opened} else 2",
            f"Function({touch!r})",
            f"!!python/object/apply:os.system ['touch {canary}']",
            "9**9**9",
            "9**9**9**9",
            "factorial(99999999)",
            "10**-10**10",
            "2**(10**5)*" * 20 + "1",
            "(x+1)**99999",
            "((x+1)**199)**199",
            "Integral(" * 30 + "x" + ", x)" * 30,
            "exp(" * 40 + "x" + ")" * 40,
            "(" * size,
            "[" * size + "]" * size,
            "{" * size,
            "-" * size + "1",
            "~" * size + "1",
            "not " * size + "1",
            "1+" * size + "1",
            "x**" * min(size, 2_000) + "2",
            "9" * size,
            "0." + "9" * size,
            "1e" + "9" * min(size, 50),
            "a" * size + "!",
            " " * size + "x",
            "\n" * size,
            "<answer>" * size,
            "</answer>" * size,
            "٤٢ + ²",
            "nan",
            "inf",
            "-inf",
            "1j",
            "\ud800\udfff",
            "\x00\x01\x1b[31m\r\b",
            "".join(chr(stream.randrange(1, 0x2FFF)) for _ in range(min(size, 400))),
            '{"a":' * size + "1" + "}" * size,
            "∧".join("PQRSTUVW") * (size // 50 + 1),
            "¬" * size + "P",
        ]
    )


def wrapped(stream: random.Random, text: str, right: str) -> str:
    """Put ``text`` where the verifier of a task may look for it."""
    return stream.choice(
        [
            text,
            f"<answer>{text}</answer>",
            f"<answer>{right}</answer><answer>{text}</answer>",
            f"[{text}]",
            f"[[{text}]]",
            f"({text})",
            f"{right} + {text}",
            f"{right}\n{text}",
            f"{text}, {right}",
            f'{{"answer": {json.dumps(text)}}}',
            f"Integral({text}, x)",
            f"exp({text})",
            right.replace("1", text, 1),
        ]
    )


def check(seed: int, cases: int) -> Iterator[str]:
    """Yield the hostile answers that came through."""
    stream = random.Random(seed)
    evaluating = [path.partition(".")[2] for path in EVALUATORS]
    tasks = sorted(set(library().factory.DATASETS) - {"composite"})

    # Every second case goes to a task whose own verifier evaluates answers.
    chosen = dict.fromkeys(stream.sample(tasks, min(len(tasks), max(3, cases // 20))), 0)
    chosen |= dict.fromkeys(evaluating, 0)
    with tempfile.TemporaryDirectory() as folder:
        canary = Path(folder) / "canary"
        facts = {}
        for task in chosen:
            try:
                facts[task] = next(iter(rows(task, 1, stream.randrange(10**6))))
            except DataError as error:
                yield f"{task}: its row cannot be made: {error}"

        samples = []
        for number in range(cases):
            task = stream.choice(evaluating if number % 2 else sorted(facts))
            fact = facts[task]
            text = wrapped(stream, payload(stream, canary), fact["answer"])
            samples.append((text, fact["answer"], json.loads(json.dumps(fact))))

        scored = check_reward("tests.faults.answers:Watched", samples, LIMIT_S)
        for (text, _, fact), result in zip(samples, scored, strict=True):
            reason = result.result.reason if isinstance(result.result, Invalid) else ""
            if any(sign in reason for sign in ("executed", "must not do", "its process", "longer")):
                yield f"{fact['task']}: {reason} on {text[:80]!r}"
        if canary.exists():
            yield "an answer was executed: it left its file behind"


if __name__ == "__main__":
    run(check, 1000)
