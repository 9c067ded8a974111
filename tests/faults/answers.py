"""Answers that a verifier might execute, choke on, or never finish.

Each case wraps one payload as one task of reasoning-gym expects its answers, and has it
scored in a worker process, as in a run. Every task that ships is tried. A case comes
through if the text was executed, if something was tried that only text can have asked
for, if its process died, or if the call took longer than the limit that ends it.

Every second case takes the next of all tasks, and the others the next of those whose
own verifier evaluates answers. With 210 cases each task has one at least.

``COUPLER_FAULT_SANDBOX=seccomp`` tries the sandbox of a machine without bubblewrap, and
``off`` what is left where there is no sandbox.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.faults import run

from coupler.data.reasoning_gym import library, rows
from coupler.errors import DataError
from coupler.rewards import Invalid, Limits, check_reward, sandbox
from coupler.rewards.reasoning_gym import KILL_CPU_S, Score
from coupler.rewards.verifiers import EVALUATORS

# The time of the processor that ends a call is less: others may use this machine, too.
LIMIT_S = 60.0
SANDBOX = os.environ.get("COUPLER_FAULT_SANDBOX", "auto")
LIMITS = Limits(sandbox="off" if SANDBOX == "off" else "auto")
WATCHED = ("os.system", "subprocess.Popen", "socket.connect", "os.exec", "os.posix_spawn")
SIGNS = ("executed", "must not do", "was killed", "exited", "went on", f"than {LIMIT_S:g} s")
seen: list[str] = []


class Watched(Score):
    """Score, and report by an error what the interpreter was asked for meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        sys.addaudithook(lambda event, _: seen.append(event) if event in WATCHED else None)

    def __call__(self, completion: str, row: Any) -> Any:
        seen.clear()
        before = time.process_time()
        graded = super().__call__(completion, row)
        if seen:
            raise AssertionError(f"executed: {seen}")
        if (took := time.process_time() - before) > KILL_CPU_S:
            raise AssertionError(f"it went on for {took:.1f} s")
        return graded


def only_seccomp() -> AbstractContextManager[object]:
    """Hide bubblewrap within."""
    return patch.object(sandbox, "why_no_bubblewrap", lambda: "a test hides it")


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
            *numbers(stream, size),
            *structures(size),
        ]
    )


def numbers(stream: random.Random, size: int) -> list[str]:
    """Return numbers that are large, or take long to read."""
    exponent = stream.choice(["400", "99999", "99999999", "999999999999"])
    sign = stream.choice(["", "-", "+"])
    return [
        f"1e{sign}{exponent}",
        f"{sign}1E{exponent}/7",
        f"1/{sign}1e{exponent}",
        f"10**{exponent}",
        f"{exponent}!",
        f"2^{exponent}",
        f"1 << {exponent}",
        f"0x{'f' * size}",
        "1_" * size + "1",
        "9" * size + "/" + "7" * size,
        "0." + "0" * size + "1",
        "sqrt(" * 45 + "2" + ")" * 45,
        f"log(exp({exponent}))",
        f"sin({exponent})**{exponent}",
        "(x+1)**150*(x-1)**150*(x+2)**150",
        "*".join(f"(x+{i})" for i in range(min(size, 400))),
        "+".join(f"sin(x)**{i}*cos(x)**{i}" for i in range(2, min(size, 60))),
        "Integral(exp(sin(x)**9)*log(cos(x)), x)",
        "atan(tan(x**sin(x)**cos(x)))" * 3,
        "\uff11\uff12\uff13",
        "\u0661\u0662/\u0663",
        "\u221e",
        "1/0",
        "0**-1",
        "zoo",
        "oo*0",
    ]


def structures(size: int) -> list[str]:
    """Return lists, grids and texts that are large, or take long to compare."""
    return [
        f"[0] * {10**9}",
        f"'a' * {10**10}",
        f"list(range({10**9}))",
        "[" + "[0,0]," * size + "]",
        "{" + "'a':1," * size + "}",
        "(" + "1," * size + ")",
        "\n".join("1 2 3" for _ in range(size)),
        "\n".join("Q _ _ Q" for _ in range(min(size, 3000))),
        "A->B " * size,
        "a b " * size,
        "a,b," * size,
        "ab" * size,
        "word " * size,
        "()" * size,
        "Move disk 1 from Peg 1 to Peg 2\n" * size,
        "e2e4 " * size,
        "\u0130" * size,
        "\U0001f389" * size,
        "\u202e\u0301" * size,
        "a" * 30 + "\\" * size,
        "%s" * size + "{0.__class__.__init__.__globals__}",
        "$(touch x) `touch x`; import os",
        "null",
        '{"a": NaN, "b": 1e999, "a": []}',
        '["' + "a" * size + '"]',
        "[[" + "0," * size + "0]]",
        "True",
        "None",
        "...",
        "-",
        "",
    ]


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
    tasks = sorted(set(library().factory.DATASETS) - {"composite"})
    walks = [tasks, [path.partition(".")[2] for path in EVALUATORS]]
    for walk in walks:
        stream.shuffle(walk)
    chosen = [walks[n % 2][n // 2 % len(walks[n % 2])] for n in range(cases)]

    with tempfile.TemporaryDirectory() as folder:
        canary = Path(folder) / "canary"
        facts = {}
        for task in dict.fromkeys(chosen):
            try:
                facts[task] = next(iter(rows(task, 1, stream.randrange(10**6))))
            except DataError as error:
                yield f"{task}: its row cannot be made: {error}"

        samples = []
        for task in filter(facts.__contains__, chosen):
            fact = facts[task]
            text = wrapped(stream, payload(stream, canary), fact["answer"])
            samples.append((text, fact["answer"], json.loads(json.dumps(fact))))

        stopped = 0
        with only_seccomp() if SANDBOX == "seccomp" else nullcontext():
            scored = check_reward("tests.faults.answers:Watched", samples, LIMIT_S, LIMITS)
        for (text, _, fact), result in zip(samples, scored, strict=True):
            reason = result.result.reason if isinstance(result.result, Invalid) else ""
            if any(sign in reason for sign in SIGNS):
                yield f"{fact['task']}: {reason} on {text[:80]!r}"
            stopped += "longer" in reason or "more than its time" in reason
        print(f"{stopped} of {cases} verifiers were stopped by their limit of time")
        if canary.exists():
            yield "an answer was executed: it left its file behind"


if __name__ == "__main__":
    run(check, 1000)
