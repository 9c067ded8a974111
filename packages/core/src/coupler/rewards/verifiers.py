"""Make the verifiers of reasoning-gym parse an answer where they would evaluate it.

Nine of its tasks hand the text of a model to ``eval`` or to sympy's ``parse_expr``,
which executes it. :func:`disarm` puts the parsers of this file in their places, so that
the rest of each verifier, and its score, stays. :class:`Guard` refuses what a verifier
might still try, and remembers it.
"""

from __future__ import annotations

import ast
import inspect
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from coupler.errors import CouplerError

# The names by which a module of reasoning-gym reaches the evaluator of an answer.
EVALUATORS = {
    "algorithmic.binary_matrix": "eval",
    "algorithmic.spiral_matrix": "eval",
    "algorithmic.string_insertion": "eval",
    "games.n_queens": "eval",
    # These two evaluate no answer but the text of their own question.
    "algorithmic.number_sorting": "eval",
    "arithmetic.bitwise_arithmetic": "eval",
    "games.countdown": "parse_expr",
    "games.puzzle24": "parse_expr",
    "algebra.intermediate_integration": "sympy",
    "algebra.polynomial_multiplication": "sp",
    "algebra.simple_integration": "sympy",
}

# What executes a text.
EXECUTE = {
    *("eval", "exec", "compile", "__import__", "import_module", "system", "popen", "Popen"),
    *("parse_expr", "sympify", "simplify", "S", "lambdify", "parse_latex"),
    *("subprocess.run", "pickle.loads", "marshal.loads", "yaml.load", "yaml.unsafe_load"),
}

# Limits of a text that is parsed. No answer of a task comes near them.
MAX_CHARACTERS = 10_000
MAX_DEPTH = 200
MAX_BRACKETS = 50
MAX_DIGITS = 300
MAX_EXPONENT = 200

CONSTANTS = {"E", "I", "pi", "oo", "zoo", "nan", "EulerGamma", "GoldenRatio"}
FUNCTIONS = {
    *("exp", "log", "ln", "sqrt", "cbrt", "root", "Abs", "sign", "Rational", "Integer"),
    # Some answers of intermediate_integration leave an integral as it is.
    "Integral",
    *("sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan", "asec", "acsc", "acot"),
    *("sinh", "cosh", "tanh", "sech", "csch", "coth", "asinh", "acosh", "atanh", "erf", "atan2"),
}
OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.BitXor: operator.xor,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}

# These files execute code that they write themselves, from numbers and field names.
TEMPLATES = ("sympy/polys/monomials.py", "collections/__init__.py", "dataclasses.py")

MAX_BITS = 100_000
BITS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.BitXor: operator.xor,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.Invert: operator.invert,
    ast.USub: operator.neg,
}


