"""Where a Python file binds its names: assignments, imports, functions, parameters."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from nfold.tune.python_source import PythonSource, Scope, last_name

Function = ast.FunctionDef | ast.AsyncFunctionDef


def iter_scope(scope: Scope) -> Iterator[ast.AST]:
    """Yield the nodes of a scope without those of functions and classes in it."""
    body = [scope.body] if isinstance(scope, ast.Lambda) else scope.body
    pending: list[ast.AST] = list(reversed(body))
    while pending:
        node = pending.pop()
        yield node
        if isinstance(node, Function | ast.ClassDef):
            pending += reversed(node.decorator_list)
        elif not isinstance(node, ast.Lambda):
            pending += reversed(list(ast.iter_child_nodes(node)))


def bindings(scope: Scope, name: str) -> list[ast.AST]:
    """Return the nodes that bind or delete a name in a scope."""
    found: list[ast.AST] = [arg for arg in parameters(scope) if arg.arg == name]
    return found + [node for node in iter_scope(scope) if name in _bound_names(node)]


def parameters(scope: Scope) -> list[ast.arg]:
    if not isinstance(scope, Function | ast.Lambda):
        return []
    given = scope.args
    extra = [each for each in (given.vararg, given.kwarg) if each is not None]
    return [*given.posonlyargs, *given.args, *given.kwonlyargs, *extra]


def _bound_names(node: ast.AST) -> tuple[str | None, ...]:
    match node:
        case ast.Name(ctx=ast.Store() | ast.Del()):
            return (node.id,)
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.ExceptHandler():
            return (node.name,)
        case ast.MatchAs() | ast.MatchStar():
            return (node.name,)
        case ast.MatchMapping():
            return (node.rest,)
        case ast.Global() | ast.Nonlocal():
            return tuple(node.names)
        case ast.Import() | ast.ImportFrom():
            return tuple(each.asname or each.name.partition(".")[0] for each in node.names)
    return ()


def lookup(source: PythonSource, name: str, node: ast.AST) -> tuple[Scope, list[ast.AST]]:
    """Return the scope that binds a name which ``node`` reads, and its bindings, perhaps none."""
    scope = source.scope(node)
    while True:
        found = bindings(scope, name)
        if found or isinstance(scope, ast.Module):
            return scope, found
        scope = source.scope(scope)
        while isinstance(scope, ast.ClassDef):  # functions do not see the names of their class
            scope = source.scope(scope)


def assigned_value(source: PythonSource, binding: ast.AST) -> ast.expr | None:
    """Return the value of ``name = value``, None for other bindings."""
    parent = source.parent(binding)
    match parent:
        case ast.Assign(targets=targets) if binding in targets:
            return parent.value
        case ast.AnnAssign(target=target) | ast.NamedExpr(target=target) if target is binding:
            return parent.value
    return None


def single_value(source: PythonSource, name: ast.Name) -> ast.expr | None:
    """Return the value of a name that is bound once, by an assignment, else None."""
    _, found = lookup(source, name.id, name)
    return assigned_value(source, found[0]) if len(found) == 1 else None


def enclosing_function(source: PythonSource, node: ast.AST) -> Function | None:
    return next((each for each in source.ancestors(node) if isinstance(each, Function)), None)


def calls_of(source: PythonSource, function: Function) -> list[ast.Call]:
    """Return the calls of a function or method of the file, by its last name."""
    owner = source.parent(function)
    is_init = isinstance(owner, ast.ClassDef) and function.name == "__init__"
    name = owner.name if is_init and isinstance(owner, ast.ClassDef) else function.name
    calls = [node for node in ast.walk(source.tree) if isinstance(node, ast.Call)]
    return [call for call in calls if last_name(call.func) == name]


def aliases(source: PythonSource, function: str) -> set[str]:
    """Return the names by which a file calls a function."""
    names = {function}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom):
            names |= {each.asname for each in node.names if each.name == function and each.asname}
        if isinstance(node, ast.Assign) and last_name(node.value) in names:
            names |= {each.id for each in node.targets if isinstance(each, ast.Name)}
    return names
