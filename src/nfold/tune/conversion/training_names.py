"""The names that a script gives to the DataLoader, optimizers and models of its training loop."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from nfold.tune.file_edits import find_statement
from nfold.tune.name_bindings import (
    Function,
    bindings,
    calls_of,
    enclosing_function,
    lookup,
    parameters,
    single_value,
)
from nfold.tune.python_source import Position, PythonSource, RefusedEdit, Scope, last_name

PARAMETER_METHODS = ("parameters", "named_parameters")
ITERATION_WRAPPERS = ("enumerate", "tqdm", "iter", "track")
"""Functions whose first argument is what a loop iterates over."""


class NotConvertible(Exception):
    """A node or a line of a file keeps a script from being converted; the reason."""

    def __init__(self, place: ast.AST | int, reason: str) -> None:
        super().__init__(reason)
        self.line: int = place if isinstance(place, int) else getattr(place, "lineno", 1)


@dataclass(frozen=True)
class NamedValue:
    """``name`` of what ``statement`` assigns; the value comes from ``call``."""

    statement: ast.stmt
    name: str
    call: ast.Call


@dataclass(frozen=True)
class NamedOptimizer(NamedValue):
    """An optimizer, and the names of the models whose parameters it changes."""

    models: tuple[str, ...] = ()


def find_optimizer(source: PythonSource, line: int) -> NamedOptimizer:
    """Return the optimizer that a line constructs. Raises NotConvertible."""
    call = _created(source, line, "the optimizer")
    models = _model_names(source, call)
    named = name_of(source, call)
    if named.call is not call:  # a function returns the optimizer
        function = enclosing_function(source, call)
        assert function is not None
        models = [_argument_name(named.call, function, model) for model in models]
    return NamedOptimizer(named.statement, named.name, named.call, tuple(dict.fromkeys(models)))


def find_loader(source: PythonSource, created: int | None, step: int | None) -> NamedValue:
    """Return the DataLoader of the training.

    ``created`` is the line that constructs it, ``step`` the line of the optimizer's step, in whose
    loop it is used; None: in another file. Raises NotConvertible.
    """
    first: NotConvertible | None = None
    if created is not None:
        try:
            named = name_of(source, _created(source, created, "the DataLoader"))
            function = enclosing_function(source, named.statement)
            calls = [] if function is None else _callers(source, function)
            if function is None or len(calls) < 2:
                return named
            text = f"{function.name} makes it and is called {len(calls)} times"
            first = NotConvertible(created, text)
        except NotConvertible as obstacle:
            first = obstacle
    loop = None if step is None else _loop_around(source, step)
    if loop is not None:
        return _iterated(source, loop.iter)
    raise first or NotConvertible(step or 1, "the DataLoader is constructed in another file")


def name_of(source: PythonSource, call: ast.Call) -> NamedValue:
    """Return the name that is assigned the value of a call, perhaps by the caller of a function.

    Raises:
        NotConvertible: if there is no single plain name.
    """
    parent = source.parent(call)
    match parent:
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return NamedValue(_whole_choice(source, parent, name), name, call)
        case ast.Assign(targets=[target]) | ast.AnnAssign(target=target):
            raise NotConvertible(
                call, f"{source.code(target)} keeps it: only plain names are converted"
            )
        case ast.Return():
            function = enclosing_function(source, call)
            assert function is not None
            callers = _callers(source, function)
            if len(callers) == 1:
                return name_of(source, callers[0])
            raise NotConvertible(
                call, f"{function.name} returns it and is called {len(callers)} times"
            )
    raise NotConvertible(call, f"no plain name is assigned {source.code(call)}")


def _callers(source: PythonSource, function: Function) -> list[ast.Call]:
    """Return the calls of a function of the file; ``model.train()`` is none of ``train``."""
    is_method = isinstance(source.parent(function), ast.ClassDef)
    calls = calls_of(source, function)
    return [call for call in calls if is_method or isinstance(call.func, ast.Name)]


def uses(source: PythonSource, statement: ast.stmt, name: str) -> Iterator[ast.Name]:
    """Yield where a name is read, also as a parameter of the file's functions that it is passed to."""
    pending: list[tuple[Scope, str]] = [(source.scope(statement), name)]
    seen: set[tuple[int, str]] = set()
    while pending:
        scope, name = pending.pop()
        if (id(scope), name) in seen:
            continue
        seen.add((id(scope), name))
        for node in ast.walk(scope):
            if not isinstance(node, ast.Name) or node.id != name:
                continue
            if not isinstance(node.ctx, ast.Load) or lookup(source, name, node)[0] is not scope:
                continue
            yield node
            pending += _receivers(source, node)


def _receivers(source: PythonSource, node: ast.Name) -> Iterator[tuple[Scope, str]]:
    """Yield the functions of the file that get a name as an argument, and their parameters."""
    parent = source.parent(node)
    keyword = parent if isinstance(parent, ast.keyword) else None
    call = source.parent(keyword) if keyword is not None else parent
    if not isinstance(call, ast.Call):
        return
    for function in ast.walk(source.tree):
        if not isinstance(function, Function) or call not in _callers(source, function):
            continue
        if keyword is not None and keyword.arg is not None:
            yield function, keyword.arg
        elif node in call.args:
            names = [each.arg for each in parameters(function)]
            yield from ((function, name) for name in names[call.args.index(node) :][:1])