def literal(text: str) -> Any:
    """Return the Python literal that ``text`` is.

    Raises:
        ValueError: it is no literal, or too long or too deep.
    """
    try:
        return ast.literal_eval(_bounded(text))
    except (SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError(f"no literal: {error}") from None


def arithmetic(text: str) -> int:
    """Return the value of whole numbers in the operators of bits and arithmetic.

    Raises:
        ValueError: ``text`` is no such expression, or its value is too large.
    """

    def value(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int() as number):
                return number
            case ast.UnaryOp(op=op, operand=operand) if type(op) in BITS:
                return BITS[type(op)](value(operand))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in BITS:
                first, second = value(left), value(right)
                if max(first.bit_length(), second.bit_length()) > MAX_BITS or (
                    isinstance(op, ast.LShift) and second > MAX_BITS
                ):
                    raise ValueError("the number is too large")
                return BITS[type(op)](first, second)
        raise ValueError(f"a {type(node).__name__} is no part of whole arithmetic")

    try:
        return value(ast.parse(_bounded(text).strip(), mode="eval").body)
    except (SyntaxError, ArithmeticError, MemoryError, RecursionError) as error:
        raise ValueError(f"no arithmetic: {error}") from None


def expression(text: str, local_dict: Mapping[str, Any] | None = None, **_: Any) -> Any:
    """Return the sympy expression that ``text`` is.

    The grammar has numbers, names, the operators of arithmetic and the elementary
    functions. Names are those of ``local_dict``, a few constants, and else symbols.
    Takes the place of ``sympy.parse_expr``, whose other arguments are ignored.

    Raises:
        ValueError: it is no such expression, or too long, too deep or too large.
    """
    source = _bounded(text).strip()
    try:
        tree = ast.parse(source, mode="eval")
        return _Builder(source, local_dict or {}).build(tree.body)
    except (SyntaxError, TypeError, ArithmeticError, MemoryError, RecursionError) as error:
        raise ValueError(f"no expression: {error}") from None


class _Builder:
    """Build a sympy expression from a syntax tree, node by node."""

    def __init__(self, source: str, names: Mapping[str, Any]) -> None:
        import sympy

        self.sympy, self.source, self.names = sympy, source, names

    def build(self, node: ast.expr, depth: int = 0) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError("the expression is too deep")

        match node:
            case ast.Constant(value=value):
                return self.number(node, value)
            case ast.Name(id=name):
                return self.name(name)
            case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
                return OPERATORS[type(op)](self.build(operand, depth + 1))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                return self.apply(op, self.build(left, depth + 1), self.build(right, depth + 1))
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS:
                return getattr(self.sympy, name)(*(self.build(arg, depth + 1) for arg in args))
        raise ValueError(f"a {type(node).__name__} is no part of an expression")

    def number(self, node: ast.expr, value: Any) -> Any:
        if type(value) is int and abs(value) < 10**MAX_DIGITS:
            return self.sympy.Integer(value)

        # A decimal keeps all the digits that it was written with.
        written = ast.get_source_segment(self.source, node) or ""
        if type(value) is float and len(written) <= MAX_DIGITS and 1e-99 < abs(value or 1) < 1e99:
            # A number that underflows to 0 has an exponent that sympy would work out.
            if not value and set(written) - set("0._"):
                raise ValueError("the number is too small")
            return self.sympy.Float(written)
        raise ValueError(f"{type(value).__name__} is no number of an expression")

    def name(self, name: str) -> Any:
        if name in self.names:
            return self.names[name]
        if name in CONSTANTS:
            return getattr(self.sympy, name)
        if name.startswith("_") or hasattr(self.sympy, name):
            raise ValueError(f"{name!r} is no name of an expression")
        return self.sympy.Symbol(name)

    def apply(self, op: ast.operator, left: Any, right: Any) -> Any:
        if isinstance(op, ast.BitXor) and not (left.is_Integer and right.is_Integer):
            raise ValueError("^ is no power")
        if isinstance(op, ast.Pow):
            self.check_power(left, right)

        value = OPERATORS[type(op)](left, right)

        if value.is_Rational and max(abs(value.p), value.q) >= 10 ** (10 * MAX_DIGITS):
            raise ValueError("the number is too large")
        return value

    def check_power(self, base: Any, exponent: Any) -> None:
        """Raise ValueError where a power is too large to be worked out."""
        if not exponent.is_number:
            return

        size = abs(complex(exponent))
        if size > MAX_EXPONENT:
            raise ValueError("the exponent is too large")
        nested = max((abs(complex(p.exp)) for p in _powers(base, self.sympy)), default=1.0)
        if max(nested, 1.0) * size > MAX_EXPONENT:
            raise ValueError("the power of a power is too large")


def _powers(value: Any, sympy: Any) -> Iterator[Any]:
    return (power for power in value.atoms(sympy.Pow) if power.exp.is_number)


def _bounded(text: str) -> str:
    """Return ``text`` if its length and its brackets stay within the limits.

    Raises:
        ValueError: they do not.
    """
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"longer than {MAX_CHARACTERS} characters")

    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    if deepest > MAX_BRACKETS:
        raise ValueError(f"more than {MAX_BRACKETS} brackets deep")
    return text


class _Sympy:
    """Stand for sympy in a module, with a ``parse_expr`` that executes nothing."""

    parse_expr = staticmethod(expression)

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module("sympy"), name)


