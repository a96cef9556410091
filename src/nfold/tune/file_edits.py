"""Makes one edit of one Python file: keywords of a call, a wrapped value or a new statement."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from nfold.core.source_edit import AddStatement, SetKeywords, WrapExpression
from nfold.tune.keyword_arguments import CommandValue, set_keywords
from nfold.tune.name_bindings import (
    aliases,
    assigned_value,
    bindings,
    enclosing_function,
)
from nfold.tune.python_source import (
    Position,
    PythonSource,
    RefusedEdit,
    SourceRewrite,
    dotted_name,
    last_name,
    parse_expression,
)

COMPOUND = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.If, ast.For, ast.AsyncFor),
    *(ast.While, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match),
)
LEAVING = (ast.Return, ast.Raise, ast.Break, ast.Continue)
MODULE_METHODS = ("to", "cuda", "cpu", "float", "half", "bfloat16", "double", "train", "eval")
"""Methods of a module that return the module itself."""
TARGET, ASSIGNED = "{target}", "{assigned}"


def edit_source(
    source: PythonSource, position: Position, edit: SetKeywords | WrapExpression | AddStatement
) -> SourceRewrite | tuple[CommandValue, ...]:
    """Return an edit of a source, or the keywords that the command line sets instead.

    Raises:
        RefusedEdit: if the edit is not possible.
    """
    if isinstance(edit, SetKeywords):
        return set_keywords(source, position, edit)
    statement = find_statement(source, position)
    if isinstance(edit, WrapExpression):
        return _wrap(source, statement, edit, position)
    return _add_statement(source, statement, edit, position)


def find_statement(source: PythonSource, position: Position) -> ast.stmt:
    """Return the innermost statement whose code, without that of its blocks, is at a position."""
    found = [
        node
        for node in ast.walk(source.tree)
        if isinstance(node, ast.stmt)
        and source.line_at(source.start(node)) <= position.line <= _header_end(node)
    ]
    if position.offset is not None:
        offset = position.offset
        found = [node for node in found if source.start(node) <= offset < source.end(node)]
    around = {id(each) for node in found for each in source.ancestors(node)}
    found = [node for node in found if id(node) not in around]
    if not found:
        raise RefusedEdit("it has no statement")
    if len(found) > 1:
        raise RefusedEdit(f"it has {len(found)} statements: give the column too")
    return found[0]


def _header_end(statement: ast.stmt) -> int:
    """Return the last line of a statement, of a compound one that of its header."""
    if not isinstance(statement, COMPOUND):
        return statement.end_lineno or statement.lineno
    parts = [
        getattr(node, "end_lineno", None) or 0
        for node in ast.iter_child_nodes(statement)
        if not isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case)
    ]
    return max([statement.lineno, *parts])


def _wrap(
    source: PythonSource, statement: ast.stmt, edit: WrapExpression, position: Position
) -> SourceRewrite:
    if edit.template.count("{}") != 1:
        raise RefusedEdit(f"the template {edit.template!r} does not have {{}} once")
    if not edit.functions and _moves_in_place(statement):
        name = f"{TARGET} = {edit.template.replace('{}', TARGET)}"
        added = AddStatement(location=edit.location, statement=name, imports=edit.imports)
        return _add_statement(source, statement, added, position)
    if edit.functions:
        value: ast.expr | None = _outermost_call(source, statement, position, edit.functions)
        if value is None:
            raise RefusedEdit(f"it has no call of {' or '.join(edit.functions)}")
    else:
        value = _assigned(statement, position)
    start, end = source.start(value), source.end(value)
    prefix, _, suffix = edit.template.partition("{}")
    for opening, closing in (("", ""), ("(", ")")):
        rewrite = SourceRewrite(source)
        _add_imports(source, rewrite, statement, edit.imports)
        rewrite.insert(start, f"{prefix}{opening}".encode())
        rewrite.insert(end, f"{closing}{suffix}".encode())
        rewrite.replace_node(value, _filled(edit.template, rewrite.copy_of(value)))
        try:
            rewrite.finish()
        except RefusedEdit:
            if opening:
                raise
        else:
            break
    return rewrite


def _assigned(statement: ast.stmt, position: Position) -> ast.expr:
    """Return the value that a statement assigns."""
    if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
        return statement.value
    inner = [
        node
        for node in _header_nodes(statement)
        if isinstance(node, ast.NamedExpr)
        and node.lineno <= position.line <= (node.end_lineno or node.lineno)
    ]
    if len(inner) != 1:
        raise RefusedEdit("it assigns no value that could be wrapped")
    return inner[0].value


def _filled(template: str, value: ast.expr) -> ast.expr:
    """Return the expression of a template around a value."""
    hole = "__wrapped_value__"

    class Filler(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return value if node.id == hole else node

    filled: ast.expr = Filler().visit(parse_expression(template.replace("{}", hole)))
    return filled


def _moves_in_place(statement: ast.stmt) -> bool:
    """Return whether a statement is ``model.to(device)``, without a name for its value."""
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=owner, attr=method))):
            return method in MODULE_METHODS and bool(dotted_name(owner))
    return False


def _outermost_call(
    source: PythonSource, statement: ast.stmt, position: Position, functions: Sequence[str]
) -> ast.Call | None:
    """Return the last call of a chain ``model.to(device).to(dtype)`` at a position.

    Raises:
        RefusedEdit: if there are several chains.
    """
    found = [
        node
        for node in _header_nodes(statement)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in functions
        and node.lineno <= position.line <= (node.end_lineno or node.lineno)
        and not any(isinstance(each, ast.JoinedStr) for each in source.ancestors(node))
    ]
    # a traceback has the line of the called name
    found = [each for each in found if each.func.end_lineno == position.line] or found
    if position.offset is not None:
        offset = position.offset
        found = [each for each in found if source.start(each) <= offset < source.end(each)]
    inner = {id(part) for each in found for part in _chain(each)[1:]}
    found = [each for each in found if id(each) not in inner]
    if len(found) > 1:
        texts = " and ".join(source.code(each) for each in found)
        raise RefusedEdit(f"it has {len(found)} such calls, {texts}: give the column too")
    return found[0] if found else None


def _chain(node: ast.expr) -> list[ast.expr]:
    """Return a call of a method, and what it is called on, down to the first expression."""
    chain = [node]
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        node = node.func.value
        chain.append(node)
    return chain


def _header_nodes(statement: ast.stmt) -> list[ast.AST]:
    """Return the nodes of a statement without those of its blocks."""
    header = [each for each in ast.iter_child_nodes(statement) if not isinstance(each, ast.stmt)]
    return [node for part in header for node in ast.walk(part)]


def _target(source: PythonSource, statement: ast.stmt, position: Position) -> str:
    """Return the name of the model that a statement moves to a device, or of what it assigns."""
    moved = _outermost_call(source, statement, position, MODULE_METHODS)
    node: ast.AST | None = moved
    if moved is not None:
        parts = _chain(moved)
        methods = [part.func for part in parts if isinstance(part, ast.Call)]
        if dotted_name(parts[-1]) and all(last_name(each) in MODULE_METHODS for each in methods):
            return dotted_name(parts[-1])
    elif isinstance(statement, ast.Assign | ast.AnnAssign):
        node = statement.value
    name = _assigned_name(source, node) if node is not None else ""
    if not name:
        raise RefusedEdit("it gives its value no name")
    return name


def _name_of_value(statement: ast.stmt) -> str:
    """Return the name that a statement gives to its whole value."""
    match statement:
        case ast.Assign(targets=[target]) | ast.AnnAssign(target=target):
            if name := dotted_name(target):
                return name
    raise RefusedEdit("it gives its value no name")


def _assigned_name(source: PythonSource, node: ast.AST) -> str:
    """Return the name that a statement gives to a part of its value, "" if there is none.

    The part may be an argument of a call, as of DistributedDataParallel, whose ``module`` it is.
    """
    wrappers = aliases(source, "DistributedDataParallel") | aliases(source, "DataParallel")
    suffix = ""
    while True:
        parent = source.parent(node)
        match parent:
            case ast.Attribute(attr=method) if method in MODULE_METHODS:
                pass
            case ast.keyword(arg="module") | ast.IfExp():
                pass
            case ast.Call(func=function):
                is_first = node in (function, *parent.args[:1], *parent.keywords)
                if not is_first:
                    return ""
                suffix += ".module" * (last_name(function) in wrappers)
            case ast.Assign(targets=[target]) | ast.AnnAssign(target=target):
                return (name := dotted_name(target)) and name + suffix
            case ast.Tuple(elts=parts):
                owner = source.parent(parent)
                match owner:
                    case ast.Assign(targets=[ast.Tuple(elts=names)]) if len(names) == len(parts):
                        index = next(at for at, part in enumerate(parts) if part is node)
                        return (name := dotted_name(names[index])) and name + suffix
                return ""
            case _:
                return ""
        node = parent


def _add_statement(
    source: PythonSource, statement: ast.stmt, edit: AddStatement, position: Position
) -> SourceRewrite:
    code = edit.statement
    if TARGET in code:
        code = code.replace(TARGET, _target(source, statement, position))
    if ASSIGNED in code:
        code = code.replace(ASSIGNED, _name_of_value(statement))
    added = ast.parse(code).body
    rewrite = SourceRewrite(source)
    _add_imports(source, rewrite, statement, edit.imports)
    if edit.place == "after" and isinstance(statement, LEAVING):
        raise RefusedEdit("nothing after it is executed")
    statement = _outermost_if(source, statement)
    block = statement_block(source, statement)
    index = statement_index(block, statement)
    if edit.place == "before" and index == 0 and _is_docstring(source, statement):
        raise RefusedEdit("it is a docstring, which must be first")
    if not shares_line(source, statement, block):
        insert_statement(source, rewrite, statement, code, before=edit.place == "before")
        return rewrite
    if len(added) != 1 or isinstance(added[0], COMPOUND) or "\n" in code:
        raise RefusedEdit("it shares its line with other code")
    if edit.place == "before":
        rewrite.insert(source.start(statement), f"{code}; ".encode())
    else:
        rewrite.insert(source.end(statement), f"; {code}".encode())
    _insert_in_tree(source, rewrite, statement, added, edit.place == "before")
    return rewrite


def insert_statement(
    source: PythonSource, rewrite: SourceRewrite, statement: ast.stmt, code: str, *, before: bool
) -> None:
    """Add statements in lines of their own before or after one that shares its lines with no other."""
    _add_lines(source, rewrite, statement, code, before)
    _insert_in_tree(source, rewrite, statement, ast.parse(code).body, before)


def _insert_in_tree(
    source: PythonSource,
    rewrite: SourceRewrite,
    statement: ast.stmt,
    added: list[ast.stmt],
    before: bool,
) -> None:
    changed = statement_block_copy(source, rewrite, statement)
    at = statement_index(changed, rewrite.copy_of(statement)) + (not before)
    changed[at:at] = added


def _add_lines(
    source: PythonSource, rewrite: SourceRewrite, statement: ast.stmt, code: str, before: bool
) -> None:
    """Add the lines of a statement with the indentation of another one."""
    first = source.line_at(source.start(statement))
    indentation, line_break = source.indentation(first), source.line_break(first)
    lines = [indentation + line.encode() if line else b"" for line in code.splitlines()]
    text = line_break.join(lines)
    if before:
        rewrite.insert(source.line_start(first), text + line_break)
        return
    last = statement.end_lineno or statement.lineno
    if isinstance(statement, COMPOUND):
        last = _after_comments(source, last, indentation)
    at = source.next_line(last)
    ends_line = at > source.line_end(last)
    rewrite.insert(at, text + line_break if ends_line else line_break + text)


def _after_comments(source: PythonSource, last: int, indentation: bytes) -> int:
    """Return the last line of a block with the comments behind its statements."""
    for line in range(last + 1, source.line_count + 1):
        text = source.line(line)
        own = source.indentation(line)
        if text.strip() and not (text.strip().startswith(b"#") and len(own) > len(indentation)):
            break
        if text.strip():
            last = line
    return last


def _outermost_if(source: PythonSource, statement: ast.stmt) -> ast.stmt:
    """Return the ``if`` of which a statement is an ``elif``, or the statement."""
    while isinstance(statement, ast.If) and source.code(statement).startswith("elif"):
        parent = source.parent(statement)
        assert isinstance(parent, ast.If)
        statement = parent
    return statement


def statement_block(source: PythonSource, statement: ast.stmt) -> list[ast.stmt]:
    """Return the statements of the block that a statement is in."""
    parent = source.parent(statement)
    assert parent is not None
    for _, content in ast.iter_fields(parent):
        if isinstance(content, list) and any(each is statement for each in content):
            return content
    raise AssertionError("a statement is in a block")


def statement_block_copy(
    source: PythonSource, rewrite: SourceRewrite, statement: ast.stmt
) -> list[ast.stmt]:
    parent = source.parent(statement)
    assert parent is not None
    block = statement_block(source, statement)
    for field, content in ast.iter_fields(parent):
        if content is block:
            copied: list[ast.stmt] = getattr(rewrite.copy_of(parent), field)
            return copied
    raise AssertionError("a block is a field")


def statement_index(block: Sequence[ast.stmt], statement: ast.stmt) -> int:
    return next(index for index, each in enumerate(block) if each is statement)


def _is_docstring(source: PythonSource, statement: ast.stmt) -> bool:
    owners = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    if not isinstance(source.parent(statement), owners):
        return False
    match statement:
        case ast.Expr(value=ast.Constant(value=str())):
            return True
    return False


def shares_line(source: PythonSource, statement: ast.stmt, block: Sequence[ast.stmt]) -> bool:
    """Return whether other code is before a statement in its line, or another statement behind."""
    start = source.start(statement)
    if source.text[source.line_start(source.line_at(start)) : start].strip():
        return True
    index = statement_index(block, statement)
    return index + 1 < len(block) and block[index + 1].lineno == statement.end_lineno


def _add_imports(
    source: PythonSource, rewrite: SourceRewrite, statement: ast.stmt, imports: Sequence[str]
) -> None:
    """Add imports behind the last one at the top of a file, unless their names are there."""
    top = next((each for each in source.ancestors(statement) if _is_top(source, each)), statement)
    lines = []
    for code in imports:
        (needed,) = ast.parse(code).body
        assert isinstance(needed, ast.Import | ast.ImportFrom)
        if not _is_imported(source, statement, needed):
            lines.append(code)
    if not lines:
        return
    body = source.tree.body
    before = body[: statement_index(body, top)]  # type: ignore[arg-type]
    after = 0
    for index, each in enumerate(before):
        is_first_text = index == 0 and _is_docstring(source, each)
        if is_first_text or isinstance(each, ast.Import | ast.ImportFrom):
            after = index + 1
    while 0 < after < len(body) and body[after].lineno == body[after - 1].end_lineno:
        after += 1  # statements in the same line
    line = source.line_at(source.start(body[0]))
    line_break = source.line_break(line)
    text = b"".join(code.encode() + line_break for code in lines)
    if after:
        last = body[after - 1]
        at = source.next_line(last.end_lineno or last.lineno)
        is_docstring = after == 1 and _is_docstring(source, last)
        rewrite.insert(at, (line_break if is_docstring else b"") + text)
    else:
        rewrite.insert(source.line_start(line), text)
    changed = rewrite.copy_of(source.tree).body
    at_index = after
    changed[at_index:at_index] = [node for code in lines for node in ast.parse(code).body]


def _is_top(source: PythonSource, node: ast.AST) -> bool:
    return source.parent(node) is source.tree


def _is_imported(
    source: PythonSource, statement: ast.stmt, needed: ast.Import | ast.ImportFrom
) -> bool:
    """Return whether a statement sees the name of an import.

    Raises:
        RefusedEdit: if something else has the name.
    """
    name = needed.names[0].asname or needed.names[0].name.partition(".")[0]
    function = enclosing_function(source, statement)
    scopes = [source.tree] if function is None else [function, source.tree]
    for scope in scopes:
        found = bindings(scope, name)
        same = [each for each in found if _is_same_import(each, needed, name)]
        other = [each for each in found if each not in same and not _is_none(source, each)]
        earlier = [each for each in same if source.start(each) < source.start(statement)]
        if found and (other or (scope is function and not earlier)):
            line = source.origin_line(found[0])
            raise RefusedEdit(f"the new statement needs the name {name}, which line {line} sets")
        usable = earlier if function is None or scope is function else same
        if any(not _is_for_types(source, each) for each in usable):
            return True
    return False


def _is_same_import(node: ast.AST, needed: ast.Import | ast.ImportFrom, name: str) -> bool:
    """Return whether an import binds the name to the same object."""
    match node, needed:
        case ast.Import(names=names), ast.Import(names=[wanted]):
            if wanted.asname:
                return any((e.name, e.asname) == (wanted.name, name) for e in names)
            return any(not e.asname and e.name.partition(".")[0] == name for e in names)
        case ast.ImportFrom(module=module, names=names), ast.ImportFrom(names=[wanted]):
            same = (e.name == wanted.name and (e.asname or e.name) == name for e in names)
            return module == needed.module and any(same)
    return False


def _is_none(source: PythonSource, node: ast.AST) -> bool:
    """Return whether a name is set to None, as where an optional import fails."""
    value = assigned_value(source, node)
    return isinstance(value, ast.Constant) and value.value is None


def _is_for_types(source: PythonSource, node: ast.AST) -> bool:
    tests = [each.test for each in source.ancestors(node) if isinstance(each, ast.If)]
    return any(dotted_name(test).endswith("TYPE_CHECKING") for test in tests)