def _created(source: PythonSource, line: int, what: str) -> ast.Call:
    try:
        statement = find_statement(source, Position(line))
    except RefusedEdit as refused:
        raise NotConvertible(line, str(refused)) from refused
    value = getattr(statement, "value", None)
    if not isinstance(value, ast.Call):
        raise NotConvertible(line, f"no plain name is assigned {what}")
    return value


def _whole_choice(source: PythonSource, statement: ast.stmt, name: str) -> ast.stmt:
    """Return the outermost ``if`` all of whose branches assign a name, or the statement."""
    parent = source.parent(statement)
    while isinstance(parent, ast.If) and _binds(parent.body, name) and _binds(parent.orelse, name):
        statement, parent = parent, source.parent(parent)
    return statement


def _binds(statements: list[ast.stmt], name: str) -> bool:
    nodes = (node for each in statements for node in ast.walk(each))
    return any(isinstance(n, ast.Name) and n.id == name and is_stored(n) for n in nodes)


def is_stored(node: ast.Name | ast.Attribute | ast.Subscript) -> bool:
    return isinstance(node.ctx, ast.Store)


def _model_names(source: PythonSource, call: ast.Call) -> list[str]:
    """Return the names of the models whose parameters a call gets. Raises NotConvertible."""
    given = [*call.args, *(each.value for each in call.keywords)]
    names = list(_owners_of_parameters(given))
    if not names:
        values = (single_value(source, each) for each in given if isinstance(each, ast.Name))
        names = list(_owners_of_parameters([each for each in values if each is not None]))
    if not names:
        raise NotConvertible(call, "the model whose parameters it changes is not known")
    if "self" in names:
        raise NotConvertible(call, "an object keeps the model: only plain names are converted")
    return names


def _owners_of_parameters(expressions: list[ast.expr]) -> Iterator[str]:
    """Yield ``model`` of each ``model.parameters()`` and ``model.fc.parameters()``."""
    for node in (node for each in expressions for node in ast.walk(each)):
        if isinstance(node, ast.Attribute) and node.attr in PARAMETER_METHODS:
            owner = node.value
            while isinstance(owner, ast.Attribute | ast.Subscript):
                owner = owner.value
            if isinstance(owner, ast.Name):
                yield owner.id


def _argument_name(call: ast.Call, function: Function, parameter: str) -> str:
    """Return the name that a call passes as a parameter. Raises NotConvertible."""
    names = [each.arg for each in parameters(function)]
    by_name = {each.arg: each.value for each in call.keywords}
    given = by_name.get(parameter)
    if given is None and parameter in names:
        given = dict(zip(names, call.args, strict=False)).get(parameter)
    if not isinstance(given, ast.Name):
        raise NotConvertible(call, f"it passes no plain name as {parameter}")
    return given.id


def _loop_around(source: PythonSource, line: int) -> ast.For | None:
    try:
        statement = find_statement(source, Position(line))
    except RefusedEdit:
        return None
    for node in source.ancestors(statement):
        if isinstance(node, ast.For):
            return node
        if isinstance(node, Function):
            return None
    return None


def _iterated(source: PythonSource, iterated: ast.expr) -> NamedValue:
    """Return what a loop iterates over, as the caller of its function names it. Raises NotConvertible."""
    node = _unwrapped(iterated)
    if not isinstance(node, ast.Name):
        raise NotConvertible(iterated, f"{source.code(node)} is no plain name of a DataLoader")
    scope, found = lookup(source, node.id, node)
    if len(found) == 1 and isinstance(found[0], ast.arg) and isinstance(scope, Function):
        callers = _callers(source, scope)
        names = [_argument_node(call, scope, node.id) for call in callers]
        if len(callers) == 1 and names[0] is not None:
            return _iterated(source, names[0])
        raise NotConvertible(iterated, f"{scope.name} gets it and is called {len(callers)} times")
    own = [each for each in found if isinstance(each, ast.Name)]
    if not own or len(own) != len(bindings(scope, node.id)):
        raise NotConvertible(iterated, f"{node.id} is no plain name of a DataLoader")
    owner = next(each for each in source.ancestors(own[0]) if isinstance(each, ast.stmt))
    statement = _whole_choice(source, owner, node.id)
    if not isinstance(owner, ast.Assign) or (len(own) > 1 and statement is owner):
        raise NotConvertible(iterated, f"{node.id} gets several values")
    inner = _unwrapped(owner.value)
    if inner is not owner.value and isinstance(inner, ast.Name):
        return _iterated(source, inner)
    if not isinstance(owner.value, ast.Call):
        raise NotConvertible(owner, f"no call makes {node.id}")
    return NamedValue(statement, node.id, owner.value)


def _argument_node(call: ast.Call, function: Function, parameter: str) -> ast.expr | None:
    try:
        name = _argument_name(call, function, parameter)
    except NotConvertible:
        return None
    given = [*call.args, *(each.value for each in call.keywords)]
    return next(each for each in given if isinstance(each, ast.Name) and each.id == name)


def _unwrapped(node: ast.expr) -> ast.expr:
    while isinstance(node, ast.Call) and node.args and last_name(node.func) in ITERATION_WRAPPERS:
        node = node.args[0]
    return node
