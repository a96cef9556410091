"""The statement of user code that an error comes from, and the argument that an assertion demands."""

from __future__ import annotations

import ast
import linecache
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

from nfold.core.source_location import is_user_code

MAX_CODE = 120
EVALUATED = (ast.Name, ast.Attribute, ast.Constant, ast.BinOp, ast.operator, ast.expr_context)


@dataclass(frozen=True)
class FailedStatement:
    """The innermost statement of user code in a traceback; ``code`` is empty if it is unknown.

    ``argument`` is what would satisfy an assertion: ``pass --batch_size=4``, ``set batch_size = 4``.
    """

    code: str = ""
    argument: str = ""


def find_failed_statement(error: BaseException) -> FailedStatement:
    """Return the statement that an error comes from; a ``raise`` tells no more than its error."""
    every = list(traceback.walk_tb(error.__traceback__))
    own = [(f, line) for f, line in every if is_user_code(f.f_code.co_filename)]
    if not own:
        return FailedStatement()
    frame, number = own[-1]
    code = linecache.getline(frame.f_code.co_filename, number).strip()
    if isinstance(error, AssertionError) and frame is every[-1][0]:
        found = _find_assertion(frame, number)
        if found is not None:
            code = f"assert {ast.unparse(found.test)}"
            return FailedStatement(code[:MAX_CODE], _divisible_argument(found.test, frame))
    return FailedStatement("" if code.startswith("raise") else code[:MAX_CODE])


def _find_assertion(frame: FrameType, number: int) -> ast.Assert | None:
    try:
        tree = ast.parse("".join(linecache.getlines(frame.f_code.co_filename)))
    except SyntaxError:
        return None
    every = (node for node in ast.walk(tree) if isinstance(node, ast.Assert))
    return next((n for n in every if n.lineno <= number <= (n.end_lineno or n.lineno)), None)


def _divisible_argument(test: ast.expr, frame: FrameType) -> str:
    """Return ``pass --batch_size=4`` for ``args.batch_size % devices == 0``, else an empty text."""
    match test:
        case ast.Compare(
            left=ast.BinOp(left=ast.Name() | ast.Attribute() as left, op=ast.Mod(), right=right),
            ops=[ast.Eq()],
            comparators=[ast.Constant(value=0)],
        ):
            value, divisor = _evaluate(left, frame), _evaluate(right, frame)
            if isinstance(value, int) and isinstance(divisor, int) and divisor > 0:
                return _argument(left, (value // divisor + 1) * divisor, frame)
    return ""


def _evaluate(node: ast.expr, frame: FrameType) -> Any:
    """Return the value of names, attributes, and calls without arguments; None if unknown."""
    for part in ast.walk(node):
        called = isinstance(part, ast.Call) and not part.args and not part.keywords
        if not called and not isinstance(part, EVALUATED):
            return None
    with suppress(Exception):
        code = compile(ast.Expression(node), "<assertion>", "eval")
        return eval(code, frame.f_globals, frame.f_locals)  # noqa: S307
    return None


def _argument(node: ast.Name | ast.Attribute, value: int, frame: FrameType) -> str:
    name = node.id if isinstance(node, ast.Name) else node.attr
    source = "".join(linecache.getlines(frame.f_code.co_filename))
    given = [argument.partition("=")[0] for argument in sys.argv[1:]]
    for option in (f"--{name}", f"--{name.replace('_', '-')}"):
        if option in given or f'"{option}"' in source or f"'{option}'" in source:
            return f"pass {option}={value}"
    if not isinstance(node, ast.Name) or name not in frame.f_globals:
        return ""
    if "globals()" in source:  # every global is an argument
        return f"pass --{name}={value}"
    return f"set {name} = {value}"
