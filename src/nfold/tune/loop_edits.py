"""Makes one edit of a training loop: gradients exchanged once a step, numbers read after the loop."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from nfold.core.source_edit import AddUpOnDevice, ExchangeOnce
from nfold.tune.file_edits import (
    find_statement,
    insert_statement,
    shares_line,
    statement_block,
    statement_index,
)
from nfold.tune.name_bindings import aliases
from nfold.tune.python_source import (
    Position,
    PythonSource,
    RefusedEdit,
    Scope,
    SourceRewrite,
    last_name,
    parse_expression,
)

Loop = ast.For | ast.While
GATE = "require_backward_grad_sync"  # of DistributedDataParallel; no_sync() sets it too


def edit_loop(
    source: PythonSource, position: Position, edit: ExchangeOnce | AddUpOnDevice
) -> SourceRewrite:
    """Return an edit of a source.

    Raises:
        RefusedEdit: if the edit is not possible.
    """
    statement = find_statement(source, position)
    if isinstance(edit, ExchangeOnce):
        return _exchange_once(source, statement)
    return _add_up_on_device(source, statement)


def _exchange_once(source: PythonSource, step: ast.stmt) -> SourceRewrite:
    """Set before each batch whether its backward exchanges gradients."""
    loop, condition = _accumulation(source, step)
    tree = parse_expression(condition)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and last_name(node.func) != "len":
            raise RefusedEdit(f"its condition {condition} calls a function")
        if isinstance(node, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom):
            raise RefusedEdit(f"its condition {condition} does more than compare")
    changed = {
        last_name(node)
        for one in loop.body
        for node in ast.walk(one)
        if isinstance(node, ast.Name | ast.Attribute) and not isinstance(node.ctx, ast.Load)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and last_name(node) in changed:
            name = last_name(node)
            raise RefusedEdit(f"its condition {condition} uses {name}, which the loop changes")
    model = _wrapped_name(source, loop)
    first = loop.body[0]
    if shares_line(source, first, loop.body):
        raise RefusedEdit("its loop is in one line")
    rewrite = SourceRewrite(source)
    text = f"({condition})" if "\n" in condition else condition
    insert_statement(source, rewrite, first, f"{model}.{GATE} = {text}", before=True)
    return rewrite


def _accumulation(source: PythonSource, step: ast.stmt) -> tuple[Loop, str]:
    """Return the loop over the batches, and on which condition a batch is the last of a step."""
    path = [step, *source.ancestors(step)]
    at = next(i for i, one in enumerate(path) if i and isinstance(one, ast.If | Loop | Scope))
    branch, inside = path[at], path[at - 1]
    if isinstance(branch, ast.If) and inside in branch.body:
        loop = next(one for one in path[at + 1 :] if not isinstance(one, ast.With))
        if isinstance(loop, Loop):
            return loop, source.code(branch.test)
    block = statement_block(source, step)
    for before in reversed(block[: statement_index(block, step)]):
        match before:
            case ast.For(
                target=ast.Name(id=name),
                iter=ast.Call(func=ast.Name(id="range"), args=[count], keywords=[]),
            ) if any(last_name(call.func) == "backward" for call in _calls(before.body)):
                return before, f"{name} == {source.code(count)} - 1"
    raise RefusedEdit("no condition in a loop over the batches decides on it")


def _wrapped_name(source: PythonSource, loop: Loop) -> str:
    """Return the name of DistributedDataParallel by which a loop calls it."""
    wrappers = aliases(source, "DistributedDataParallel")
    wrapped = {
        target.id
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Assign) and last_name(_called(node.value)) in wrappers
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found = {call.func.id for call in _calls(loop.body) if isinstance(call.func, ast.Name)}
    if len(found & wrapped) != 1:
        raise RefusedEdit("its loop calls no name of DistributedDataParallel")
    (name,) = found & wrapped
    return name


def _add_up_on_device(source: PythonSource, statement: ast.stmt) -> SourceRewrite:
    """Add tensors up, and read the sum after the loop."""
    match statement:
        case ast.AugAssign(target=ast.Name(id=total), op=ast.Add(), value=value):
            reads = [one for one in _calls([value]) if last_name(one.func) == "item"]
        case _:
            raise RefusedEdit("it does not add the value to a name")
    if len(reads) != 1 or reads[0].args or reads[0].keywords:
        raise RefusedEdit("it has no one .item()")
    around = source.ancestors(statement)
    loop = next(one for one in around if isinstance(one, Loop | Scope))
    if not isinstance(loop, Loop):
        raise RefusedEdit("it is in no loop")
    others = [one for one in _names([loop]) if one.id == total and one is not statement.target]
    if others:
        raise RefusedEdit(f"line {source.origin_line(others[0])} in the loop needs {total} too")
    block = statement_block(source, loop)
    if loop.orelse or shares_line(source, loop, block):
        raise RefusedEdit("its loop has other code in its lines, or an else")
    rewrite, read = SourceRewrite(source), reads[0].func
    assert isinstance(read, ast.Attribute)
    rewrite.replace(source.end(read) - len("item"), source.end(read), b"detach")
    rewrite.copy_of(read).attr = "detach"
    # Without a batch, the total is still the number with which it began.
    text = f'{total} = {total}.item() if hasattr({total}, "item") else {total}'
    insert_statement(source, rewrite, loop, text, before=False)
    return rewrite


def _called(node: ast.expr) -> ast.expr:
    return node.func if isinstance(node, ast.Call) else node


def _calls(nodes: list[ast.stmt] | list[ast.expr]) -> Iterator[ast.Call]:
    for each in nodes:
        yield from (node for node in ast.walk(each) if isinstance(node, ast.Call))


def _names(nodes: list[ast.stmt]) -> Iterator[ast.Name]:
    for each in nodes:
        yield from (node for node in ast.walk(each) if isinstance(node, ast.Name))
