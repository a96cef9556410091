"""Sets keyword arguments of one call in a Python file, in the style of the call."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass

from nfold.core.source_edit import SetKeywords
from nfold.tune.command_flags import CommandChange, find_command_change
from nfold.tune.name_bindings import (
    aliases,
    assigned_value,
    bindings,
    lookup,
    single_value,
)
from nfold.tune.python_source import (
    Position,
    PythonSource,
    RefusedEdit,
    SourceRewrite,
    last_name,
    parse_expression,
)

POSITIONAL: dict[str, tuple[str, ...]] = {
    "DataLoader": (
        *("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers"),
        *("collate_fn", "pin_memory", "drop_last", "timeout", "worker_init_fn"),
        *("multiprocessing_context", "generator"),
    ),
    "DistributedDataParallel": (
        *("module", "device_ids", "output_device", "dim", "broadcast_buffers", "init_sync"),
        *("process_group", "bucket_cap_mb", "find_unused_parameters", "check_reduction"),
        *("gradient_as_bucket_view", "static_graph"),
    ),
    "zero_grad": ("set_to_none",),
    "cuda": ("device", "non_blocking"),
    "set_detect_anomaly": ("mode", "check_nan"),
    "set_num_threads": ("count",),  # has no name in PyTorch, and is always there
}
"""The parameters of functions that calls may pass by position, in order."""
BLACK_WIDTH = 88
LITERALS = (
    *(ast.Constant, ast.UnaryOp, ast.BinOp, ast.Tuple, ast.List, ast.Dict, ast.Set),
    *(ast.operator, ast.unaryop, ast.expr_context),
)


@dataclass(frozen=True)
class CommandValue:
    """A keyword whose value comes from the command line."""

    keyword: str
    expression: str
    change: CommandChange


def set_keywords(
    source: PythonSource, position: Position, edit: SetKeywords
) -> SourceRewrite | tuple[CommandValue, ...]:
    """Set keywords of the calls of a function at a position.

    Returns:
        The edit; if the command line sets some of the keywords, these, and no edit.

    Raises:
        RefusedEdit: if the call is not found, or a keyword cannot be set.
    """
    rewrite = SourceRewrite(source)
    from_command: list[CommandValue] = []
    for call in _find_calls(source, position, edit.function, every=edit.every_call):
        from_command += _set_in_call(source, rewrite, call, edit)
    if from_command:
        return tuple(dict.fromkeys(from_command))
    if not rewrite.splices:
        settings = " and ".join(f"{name}={value}" for name, value in edit.keywords)
        raise RefusedEdit(f"it passes {settings} already")
    return rewrite


def _set_in_call(
    source: PythonSource, rewrite: SourceRewrite, call: ast.Call, edit: SetKeywords
) -> list[CommandValue]:
    """Set keywords of one call; return those that the command line sets."""
    added, from_command = [], []
    for name, value in edit.keywords:
        place = _find_value(source, call, edit.function, name, value)
        if isinstance(place, CommandValue):
            from_command.append(place)
            continue
        owner, present = place
        if present is None:
            added.append((owner, name, value))
            continue
        if ast.dump(present) == ast.dump(parse_expression(value)):
            continue
        found = _command_value(source, present, name, value)
        if found is not None:
            from_command.append(found)
            continue
        rewrite.replace(source.start(present), source.end(present), value.encode())
        rewrite.replace_node(present, parse_expression(value))
    if not from_command:
        for owner in dict.fromkeys(each[0] for each in added):
            _add_items(source, rewrite, owner, [each[1:] for each in added if each[0] is owner])
    return from_command


def _find_calls(
    source: PythonSource, position: Position, function: str, *, every: bool
) -> list[ast.Call]:
    """Return the calls of a function at a position: one, or ``every`` one."""
    calls = [
        node
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call)
        and node.lineno <= position.line <= (node.end_lineno or node.lineno)
    ]
    names = aliases(source, function)
    found = [
        call
        for call in calls
        if (isinstance(call.func, ast.Name) and call.func.id in names)
        or (isinstance(call.func, ast.Attribute) and call.func.attr == function)
    ]
    if not found:
        raise RefusedEdit(_indirect_call(source, calls, names, function))
    if position.offset is not None:
        offset = position.offset
        around = [each for each in found if source.start(each) <= offset < source.end(each)]
        found = sorted(around, key=source.start)[-1:]
        if not found:
            raise RefusedEdit(f"no call of {function} is at this column")
    if len(found) > 1:  # a traceback has the line of the called name
        found = [each for each in found if each.func.end_lineno == position.line] or found
    if len(found) > 1 and not every:
        raise RefusedEdit(f"it has {len(found)} calls of {function}: give the column too")
    for call in found:
        _refuse_call(source, call, function)
    return found


def _refuse_call(source: PythonSource, call: ast.Call, function: str) -> None:
    """Raise RefusedEdit if a call cannot be edited, or calls something else of the same name."""
    if any(isinstance(each, ast.JoinedStr) for each in source.ancestors(call)):
        raise RefusedEdit(f"the call of {function} is in an f-string")
    if isinstance(call.func, ast.Name):
        own = [each for each in bindings(source.tree, call.func.id) if _is_definition(each)]
        if own:
            raise RefusedEdit(
                f"{call.func.id} is defined in line {source.origin_line(own[0])} of this file"
            )


def _is_definition(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)


def _indirect_call(
    source: PythonSource, calls: Sequence[ast.Call], names: set[str], function: str
) -> str:
    """Return why no call is a plain call of a function."""
    for call in calls:
        binding = None
        if isinstance(call.func, ast.Name):
            _, found = lookup(source, call.func.id, call)
            binding = found[0] if found else None
        owner = next((o for o in source.ancestors(call) if isinstance(o, ast.ClassDef)), None)
        in_init = isinstance(call.func, ast.Attribute) and call.func.attr == "__init__"
        subclass = binding if isinstance(binding, ast.ClassDef) else owner if in_init else None
        if subclass is not None and any(last_name(base) in names for base in subclass.bases):
            line = source.origin_line(subclass)
            return f"{subclass.name} (line {line}) is a subclass of {function}: edit its class"
        value = assigned_value(source, binding) if binding else None
        partial = value if isinstance(value, ast.Call) else call
        of = last_name(partial.args[0]) if partial.args else ""
        if last_name(partial.func) == "partial" and of in names:
            line = source.origin_line(partial)
            return f"line {line} makes a functools.partial of {function}: edit it there"
    return f"it has no call of {function}"


_Place = tuple[ast.Call | ast.Dict, ast.expr | None]
"""The call or dictionary that has a keyword or may get it, and its present value."""


def _find_value(
    source: PythonSource, call: ast.Call, function: str, name: str, value: str
) -> _Place | CommandValue:
    for keyword in call.keywords:
        if keyword.arg == name:
            return call, keyword.value
    names = POSITIONAL.get(function, ())
    stars = [each for each in call.args if isinstance(each, ast.Starred)]
    if stars:
        raise RefusedEdit(f"{source.code(stars[0])} may pass {name} already")
    index = names.index(name) if name in names else len(call.args)
    if index < len(call.args):
        return call, call.args[index]
    owner: ast.Call | ast.Dict = call
    for keyword in call.keywords:
        if keyword.arg is None:
            found = _value_in_dictionary(source, call, keyword.value, name, value)
            if isinstance(found, CommandValue) or found[1] is not None:
                return found
            owner = found[0]
    return owner, None


def _value_in_dictionary(
    source: PythonSource, call: ast.Call, expression: ast.expr, name: str, value: str
) -> _Place | CommandValue:
    """Return the value of a key of ``**expression``, and where to add it."""
    change = find_command_change(source, expression, value, name)
    if change is not None:
        return CommandValue(name, f"**{source.code(expression)}", change)
    shared: list[str] = []
    literal: ast.expr | None = expression
    if isinstance(expression, ast.Name):
        literal = _dictionary_literal(source, call, expression, name)
        shared = _other_readers(source, expression)
    entries = _entries(literal)
    if entries is None or not isinstance(literal, ast.Dict | ast.Call):
        code = source.code(expression)
        raise RefusedEdit(f"**{code} may pass {name}, and is no dictionary literal")
    present = entries.get(name)
    if shared and present is not None:
        code, lines = source.code(expression), ", ".join(shared)
        raise RefusedEdit(f"**{code} sets {name}, and is also used in line {lines}")
    return (call if shared else literal), present


def _dictionary_literal(
    source: PythonSource, call: ast.Call, name: ast.Name, key: str
) -> ast.expr | None:
    """Return the literal that a name of a dictionary is bound to, if nothing else changes it."""
    scope, found = lookup(source, name.id, name)
    text = f"**{name.id} may pass {key}"
    if scope is not source.scope(call) or not found:
        raise RefusedEdit(f"{text}, and is not a variable of the same function")
    line = source.origin_line(found[0])
    if any(isinstance(each, ast.arg) for each in found):
        raise RefusedEdit(f"{text}, and is a parameter (line {line})")
    if len(found) > 1:
        lines = ", ".join(str(source.origin_line(each)) for each in found)
        raise RefusedEdit(f"{text}, and lines {lines} assign it")
    literal = single_value(source, name)
    if _entries(literal) is None:
        raise RefusedEdit(f"{text}, and line {line} does not set it to a dictionary literal")
    for node in ast.walk(scope):
        if isinstance(node, ast.Name) and node.id == name.id and _may_change(source, node):
            line = source.origin_line(node)
            raise RefusedEdit(f"{text}, and line {line} may change it")
    return literal


def _entries(node: ast.expr | None) -> dict[str, ast.expr] | None:
    """Return the entries of ``{"key": value}`` or ``dict(key=value)``, None of others."""
    match node:
        case ast.Dict(keys=keys, values=values):
            names = [each.value if isinstance(each, ast.Constant) else None for each in keys]
        case ast.Call(func=ast.Name(id="dict"), args=[], keywords=keywords):
            names, values = [each.arg for each in keywords], [each.value for each in keywords]
        case _:
            return None
    if not all(isinstance(each, str) for each in names) or len(set(names)) < len(names):
        return None
    return {str(name): value for name, value in zip(names, values, strict=True)}


def _may_change(source: PythonSource, node: ast.Name) -> bool:
    """Return whether a use of a dictionary may change it: all but ``**name`` and reading a key."""
    parent = source.parent(node)
    match parent:
        case ast.keyword(arg=None) | ast.Assign() | ast.AnnAssign() | ast.NamedExpr():
            return not isinstance(parent, ast.keyword) and isinstance(node.ctx, ast.Load)
        case ast.Subscript(value=value, ctx=ast.Load()) if value is node:
            return False
        case ast.Dict(keys=keys, values=values):
            return keys[values.index(node)] is not None
    return True


def _other_readers(source: PythonSource, name: ast.Name) -> list[str]:
    """Return the lines that read a variable elsewhere, in its scope and in functions there."""
    scope, _ = lookup(source, name.id, name)
    lines = [
        source.origin_line(node)
        for node in ast.walk(scope)
        if isinstance(node, ast.Name)
        and node.id == name.id
        and isinstance(node.ctx, ast.Load)
        and node is not name
    ]
    return [str(line) for line in sorted(set(lines))]


def _command_value(
    source: PythonSource, present: ast.expr, name: str, value: str
) -> CommandValue | None:
    """Return the command's option for a value that is no literal, None for a literal.

    Raises:
        RefusedEdit: if no option sets the value.
    """
    if all(isinstance(node, LITERALS) for node in ast.walk(present)):
        return None
    code = source.code(present)
    change = find_command_change(source, present, value)
    if change is not None:
        return CommandValue(name, code, change)
    where = ""
    if isinstance(present, ast.Name):
        _, found = lookup(source, present.id, present)
        lines = ", ".join(str(source.origin_line(each)) for each in found)
        kind = "parameter in " if any(isinstance(each, ast.arg) for each in found) else ""
        where = f" ({kind}line {lines})" if found else ""
    raise RefusedEdit(f"{name} is set by {code}{where}, which is no literal")


def _add_items(
    source: PythonSource,
    rewrite: SourceRewrite,
    owner: ast.Call | ast.Dict,
    items: Sequence[tuple[str, str]],
) -> None:
    """Add keywords to a call, or entries to a dictionary literal."""
    changed = rewrite.copy_of(owner)
    if isinstance(changed, ast.Dict):
        for name, value in items:
            changed.keys.append(ast.Constant(name))
            changed.values.append(parse_expression(value))
    else:
        for name, value in items:
            changed.keywords.append(ast.keyword(name, parse_expression(value)))
    if isinstance(owner, ast.Dict):
        nodes: list[ast.AST] = [each for each in owner.keys if each is not None]
        quote = source.code(nodes[0])[-1] if nodes else '"'
        texts = [f"{quote}{name}{quote}: {value}" for name, value in items]
        opening = source.start(owner)
    else:
        nodes = sorted([*owner.args, *owner.keywords], key=source.start)
        opening = _opening(source, owner)
        if nodes and source.start(nodes[0]) == opening:
            raise RefusedEdit("its argument is a generator without parentheses of its own")
        sign = " = " if _spaces_around_sign(source, owner) else "="
        texts = [f"{name}{sign}{value}" for name, value in items]
    _ItemList(source, rewrite, opening, source.end(owner) - 1, nodes).add(
        [text.encode() for text in texts]
    )


def _opening(source: PythonSource, call: ast.Call) -> int:
    """Return the offset of the parenthesis that opens the arguments of a call."""
    depth = 0
    for token in reversed(source.tokens_between(source.start(call), source.end(call))):
        depth += (token.text in (")", "]", "}")) - (token.text in ("(", "[", "{"))
        if not depth and not token.is_layout:
            return token.start
    raise RefusedEdit("its parentheses are not found")


def _spaces_around_sign(source: PythonSource, call: ast.Call) -> bool:
    named = [each for each in call.keywords if each.arg is not None]
    return bool(named) and all(re.match(r"\w+ = ", source.code(each)) is not None for each in named)


class _ItemList:
    """Arguments or entries between two brackets, to which new ones are added at the end."""

    def __init__(
        self,
        source: PythonSource,
        rewrite: SourceRewrite,
        opening: int,
        closing: int,
        nodes: Sequence[ast.AST],
    ) -> None:
        self._source, self._rewrite = source, rewrite
        self._opening = opening
        inner = source.tokens_between(opening + 1, closing)
        code = [token for token in inner if not token.is_layout]
        self._end = code[-1].end if code else opening + 1
        self._has_comma = bool(code) and code[-1].text == ","
        self._starts = [source.start(node) for node in nodes]
        self._is_hanging = source.line_at(self._end) < source.line_at(closing)

    def add(self, texts: list[bytes]) -> None:
        if not self._starts:
            self._rewrite.insert(self._end, b", ".join(texts))
        elif self._has_own_lines or not self._fits(texts):
            self._add_lines(texts)
        else:
            text = b", ".join(texts)
            new = b" " + text + b"," if self._has_comma else b", " + text
            self._rewrite.insert(self._end, new)

    @property
    def _last_line(self) -> int:
        return self._source.line_at(self._starts[-1])

    @property
    def _has_own_lines(self) -> bool:
        """Return whether each item begins a line, apart from one behind the opening bracket."""
        lines = [self._source.line_at(start) for start in self._starts]
        before = self._source.text[self._source.line_start(self._last_line) : self._starts[-1]]
        return not before.strip(b" \t\f(") and len(set(lines)) == len(lines)

    def _fits(self, texts: list[bytes]) -> bool:
        """Return whether the last line stays as long as others, or the list is on one line."""
        first, last = self._source.line_at(self._opening), self._source.line_at(self._end)
        if first == last and not self._is_hanging:
            return True
        widths = [len(self._source.line(line).decode()) for line in range(first, last + 1)]
        added = sum(len(text) + 2 for text in texts)
        return widths[-1] + added <= max(BLACK_WIDTH, *widths)

    def _add_lines(self, texts: list[bytes]) -> None:
        source, line_break = self._source, self._source.line_break(self._last_line)
        lines = [line_break + self._indentation + text for text in texts]
        if not self._has_comma:
            self._rewrite.insert(self._end, b",")
        tail = b"," if self._has_comma else b""
        at = source.line_end(source.line_at(self._end)) if self._is_hanging else self._end
        self._rewrite.insert(at, b",".join(lines) + tail)

    @property
    def _indentation(self) -> bytes:
        """Return the white space before a new line: that of items, or below the first one."""
        source = self._source
        line = source.line_at(self._starts[-1])
        if line != source.line_at(self._opening):
            return source.indentation(line)
        before = source.text[source.line_start(line) : self._starts[0]]
        own = source.indentation(line)
        return own + b" " * len(before[len(own) :].decode())
