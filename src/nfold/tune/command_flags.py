"""Finds the option of the command line that sets an expression of a script.

Knows argparse, click, typer and absl, if the file declares the option, and keys of Hydra and
OmegaConf.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nfold.tune.name_bindings import (
    Function,
    assigned_value,
    bindings,
    calls_of,
    iter_scope,
    lookup,
    parameters,
)
from nfold.tune.python_source import PythonSource, dotted_name, last_name

PARSE_CALLS = ("parse_args", "parse_known_args", "parse_intermixed_args")
MAX_DEPTH = 12  # assignments and calls that an expression is followed through


@dataclass(frozen=True)
class CommandChange:
    """A change of a command: arguments to add, options to remove, and why it may not suffice."""

    arguments: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    caveat: str = ""


def find_command_change(
    source: PythonSource, expression: ast.expr, value: str, key: str = ""
) -> CommandChange | None:
    """Return how the command gives ``expression`` a value, a Python literal; None if unknown.

    With ``key``, the expression is a dictionary, and the value that of its key.
    """
    try:
        literal = ast.literal_eval(value)
    except ValueError:
        return None
    origin = _find_origin(source, expression, MAX_DEPTH)
    if origin is None:
        return None
    root, path = origin
    match root:
        case ast.Call() if _is_config(source, root):
            return _set_key(path, key, literal)
        case ast.arg() if _is_config(source, root):
            return _set_key(path, key, literal)
    if key:
        return None
    match root, path:
        case ast.Call(), (name,) if last_name(root.func) in PARSE_CALLS:
            return _set_argparse(source, name, literal)
        case ast.Call(args=[ast.Constant(value=str(name)), *_]), ("value",):
            return _set_absl(name, literal)
        case ast.Name(id="FLAGS"), (name,):
            return _set_absl(name, literal)
        case ast.Name(id="flags"), ("FLAGS", name):
            return _set_absl(name, literal)
        case ast.arg(), ():
            return _set_parameter(source, root, literal)
    return None


Origin = tuple[ast.AST, tuple[str, ...]]
"""A call, parameter or name, and the attributes and keys that an expression reads of it."""


def _find_origin(source: PythonSource, node: ast.AST, depth: int) -> Origin | None:
    if not depth:
        return None
    match node:
        case ast.Attribute(value=ast.Name(id="self" | "cls")):
            value = _attribute_value(source, node)
            return None if value is None else _find_origin(source, value, depth - 1)
        case ast.Attribute(value=owner, attr=name):
            return _extend(_find_origin(source, owner, depth - 1), name)
        case ast.Subscript(value=owner, slice=ast.Constant(value=str(name))):
            return _extend(_find_origin(source, owner, depth - 1), name)
        case ast.Name():
            return _name_origin(source, node, depth - 1)
        case ast.Call(func=ast.Name(id="int" | "vars"), args=[inner], keywords=[]):
            return _find_origin(source, inner, depth - 1)
        case ast.Call():
            return _call_origin(source, node, depth - 1)
    return None


def _extend(origin: Origin | None, name: str) -> Origin | None:
    return None if origin is None else (origin[0], (*origin[1], name))


def _attribute_value(source: PythonSource, node: ast.Attribute) -> ast.expr | None:
    """Return the value of ``self.name``, if its class sets it once."""
    owner = next((each for each in source.ancestors(node) if isinstance(each, ast.ClassDef)), None)
    if owner is None:
        return None
    stored = [
        each
        for each in ast.walk(owner)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and dotted_name(each) == dotted_name(node)
    ]
    return assigned_value(source, stored[0]) if len(stored) == 1 else None


def _name_origin(source: PythonSource, node: ast.Name, depth: int) -> Origin | None:
    scope, found = lookup(source, node.id, node)
    if len(found) != 1:
        return None if found else (node, ())
    (binding,) = found
    if isinstance(binding, ast.arg) and isinstance(scope, Function):
        return _parameter_origin(source, scope, binding, depth)
    if isinstance(binding, ast.Import | ast.ImportFrom):
        return node, ()
    parent = source.parent(binding)
    pair = source.parent(parent) if isinstance(parent, ast.Tuple) else None
    if isinstance(parent, ast.Tuple) and isinstance(pair, ast.Assign) and parent.elts[0] is binding:
        # args, rest = parser.parse_known_args()
        is_known = isinstance(pair.value, ast.Call) and last_name(pair.value.func) in PARSE_CALLS
        return (pair.value, ()) if is_known else None
    value = assigned_value(source, binding)
    return None if value is None else _find_origin(source, value, depth)


def _parameter_origin(
    source: PythonSource, function: Function, parameter: ast.arg, depth: int
) -> Origin | None:
    """Return the origin that all calls of a function agree on, or the parameter itself."""
    calls = calls_of(source, function)
    if function.decorator_list or not calls:
        values: Sequence[ast.expr | None] = ()
    else:
        values = [_argument(source, call, function, parameter) for call in calls]
    origins = [None if each is None else _find_origin(source, each, depth) for each in values]
    if origins and origins[0] is not None and all(each == origins[0] for each in origins):
        return origins[0]
    if not any(values) and not function.decorator_list:  # such as an argument of mp.spawn
        parsed = [assigned_value(source, each) for each in _all_bindings(source, parameter.arg)]
        of_parsers = [
            each
            for each in parsed
            if isinstance(each, ast.Call) and last_name(each.func) in PARSE_CALLS
        ]
        if len(of_parsers) == 1:
            return of_parsers[0], ()
    return None if values else (parameter, ())


def _all_bindings(source: PythonSource, name: str) -> Iterator[ast.AST]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name:
            yield node


def _argument(
    source: PythonSource, call: ast.Call, function: Function, parameter: ast.arg
) -> ast.expr | None:
    for keyword in call.keywords:
        if keyword.arg == parameter.arg:
            return keyword.value
    names = [each.arg for each in [*function.args.posonlyargs, *function.args.args]]
    if parameter.arg not in names or any(isinstance(each, ast.Starred) for each in call.args):
        return None
    of_method = isinstance(source.parent(function), ast.ClassDef)
    index = names.index(parameter.arg) - of_method
    return call.args[index] if 0 <= index < len(call.args) else None


def _call_origin(source: PythonSource, call: ast.Call, depth: int) -> Origin | None:
    if isinstance(call.func, ast.Name):
        _, found = lookup(source, call.func.id, call)
        if len(found) == 1 and isinstance(found[0], Function):
            results = [each.value for each in iter_scope(found[0]) if isinstance(each, ast.Return)]
            if len(results) == 1 and results[0] is not None:
                return _find_origin(source, results[0], depth)
    name = last_name(call.func)
    known = name in PARSE_CALLS or name.startswith("DEFINE_") or _is_config(source, call)
    return (call, ()) if known else None


def _is_config(source: PythonSource, node: ast.Call | ast.arg) -> bool:
    """Return whether a value has all keys of Hydra's or OmegaConf's command line."""
    if isinstance(node, ast.Call):
        calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
        return any(last_name(each.func) == "from_cli" for each in calls)
    scope = source.scope(node)
    return any(dotted_name(each).endswith("hydra.main") for each in _decorators(scope))


def _decorators(scope: ast.AST) -> list[ast.expr]:
    """Return what a function is decorated with, without the arguments of decorators."""
    found = scope.decorator_list if isinstance(scope, Function) else []
    return [each.func if isinstance(each, ast.Call) else each for each in found]


def _set_key(path: tuple[str, ...], key: str, literal: Any) -> CommandChange:
    text = {True: "true", False: "false", None: "null"}
    value = text[literal] if literal is None or isinstance(literal, bool) else str(literal)
    if key:  # perhaps a new one
        return CommandChange(arguments=(f"++{'.'.join((*path, key))}={value}",))
    return CommandChange(arguments=(f"{'.'.join(path)}={value}",))


def _set_absl(name: str, literal: Any) -> CommandChange:
    if isinstance(literal, bool):
        return CommandChange(arguments=(f"--{'' if literal else 'no'}{name}",))
    return CommandChange(arguments=(f"--{name}={literal}",))


def _set_argparse(source: PythonSource, name: str, literal: Any) -> CommandChange | None:
    calls = (node for node in ast.walk(source.tree) if isinstance(node, ast.Call))
    found = [call for call in calls if _destination(call) == name]
    options = _strings(found[0].args) if len(found) == 1 else []
    if not options or not options[0].startswith("-"):
        return None
    option = next((each for each in options if each.startswith("--")), options[0])
    settings = {each.arg: each.value for each in found[0].keywords}
    action = settings.get("action", ast.Constant("store"))
    action_name = action.value if isinstance(action, ast.Constant) else last_name(action)
    caveat = _reassignment(source, name)
    if action_name in ("store_true", "store_false"):
        wanted = literal is (action_name == "store_true")
        if not isinstance(literal, bool):
            return None
        return CommandChange((option,) if wanted else (), () if wanted else (option,), caveat)
    if action_name == "BooleanOptionalAction" and isinstance(literal, bool):
        return CommandChange((option if literal else f"--no-{option[2:]}",), (), caveat)
    of_bool = "type" in settings and last_name(settings["type"]) == "bool"
    if action_name != "store" or (of_bool and not literal):  # bool("False") is true
        return None
    return CommandChange((option, str(literal)), (), caveat)


def _strings(nodes: Sequence[ast.expr]) -> list[str]:
    constants = [each.value for each in nodes if isinstance(each, ast.Constant)]
    return [each for each in constants if isinstance(each, str)]


def _destination(call: ast.Call) -> str:
    """Return the attribute that ``add_argument`` declares, "" for other calls."""
    options = _strings(call.args)
    if last_name(call.func) != "add_argument" or not options:
        return ""
    for keyword in call.keywords:
        if keyword.arg == "dest" and isinstance(keyword.value, ast.Constant):
            return str(keyword.value.value)
    long = next((each for each in options if each.startswith("--")), options[0])
    return long.lstrip("-").replace("-", "_")


def _reassignment(source: PythonSource, name: str) -> str:
    """Return a sentence with the lines that assign ``args.name`` anew, or ""."""
    lines = [
        str(source.origin_line(node))
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and node.attr == name
        and dotted_name(node).partition(".")[0] != "self"
    ]
    return f"line {' and '.join(lines)} changes .{name} after parsing" if lines else ""


def _set_parameter(source: PythonSource, parameter: ast.arg, literal: Any) -> CommandChange | None:
    function = source.scope(parameter)
    if not isinstance(function, Function):
        return None
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and last_name(decorator.func) == "option":
            texts = _strings(decorator.args)
            options = [each for each in texts if each.startswith("-")]
            long = next((each for each in options if each.startswith("--")), "")
            derived = long.partition("/")[0].lstrip("-").replace("-", "_").lower()
            names = [each for each in texts if not each.startswith("-")] or [derived]
            if parameter.arg in names and options:
                is_flag = any(
                    each.arg == "is_flag" and ast.unparse(each.value) == "True"
                    for each in decorator.keywords
                )
                return _set_option(long or options[0], literal, is_flag=is_flag)
    if _is_typer(source, function):
        return _set_typer(function, parameter, literal)
    return None


def _set_option(option: str, literal: Any, *, is_flag: bool) -> CommandChange | None:
    """Set an option of click: ``--pin/--no-pin`` is a flag with two names."""
    on, _, off = option.partition("/")
    if not off and not is_flag:
        return CommandChange(arguments=(on, str(literal)))
    if not isinstance(literal, bool):
        return None
    if literal:
        return CommandChange(arguments=(on,))
    return CommandChange(arguments=(off,)) if off else CommandChange(removed=(on,))


def _is_typer(source: PythonSource, function: Function) -> bool:
    started = (
        isinstance(node, ast.Call)
        and dotted_name(node.func) == "typer.run"
        and [last_name(each) for each in node.args] == [function.name]
        for node in ast.walk(source.tree)
    )
    names = [last_name(each) for each in _decorators(function)]
    return any(started) or ("command" in names and bool(bindings(source.tree, "typer")))


def _set_typer(function: Function, parameter: ast.arg, literal: Any) -> CommandChange | None:
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    defaults: dict[ast.arg, ast.expr | None] = dict(
        zip(positional[len(positional) - len(given.defaults) :], given.defaults, strict=True)
    )
    defaults |= dict(zip(given.kwonlyargs, given.kw_defaults, strict=True))
    if parameter not in parameters(function) or defaults.get(parameter) is None:
        return None  # an argument without a name
    settings = [node for node in (defaults[parameter], parameter.annotation) if node is not None]
    declared = [
        each
        for node in settings
        for each in ast.walk(node)
        if isinstance(each, ast.Call) and last_name(each.func) in ("Option", "Argument")
    ]
    if any(last_name(each.func) == "Argument" for each in declared):
        return None
    texts = [text for each in declared for text in _strings(each.args) if text.startswith("-")]
    option = next((text for text in texts if text.startswith("--")), "")
    is_bool = isinstance(literal, bool)
    if not option:
        name = parameter.arg.replace("_", "-")
        option = f"--{name}/--no-{name}" if is_bool else f"--{name}"
    return _set_option(option, literal, is_flag=is_bool)
