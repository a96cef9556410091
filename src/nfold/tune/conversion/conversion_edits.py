"""The edits that convert a plain training script, or one with nn.DataParallel, to ``nfold.Run``.

Only a plain loop is converted: names of a model, an optimizer and a DataLoader in one file. What
stands in the way otherwise is a line with a reason.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nfold.core.script_profile import ScriptProfile
from nfold.core.source_edit import (
    AddStatement,
    GuardStatement,
    RemoveStatement,
    ReplaceExpression,
    SourceEdit,
)
from nfold.tune.conversion.training_names import (
    NamedOptimizer,
    NamedValue,
    NotConvertible,
    find_loader,
    find_optimizer,
    is_stored,
    uses,
)
from nfold.tune.file_edits import statement_block, statement_index
from nfold.tune.name_bindings import Function, aliases, bindings
from nfold.tune.python_source import (
    PythonSource,
    RefusedEdit,
    dotted_name,
    last_name,
    read_source,
)
from nfold.tune.source_patch import LOCATION

SAMPLERS = ("", "RandomSampler", "SequentialSampler", "_InfiniteConstantSampler")
"""Samplers of a DataLoader that nfold.Run replaces by its own, with the same samples."""
LOADER_ATTRIBUTES = ("dataset",)  # of a DataLoader that a loader of nfold.Run has too
INDEXED_DEVICE = re.compile(r"cuda:\d+")
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
WRITERS = re.compile(
    r"(.*\.)?(to_csv|savefig|write_text|write_bytes|SummaryWriter|save_pretrained|mkdir|makedirs)"
    r"|shutil\.(copy|copy2|copyfile|move)|np\.savez?|wandb\.init",
    re.DOTALL,
)
"""Calls that write files."""
WRITE_MODE = re.compile(r"[wax]b?\+?t?")
MAX_NOTES = 4
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """Edits of a script that make it data-parallel with nfold.Run.

    Attributes:
        obstacle: why there are no edits, ``train.py:31: reason``; empty if there are.
        notes: what to check by hand, with lines.
    """

    edits: tuple[SourceEdit, ...] = ()
    obstacle: str = ""
    notes: tuple[str, ...] = ()


def plan_conversion(profile: ScriptProfile, script: str, folder: Path) -> Conversion:
    """Return the conversion of a script.

    ``script`` is its path as the profile names it, relative to ``folder`` if it is below it.
    """
    refusal = profile_obstacle(profile)
    optimizers = [one.line for one in profile.source_locations.get("optimizer", ())]
    if not refusal and not optimizers:
        refusal = f"{script}: the line that constructs the optimizer is not known"
    if refusal:
        return Conversion(obstacle=refusal)
    places = [place for line in optimizers if (place := LOCATION.fullmatch(line)) is not None]
    file = places[0]["file"]
    try:
        source = read_source(folder / file)
    except RefusedEdit as refused:
        return Conversion(obstacle=f"{file}: {refused}")
    converter = _Converter(source, file, profile, is_main=file == script)
    try:
        for place in places:
            if place["file"] != file:
                text = "it constructs an optimizer, as another file does"
                return Conversion(obstacle=f"{place[0]}: {text}")
        edits = converter.edits([int(place["line"]) for place in places])
    except NotConvertible as obstacle:
        return Conversion(obstacle=f"{file}:{obstacle.line}: {obstacle}")
    return Conversion(edits=tuple(edits), notes=tuple(converter.notes[:MAX_NOTES]))


def profile_obstacle(profile: ScriptProfile) -> str:
    """Return what the probe run observed that nfold.Run cannot take over; empty if nothing."""
    loader = profile.loader
    step = profile.most_frequent_line("step") or "its loop"
    if profile.trainer:
        line = profile.most_frequent_line("trainer") or "the script"
        return f"{line}: {profile.trainer} moves the model and the batches to devices itself"
    if profile.process_group or profile.parallel not in ("none", "dp"):
        return f"{step}: the script divides its work over processes itself"
    if loader is None:
        return f"{step}: no DataLoader makes the batches of its steps"
    created = loader.created_at or step
    if profile.companion_loaders:
        line = profile.companion_loaders[0].created_at or step
        return f"{line}: a second DataLoader gives a batch in every step"
    if loader.batch_size is None:
        return f"{created}: the batch size of the DataLoader is not known"
    if loader.sampler not in SAMPLERS:
        return f"{created}: the draws of the {loader.sampler} may differ between devices"
    if loader.renewed_at is not None:
        return f"{loader.renewed_at}: it begins a new pass over the DataLoader in every step"
    if profile.has_no_optimizer or profile.steps_in_backward:
        return f"{step}: parameters change outside of optimizer.step()"
    if profile.accumulation > 1:
        batches = profile.accumulation
        return (
            f"{step}: a step takes {batches} batches, for which nfold.Run has accumulate={batches}"
        )
    return ""


class _Converter:
    """Finds the edits of one file."""

    def __init__(
        self, source: PythonSource, file: str, profile: ScriptProfile, *, is_main: bool
    ) -> None:
        self._source, self._file, self._profile, self._is_main = source, file, profile, is_main
        self._nodes = list(ast.walk(source.tree))
        self._run = "nfold_run" if self._is_name("run") else "run"
        self.notes: list[str] = []

    def edits(self, optimizer_lines: list[int]) -> Iterator[SourceEdit]:
        """Return all edits; the notes are complete afterwards. Raises NotConvertible."""
        optimizers = [find_optimizer(self._source, line) for line in optimizer_lines]
        created, step = self._profile.training_loader.created_at, None
        step = self._profile.most_frequent_line("step")
        loader = find_loader(self._source, self._own_line(created), self._own_line(step))
        self._check_loader(loader)
        saves = list(self._saves())
        anchors = [loader.statement, *(one.statement for one in optimizers), *saves]
        edits: list[SourceEdit] = [self._create_run(anchors, optimizers)]
        edits.append(
            self._after(loader.statement, f"{loader.name} = {self._run}.loader({loader.name})")
        )
        for optimizer in optimizers:
            edits += self._prepare(optimizer)
        edits += [
            GuardStatement(location=self._location(each), condition=f"{self._run}.is_main")
            for each in saves
        ]
        edits += [*self._without_data_parallel(), *self._device_edits()]
        self._note_writes()
        return iter(edits)

    def _own_line(self, line: str | None) -> int | None:
        place = LOCATION.fullmatch(line or "")
        return int(place["line"]) if place is not None and place["file"] == self._file else None

    def _is_name(self, name: str) -> bool:
        return any(
            name in (getattr(node, "id", None), getattr(node, "arg", None))
            or (isinstance(node, Function | ast.ClassDef) and node.name == name)
            or (isinstance(node, ast.alias) and name in (node.asname, node.name))
            for node in self._nodes
        )

    def _location(self, node: ast.stmt | ast.expr) -> str:
        """Return ``train.py:31:12``; the column counts characters from 1."""
        start = self._source.start(node)
        line = self._source.line_at(start)
        before = self._source.text[self._source.line_start(line) : start]
        return f"{self._file}:{line}:{len(before.decode()) + 1}"

    def _after(self, statement: ast.stmt, code: str) -> AddStatement:
        return AddStatement(location=self._location(statement), statement=code)

    def _check_loader(self, loader: NamedValue) -> None:
        for node in uses(self._source, loader.statement, loader.name):
            parent = self._source.parent(node)
            if isinstance(parent, ast.Attribute) and parent.attr not in LOADER_ATTRIBUTES:
                used = self._source.code(parent)
                raise NotConvertible(parent, f"{used}: a loader of nfold.Run has no {parent.attr}")

    # Where the run is created

    def _create_run(
        self, anchors: list[ast.stmt], optimizers: list[NamedOptimizer]
    ) -> AddStatement:
        """Return the statement that creates the run, before anything that uses it or a GPU."""
        functions = {self._outer_function(each) for each in anchors}
        models = {name for one in optimizers for name in one.models}
        if len(functions) == 1:
            (function,) = functions
            body = self._source.tree.body if function is None else function.body
            guard = None if function is not None else self._main_guard()
            if guard is not None and all(guard in self._source.ancestors(a) for a in anchors):
                body = guard.body
        elif not self._is_main:
            raise NotConvertible(
                anchors[0], "several functions of a module train, which is no script"
            )
        else:
            body, models = self._module_block(anchors), set()
        for statement in body:
            if isinstance(statement, DEFINITIONS):
                continue
            if len(functions) > 1 and self._starts_training(statement, anchors):
                break
            if self._contains(statement, anchors) or self._uses_device(statement, models):
                break
        else:
            raise NotConvertible(
                anchors[0], "no statement runs before it in which nfold.Run can begin"
            )
        return AddStatement(
            location=self._location(statement),
            statement=f"{self._run} = nfold.Run()",
            place="before",
            imports=("import nfold",),
        )

    def _outer_function(self, statement: ast.stmt) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        around = [each for each in self._source.ancestors(statement) if isinstance(each, Function)]
        return around[-1] if around else None

    def _main_guard(self) -> ast.If | None:
        for statement in self._source.tree.body:
            if isinstance(statement, ast.If) and "__name__" in self._source.code(statement.test):
                return statement
        return None

    def _module_block(self, anchors: list[ast.stmt]) -> list[ast.stmt]:
        """Return the statements of a script that run first and see all anchors."""
        guard = self._main_guard()
        inside = guard is not None and all(
            self._outer_function(each) is not None or guard in self._source.ancestors(each)
            for each in anchors
        )
        return guard.body if guard is not None and inside else self._source.tree.body

    def _contains(self, statement: ast.stmt, anchors: list[ast.stmt]) -> bool:
        return any(
            each is statement or statement in self._source.ancestors(each) for each in anchors
        )

    def _starts_training(self, statement: ast.stmt, anchors: list[ast.stmt]) -> bool:
        """Return whether a statement at the top of a script calls a function of the file."""
        defined = {each.name for each in self._nodes if isinstance(each, Function | ast.ClassDef)}
        called = (
            last_name(each.func) for each in ast.walk(statement) if isinstance(each, ast.Call)
        )
        return bool(defined & set(called)) or self._contains(statement, anchors)

    @staticmethod
    def _uses_device(statement: ast.stmt, models: set[str]) -> bool:
        for node in ast.walk(statement):
            match node:
                case ast.Constant(value=str() as text) if text.startswith("cuda"):
                    return True
                case ast.Attribute(attr="cuda"):
                    return True
                case ast.Name(id=name, ctx=ast.Store()) if name in models:
                    return True
        return False

    # Model, optimizer and schedule

    def _prepare(self, optimizer: NamedOptimizer) -> Iterator[SourceEdit]:
        names, last = [*optimizer.models, optimizer.name], optimizer.statement
        for schedule in self._schedules(optimizer):
            block = statement_block(self._source, last)
            if any(each is schedule.statement for each in block):
                between = block[statement_index(block, last) + 1 :]
                between = between[: statement_index(between, schedule.statement)]
                if not any(isinstance(each, ast.For | ast.While | ast.With) for each in between):
                    names, last = [*names, schedule.name], schedule.statement
                    continue
            yield self._after(
                schedule.statement, f"{schedule.name} = {self._run}.prepare({schedule.name})"
            )
        prepared = f"{self._run}.prepare({', '.join(names)})"
        scope = self._source.scope(last)
        # An assignment would make a name of the module local to the function.
        is_own = all(bindings(scope, name) for name in names)
        yield self._after(last, f"{', '.join(names)} = {prepared}" if is_own else prepared)

    def _schedules(self, optimizer: NamedOptimizer) -> Iterator[NamedValue]:
        for node in uses(self._source, optimizer.statement, optimizer.name):
            call = self._source.parent(node)
            if not isinstance(call, ast.Call) or call.args[:1] != [node]:
                continue
            function = last_name(call.func)
            if function == "ReduceLROnPlateau":
                raise NotConvertible(
                    call, "its numbers differ between devices; next: run.mean or run.sum of them"
                )
            parent = self._source.parent(call)
            if function.endswith(("LR", "WarmRestarts", "Scheduler")):
                match parent:
                    case ast.Assign(targets=[ast.Name(id=name)]):
                        if self._source.scope(parent) is self._source.scope(optimizer.statement):
                            yield NamedValue(parent, name, call)

    # Files

    def _saves(self) -> Iterator[ast.stmt]:
        """Yield the statements that write a checkpoint: one device must."""
        for node in self._nodes:
            match node:
                case ast.Expr(value=ast.Call(func=function)) if (
                    dotted_name(function) == "torch.save"
                ):
                    yield node

    def _note_writes(self) -> None:
        for node in self._nodes:
            if isinstance(node, ast.Call) and self._writes(node):
                text = f"{self._file}:{node.lineno}: every device writes; if {self._run}.is_main: one does"
                self.notes.append(text)

    def _writes(self, call: ast.Call) -> bool:
        if last_name(call.func) == "open":
            modes = [*call.args[:2], *(one.value for one in call.keywords if one.arg == "mode")]
            texts = [one.value for one in modes if isinstance(one, ast.Constant)]
            return any(WRITE_MODE.fullmatch(text) for text in texts if isinstance(text, str))
        may_exist = any(one.arg == "exist_ok" for one in call.keywords)
        return not may_exist and WRITERS.fullmatch(self._source.code(call.func)) is not None

    # Devices

    def _without_data_parallel(self) -> Iterator[SourceEdit]:
        names = aliases(self._source, "DataParallel")
        calls = [n for n in self._nodes if isinstance(n, ast.Call) and last_name(n.func) in names]
        wrapper = self._profile.most_frequent_line("wrapper")
        if not calls:
            if self._profile.parallel == "dp":
                raise NotConvertible(1, f"nn.DataParallel is not in this file, but in {wrapper}")
            return
        for call in calls:
            model = next(iter(call.args), None) or self._keyword(call, "module")
            if model is None or isinstance(model, ast.Starred):
                raise NotConvertible(call, "it names no model")
            code, statement = self._source.code(model), self._source.parent(call)
            targets = statement.targets if isinstance(statement, ast.Assign) else []
            if dotted_name(model) and [dotted_name(one) for one in targets] == [dotted_name(model)]:
                assert isinstance(statement, ast.Assign)
                yield RemoveStatement(location=self._location(statement))
                continue
            old = self._source.code(call)
            yield ReplaceExpression(location=self._location(call), old=old, new=code)
        for node in self._nodes:
            if isinstance(node, ast.Attribute) and node.attr == "module" and dotted_name(node):
                if is_stored(node):
                    raise NotConvertible(node, "a class has an attribute module of its own")
                old, new = self._source.code(node), self._source.code(node.value)
                yield ReplaceExpression(location=self._location(node), old=old, new=new)

    @staticmethod
    def _keyword(call: ast.Call, name: str) -> ast.expr | None:
        return next((each.value for each in call.keywords if each.arg == name), None)

    def _device_edits(self) -> Iterator[SourceEdit]:
        """Yield edits of ``cuda:0``: a run makes the GPU of its device the current one, ``cuda``."""
        found: set[str] = set()
        for node in self._nodes:
            match node:
                case ast.Constant(value=str() as text) if INDEXED_DEVICE.fullmatch(text):
                    found.add(text)
                    old = self._source.code(node)
                    new = old.replace(text, "cuda")
                    yield ReplaceExpression(location=self._location(node), old=old, new=new)
                case ast.Call(
                    func=ast.Attribute(attr="cuda"), args=[ast.Constant(value=int(index))]
                ):
                    found.add(f"cuda:{index}")
                    old, argument = self._source.code(node), self._source.code(node.args[0])
                    if node.keywords:
                        raise NotConvertible(
                            node, f"it uses GPU {index}; next: .cuda() without a number"
                        )
                    head, _, _ = old.rpartition(argument)
                    yield ReplaceExpression(location=self._location(node), old=old, new=f"{head})")
                case (
                    ast.Call(func=function, args=[ast.Constant(value="cuda") as kind, number])
                    | ast.Call(
                        func=function,
                        args=[ast.Constant(value="cuda") as kind],
                        keywords=[ast.keyword(arg="index", value=number)],
                    )
                ) if last_name(function) == "device" and isinstance(number, ast.Constant):
                    found.add(f"cuda:{number.value!s}")
                    new = f"{self._source.code(function)}({self._source.code(kind)})"
                    old = self._source.code(node)
                    yield ReplaceExpression(location=self._location(node), old=old, new=new)
                case ast.Call(func=function, args=[ast.Constant(value=int()), *_]):
                    if last_name(function) == "set_device":
                        raise NotConvertible(node, "every device would use this GPU")
                case ast.Subscript(slice=ast.Constant(value=text)) if text == VISIBLE_DEVICES:
                    if is_stored(node):
                        raise NotConvertible(node, f"it sets {VISIBLE_DEVICES}")
            if len(found) > 1:
                assert isinstance(node, ast.expr)
                raise NotConvertible(
                    node, f"the script uses several GPUs itself: {', '.join(sorted(found))}"
                )
