"""Makes one edit of a Python file: an expression replaced, a statement removed or made conditional."""

from __future__ import annotations

import ast
import tokenize

from nfold.core.source_edit import GuardStatement, RemoveStatement, ReplaceExpression
from nfold.tune.file_edits import (
    COMPOUND,
    find_statement,
    shares_line,
    statement_block,
    statement_block_copy,
    statement_index,
)
from nfold.tune.python_source import (
    Position,
    PythonSource,
    RefusedEdit,
    SourceRewrite,
    parse_expression,
)

INDENTATION = b"    "


def edit_statement(
    source: PythonSource,
    position: Position,
    edit: ReplaceExpression | RemoveStatement | GuardStatement,
) -> SourceRewrite:
    """Return an edit of a source.

    Raises:
        RefusedEdit: if the edit is not possible.
    """
    if isinstance(edit, ReplaceExpression):
        return _replace(source, position, edit)
    statement = find_statement(source, position)
    if isinstance(statement, COMPOUND):
        raise RefusedEdit("it has a block of statements")
    if isinstance(edit, RemoveStatement):
        return _remove(source, statement)
    return _guard(source, statement, edit.condition)


def _replace(source: PythonSource, position: Position, edit: ReplaceExpression) -> SourceRewrite:
    found = [
        node
        for node in ast.walk(source.tree)
        if isinstance(node, ast.expr)
        and source.start(node) == position.offset
        and source.code(node) == edit.old
    ]
    if not found:
        raise RefusedEdit(f"it has no {edit.old} there")
    old, new = found[0], parse_expression(edit.new)
    for text in (edit.new, f"({edit.new})"):
        rewrite = SourceRewrite(source)
        rewrite.replace(source.start(old), source.end(old), text.encode())
        rewrite.replace_node(old, new)
        try:
            rewrite.finish()
        except RefusedEdit:
            if text != edit.new:
                raise
        else:
            break
    return rewrite


def _remove(source: PythonSource, statement: ast.stmt) -> SourceRewrite:
    rewrite, block = SourceRewrite(source), statement_block(source, statement)
    start, end = source.start(statement), source.end(statement)
    changed = statement_block_copy(source, rewrite, statement)
    at = statement_index(block, statement)
    if len(block) == 1:
        rewrite.replace(start, end, b"pass")
        changed[at] = ast.Pass()
        return rewrite
    if shares_line(source, statement, block):
        raise RefusedEdit("it shares its line with other code")
    first, last = source.line_at(start), source.line_at(end)
    rest = source.text[end : source.line_end(last)]
    if rest.strip():  # a comment stays
        rewrite.replace(start, end + len(rest) - len(rest.lstrip()), b"")
    else:
        rewrite.replace(source.line_start(first), source.next_line(last), b"")
    del changed[at]
    return rewrite


def _guard(source: PythonSource, statement: ast.stmt, condition: str) -> SourceRewrite:
    block = statement_block(source, statement)
    if shares_line(source, statement, block):
        raise RefusedEdit("it shares its line with other code")
    rewrite = SourceRewrite(source)
    start, end = source.start(statement), source.end(statement)
    first, last = source.line_at(start), source.line_at(end)
    outer, unit = source.indentation(first), _indentation_unit(source, statement)
    header = f"if {condition}:".encode() + source.line_break(first)
    rewrite.insert(start, header + outer + unit)
    for line in range(first + 1, last + 1):
        begin = source.line_start(line)
        if source.line(line).strip() and not _is_in_string(source, begin):
            rewrite.insert(begin, unit)
    changed = statement_block_copy(source, rewrite, statement)
    at = statement_index(block, statement)
    changed[at] = ast.If(test=parse_expression(condition), body=[changed[at]], orelse=[])
    return rewrite


def _indentation_unit(source: PythonSource, statement: ast.stmt) -> bytes:
    """Return by how much a block around a statement is indented, four spaces without one."""
    own = source.indentation(source.line_at(source.start(statement)))
    for parent in source.ancestors(statement):
        if isinstance(parent, COMPOUND):
            outer = source.indentation(source.line_at(source.start(parent)))
            if own.startswith(outer) and len(own) > len(outer):
                return own[len(outer) :]
    return INDENTATION


def _is_in_string(source: PythonSource, offset: int) -> bool:
    # From Python 3.12 on an f-string is several tokens; the text between them has a line break.
    kinds = {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    return any(t.kind in kinds and t.start < offset < t.end for t in source.tokens)