def disarm() -> None:
    """Replace the evaluators of reasoning-gym in this process.

    Raises:
        CouplerError: a module no longer reaches its evaluator by the known name.
    """
    for path, name in EVALUATORS.items():
        module = import_module(f"reasoning_gym.{path}")
        if name != "eval" and not hasattr(module, name):
            raise CouplerError(
                f"reasoning_gym.{path} has no {name!r}, so its verifier cannot be kept from "
                "evaluating the text of a model.\n  try:  pip install 'reasoning-gym==0.1.25'"
            )
        safe = {"eval": literal, "parse_expr": expression}.get(name, _Sympy())
        if path == "arithmetic.bitwise_arithmetic":
            safe = arithmetic
        setattr(module, name, safe)


def fill_tables(verifier: type) -> None:
    """Have sympy read its table of integrals, which it keeps as text, before a guard
    would refuse that.
    """
    if EVALUATORS.get(verifier.__module__.partition(".")[2]) != "sympy":
        return

    import sympy
    from sympy.integrals.meijerint import meijerint_indefinite

    x = sympy.Symbol("x")
    meijerint_indefinite(sympy.sin(x), x)


def check_safe(task: str, verifier: type) -> None:
    """Raise where the verifier of ``task`` evaluates text and no parser stands in.

    Raises:
        CouplerError: it does. No text of a model is handed to it.
    """
    for kind in verifier.__mro__:
        package, _, path = kind.__module__.partition(".")
        foreign = package == "reasoning_gym" and path not in EVALUATORS
        found = evaluates(kind) if foreign else ""
        if found:
            raise CouplerError(
                f"the verifier of the reasoning-gym task {task} calls {found}, which would "
                "execute the text of a model, and Coupler has no parser for it.\n  try:  "
                "another task, or a reward of your own (docs/your-reward.md)"
            )


def evaluates(kind: type) -> str:
    """Return the evaluator that ``kind.score_answer`` may call, or nothing.

    The functions of its class and its module are followed. What another module does is
    left to the guard.
    """
    module = sys.modules[kind.__module__]
    tree = ast.parse(inspect.getsource(module))
    bodies = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    seen, open_ = set[str](), ["score_answer"]

    while open_:
        name = open_.pop()
        if name in seen or name not in bodies:
            continue
        seen.add(name)
        whole = [ast.unparse(n.func) for n in ast.walk(bodies[name]) if isinstance(n, ast.Call)]
        called = {text.rpartition(".")[2] for text in whole}
        if found := sorted((called.union(whole) & EXECUTE) - bodies.keys()):
            return f"{found[0]}()"
        open_ += called
    return ""


class Guard:
    """Refuse that a verifier executes, starts, sends or writes anything.

    An audit hook of the interpreter cannot be removed, so one is made for the process
    and it acts within :meth:`on` alone. It is the second line: what it sees has got
    past the parsers, and the call is invalid.
    """

    REFUSED = (
        *("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.startfile"),
        *("subprocess.", "socket.", "shutil.", "pty.", "os.remove", "os.rename", "os.rmdir"),
        *("os.mkdir", "os.chmod", "os.chown", "os.link", "os.symlink", "os.truncate", "os.kill"),
        *("os.putenv", "ctypes.", "code.__new__", "pickle.find_class", "webbrowser."),
    )

    def __init__(self) -> None:
        self.active = False
        self.refused = ""
        sys.addaudithook(self._hook)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Watch what runs within."""
        self.active, self.refused = True, ""
        try:
            yield
        finally:
            self.active = False

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self.active and self._forbidden(event, args) and not _trusted():
            self.refused = event
            raise PermissionError(f"a verifier must not: {event}")

    def _forbidden(self, event: str, args: tuple[Any, ...]) -> bool:
        if event == "exec":
            # The code of a file is a module that is imported. Text has no file.
            name = getattr(args[0], "co_filename", "<string>")
            return name.startswith("<") and not name.startswith("<frozen")
        if event == "open":
            return isinstance(args[1], str) and bool(set(args[1]) & set("wax+"))
        return event.startswith(self.REFUSED)


def _trusted() -> bool:
    """Return True where no text can have asked for it.

    That is while a module is imported, and in code that is made of templates alone.
    """
    frame = sys._getframe(2)
    if frame.f_code.co_filename.endswith(TEMPLATES):
        return True

    while frame := frame.f_back:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
    return False
