"""Patches of small sources in many styles: what they change, and what is refused."""

from __future__ import annotations

import ast
import inspect
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from nfold.core.source_edit import (
    AddStatement,
    SetKeywords,
    SetVariable,
    SourceEdit,
    WrapExpression,
)
from nfold.tune.keyword_arguments import POSITIONAL
from nfold.tune.source_patch import SourcePatch, make_patch

TORCH = ("import torch",)


def workers(line: int | str = 1, **more: str) -> SetKeywords:
    keywords = {"num_workers": "8", **more}
    return SetKeywords(
        location=f"train.py:{line}", function="DataLoader", keywords=tuple(keywords.items())
    )


def keyword(line: int, function: str, **keywords: str) -> SetKeywords:
    return SetKeywords(
        location=f"train.py:{line}", function=function, keywords=tuple(keywords.items())
    )


def compiled(line: int | str) -> WrapExpression:
    return WrapExpression(location=f"train.py:{line}", template="torch.compile({})")


def after(line: int | str, statement: str, imports: tuple[str, ...] = ()) -> AddStatement:
    return AddStatement(location=f"train.py:{line}", statement=statement, imports=imports)


def before(line: int | str, statement: str, imports: tuple[str, ...] = ()) -> AddStatement:
    return AddStatement(
        location=f"train.py:{line}", statement=statement, place="before", imports=imports
    )


def patched(folder: Path, content: bytes, *edits: SourceEdit) -> SourcePatch:
    (folder / "train.py").write_bytes(content)
    return make_patch(edits, folder)


GIT_ENVIRONMENT = {
    **{name: text for name, text in os.environ.items() if not name.startswith("GIT_")},
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
}


def apply_everywhere(folder: Path, patch: SourcePatch) -> None:
    """Apply a patch with git and with patch to copies of a folder, and compare the files."""
    commands = [["git", "apply", "--check", "../nfold.patch"], ["git", "apply", "../nfold.patch"]]
    programs = [commands]
    if shutil.which("patch"):
        programs.append([["patch", "-p1", "--fuzz=0", "-i", "../nfold.patch"]])
    (folder.parent / "nfold.patch").write_bytes(patch.diff)
    for index, program in enumerate(programs):
        copied = folder.parent / f"copy-{index}"
        shutil.copytree(folder, copied)
        for command in program:
            done = subprocess.run(
                command,
                cwd=copied,
                capture_output=True,
                text=True,
                env=GIT_ENVIRONMENT,
                check=False,
            )
            assert done.returncode == 0, done.stderr + done.stdout
        for file in patch.files:
            assert (copied / file.path).read_bytes() == file.edited
            ast.parse(file.edited)
        assert not list(copied.rglob("*.rej"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "project").mkdir()
    return tmp_path / "project"


@dataclass(frozen=True)
class Style:
    """A source, the edits, and the text that they replace: ``old`` by ``new``, once."""

    name: str
    source: str
    edits: Sequence[SourceEdit]
    old: str
    new: str
    encoding: str = "utf-8"


STYLES = [
    Style(
        "one line",
        "loader = DataLoader(data, batch_size=4)\n",
        [workers()],
        "batch_size=4)",
        "batch_size=4, num_workers=8)",
    ),
    Style(
        "one line, trailing comma",
        "loader = DataLoader(data, 4,)\n",
        [workers()],
        "4,)",
        "4, num_workers=8,)",
    ),
    Style("no arguments", "f = Trainer()\n", [keyword(1, "Trainer", a="1")], "()", "(a=1)"),
    Style(
        "as black writes",
        "loader = DataLoader(\n    data,\n    batch_size=4,\n    shuffle=True,\n)\n",
        [workers()],
        "shuffle=True,\n",
        "shuffle=True,\n    num_workers=8,\n",
    ),
    Style(
        "as black writes, without trailing comma",
        "loader = DataLoader(\n    data,\n    shuffle=True\n)\n",
        [workers(1, persistent_workers="True")],
        "shuffle=True\n",
        "shuffle=True,\n    num_workers=8,\n    persistent_workers=True\n",
    ),
    Style(
        "several arguments in a line of their own",
        "loader = DataLoader(\n    data, batch_size=4\n)\n",
        [workers(2)],
        "batch_size=4",
        "batch_size=4, num_workers=8",
    ),
    Style(
        "aligned, one argument in each line",
        "loader = DataLoader(data,\n                    batch_size=4,\n"
        "                    shuffle=True)  # train\n",
        [workers()],
        "shuffle=True)",
        "shuffle=True,\n                    num_workers=8)",
    ),
    Style(
        "aligned, filled lines",
        "loader = DataLoader(data, batch_size=4,\n                    shuffle=True)\n",
        [workers()],
        "shuffle=True)",
        "shuffle=True, num_workers=8)",
    ),
    Style(
        "aligned, full lines",
        "loader = DataLoader(data, batch_size=4, drop_last=True, collate_fn=collate_samples,\n"
        "                    shuffle=True, pin_memory=True, generator=generator, timeout=10)\n",
        [workers()],
        "timeout=10)",
        "timeout=10,\n                    num_workers=8)",
    ),
    Style(
        "tabs",
        "def main():\n\tloader = DataLoader(\n\t\tdata,\n\t\tbatch_size=4,\n\t)\n",
        [workers(2)],
        "\t\tbatch_size=4,\n",
        "\t\tbatch_size=4,\n\t\tnum_workers=8,\n",
    ),
    Style(
        "CRLF",
        "import torch\r\nloader = DataLoader(\r\n    data,\r\n    shuffle=True,\r\n)\r\nrun()\r\n",
        [workers(2)],
        "shuffle=True,\r\n",
        "shuffle=True,\r\n    num_workers=8,\r\n",
    ),
    Style(
        "CRLF, new statement",
        "import torch\r\nmodel = Net()\r\nrun()\r\n",
        [after(2, "model.compile()")],
        "Net()\r\n",
        "Net()\r\nmodel.compile()\r\n",
    ),
    Style(
        "no newline at the end",
        "run()\nloader = DataLoader(data)",
        [workers(2)],
        "(data)",
        "(data, num_workers=8)",
    ),
    Style(
        "no newline at the end, new statement",
        "if True:\n    model = Net()",
        [after(2, "model.compile()")],
        "Net()",
        "Net()\n    model.compile()",
    ),
    Style(
        "nested call",
        "train(model, prefetch(DataLoader(Data(root, (3, 4)), 4), depth=2), epochs=2)\n",
        [workers()],
        "(3, 4)), 4)",
        "(3, 4)), 4, num_workers=8)",
    ),
    Style(
        "one in another, on two lines",
        "loader = DataLoader(\n    list(DataLoader(data)),\n    4,\n)\n",
        [workers(2)],
        "DataLoader(data)",
        "DataLoader(data, num_workers=8)",
    ),
    Style(
        "comprehension",
        "sets = {name: torch.utils.data.DataLoader(sets[name], batch_size=4, num_workers=4)\n"
        "        for name in ['train', 'val']}\n",
        [workers()],
        "num_workers=4",
        "num_workers=8",
    ),
    Style(
        "dictionary of keywords",
        "settings = {'batch_size': 4, 'shuffle': True}\nloader = DataLoader(data, **settings)\n",
        [workers(2)],
        "True}",
        "True, 'num_workers': 8}",
    ),
    Style(
        "dictionary of keywords in lines, key present",
        'def main():\n    settings = {\n        "num_workers": 2,  # cores\n    }\n'
        "    return DataLoader(data, **settings)\n",
        [workers(5, pin_memory="True")],
        "2,  # cores\n",
        '8,  # cores\n        "pin_memory": True,\n',
    ),
    Style(
        "dict() of keywords",
        "settings = dict(shuffle=True)\nloader = DataLoader(data, **settings)\n",
        [workers(2)],
        "shuffle=True",
        "shuffle=True, num_workers=8",
    ),
    Style(
        "empty dictionary in the call",
        "loader = DataLoader(data, **{})\n",
        [workers()],
        "{}",
        '{"num_workers": 8}',
    ),
    Style(
        "dictionary of two calls without the key",
        "s = {'shuffle': True}\na = DataLoader(x, **s)\nb = DataLoader(y, **s)\n",
        [workers(2)],
        "(x, **s)",
        "(x, **s, num_workers=8)",
    ),
    Style(
        "alias of an import",
        "from torch.utils.data import DataLoader as Loader\nloader = Loader(data)\n",
        [workers(2)],
        "Loader(data)",
        "Loader(data, num_workers=8)",
    ),
    Style(
        "alias of a module",
        "import torch.utils.data as tud\nloader = tud.DataLoader(data, num_workers = 0)\n",
        [workers(2, pin_memory="True")],
        "num_workers = 0",
        "num_workers = 8, pin_memory = True",
    ),
    Style(
        "passed by position",
        "loader = DataLoader(data, 4, True, None, None, 2)\n",
        [workers()],
        "None, 2)",
        "None, 8)",
    ),
    Style(
        "method of a class, decorated",
        "class Data:\n    @staticmethod\n    @cached(size=1)\n    def loader(data):\n"
        "        return DataLoader(data, shuffle=(1 > 0))\n",
        [workers(5)],
        "(1 > 0))",
        "(1 > 0), num_workers=8)",
    ),
    Style(
        "default of a parameter",
        "def train(loader=DataLoader(data)):\n    pass\n",
        [workers()],
        "(data)",
        "(data, num_workers=8)",
    ),
    Style(
        "walrus",
        "if (loader := DataLoader(data)) and len(loader):\n    run()\n",
        [workers()],
        "(data)",
        "(data, num_workers=8)",
    ),
    Style(
        "lambda",
        "make = lambda data, n: DataLoader(data, n, collate_fn=lambda a, b=1: a)\n",
        [workers()],
        "b=1: a)",
        "b=1: a, num_workers=8)",
    ),
    Style(
        "f-string before",
        "print(f\"{len(data)=} é {f('ü')}\"); loader = DataLoader(data)\n",
        [workers()],
        "DataLoader(data)",
        "DataLoader(data, num_workers=8)",
    ),
    Style(
        "text with a comma and a bracket",
        "loader = DataLoader(read('a),b(', \"(\"), 4) # DataLoader(\n",
        [workers()],
        "4)",
        "4, num_workers=8)",
    ),
    Style(
        "comments in the call",
        "loader = DataLoader(  # all, of it)\n    data,  # samples\n    shuffle=True  # (order\n"
        "    # num_workers=2,\n)\n",
        [workers()],
        "shuffle=True  # (order\n",
        "shuffle=True,  # (order\n    num_workers=8\n",
    ),
    Style(
        "backslashes",
        "loader = \\\n    DataLoader(data, \\\n      batch_size=4)\n",
        [workers(2)],
        "batch_size=4)",
        "batch_size=4,\n      num_workers=8)",
    ),
    Style(
        "semicolons",
        "a = 1; loader = DataLoader(data); b = 2\n",
        [workers()],
        "(data)",
        "(data, num_workers=8)",
    ),
    Style(
        "text before that is not ASCII",
        "größe = '数据'; ж = DataLoader(größe, 4)\n",
        [workers()],
        "größe, 4",
        "größe, 4, num_workers=8",
    ),
    Style(
        "latin-1",
        "# -*- coding: latin-1 -*-\nname = 'déjà'; loader = DataLoader(data)\n",
        [workers(2)],
        "(data)",
        "(data, num_workers=8)",
        encoding="latin-1",
    ),
    Style(
        "byte order mark",
        "loader = DataLoader(data)\n",
        [workers()],
        "(data)",
        "(data, num_workers=8)",
        encoding="utf-8-sig",
    ),
    Style(
        "form feed and carriage return",
        "x = 1\n\f\ny = '\x0b\x1c\u2028'\nz = 2\rloader = DataLoader(data)\n",
        [workers(5)],
        "(data)",
        "(data, num_workers=8)",
    ),
    Style(
        "async def",
        "async def main():\n    async with session() as s:\n        await run(DataLoader(s))\n",
        [workers(3)],
        "DataLoader(s)",
        "DataLoader(s, num_workers=8)",
    ),
    Style(
        "type comments",
        "loader = DataLoader(data)  # type: DataLoader[int]  # noqa\n",
        [workers()],
        "(data)",
        "(data, num_workers=8)",
    ),
    Style(
        "main guard",
        'if __name__ == "__main__":\n    loader = DataLoader(data)\n    run()\n',
        [workers(2)],
        "(data)",
        "(data, num_workers=8)",
    ),
    Style(
        "match statement",
        "match name:\n    case 'a' | 'b' if True:\n        loader = DataLoader(data)\n",
        [workers(3), before(3, "print(name)")],
        "        loader = DataLoader(data)",
        "        print(name)\n        loader = DataLoader(data, num_workers=8)",
    ),
    Style(
        "arguments with a star, keyword present",
        "loader = DataLoader(*parts, num_workers=-1)\n",
        [workers()],
        "-1",
        "8",
    ),
    Style(
        "several calls in a line, with column",
        "a, é = DataLoader(x), DataLoader(y)\n",
        [workers("1:26")],
        "DataLoader(y)",
        "DataLoader(y, num_workers=8)",
    ),
    Style(
        "several calls in a line, all of them",
        "x, y = f(x.to(device, non_blocking=False).to(d)), (y\n                    .to(d))\n",
        [
            SetKeywords(
                location="train.py:1",
                function="to",
                keywords=(("non_blocking", "True"),),
                every_call=True,
            )
        ],
        "=False).to(d))",
        "=True).to(d, non_blocking=True))",
    ),
    Style(
        "keyword only in one of several edits of a call",
        "model = DistributedDataParallel(net,\n    find_unused_parameters=True)\nrun()\n",
        [
            keyword(1, "DistributedDataParallel", find_unused_parameters="False"),
            keyword(1, "DistributedDataParallel", gradient_as_bucket_view="True"),
            after(3, "stop()"),
        ],
        "find_unused_parameters=True)\nrun()\n",
        "find_unused_parameters=False,\n    gradient_as_bucket_view=True)\nrun()\nstop()\n",
    ),
    Style(
        "number of threads",
        "torch.set_num_threads(16)\n",
        [keyword(1, "set_num_threads", count="2")],
        "16",
        "2",
    ),
    Style("wrapped", "model = Net()\n", [compiled(1)], "Net()", "torch.compile(Net())"),
    Style(
        "wrapped in lines",
        "self.model: Module = (  # the model\n"
        "    Net(3,\n        4)  # layers\n    .to(device)\n)\n",
        [compiled(2)],
        "Net(3,\n        4)  # layers\n    .to(device)",
        "torch.compile(Net(3,\n        4)  # layers\n    .to(device))",
    ),
    Style(
        "wrapped with parentheses",
        "a = b = Net() if big else Small()\n",
        [WrapExpression(location="train.py:1", template="{}.to(device)")],
        "Net() if big else Small()",
        "(Net() if big else Small()).to(device)",
    ),
    Style(
        "wrapped tuple",
        "models = Net(), Net()\n",
        [compiled(1)],
        "Net(), Net()",
        "torch.compile((Net(), Net()))",
    ),
    Style(
        "wrapped walrus",
        "while (model := Net()):\n    run()\n",
        [compiled(1)],
        "Net()",
        "torch.compile(Net())",
    ),
    Style(
        "wrapped twice and a keyword",
        "model = DDP(Net())\n",
        [
            compiled(1),
            keyword(1, "DDP", static_graph="True"),
            WrapExpression(location="train.py:1", template="check({})"),
        ],
        "DDP(Net())",
        "check(torch.compile(DDP(Net(), static_graph=True)))",
    ),
    Style(
        "wrapped, moved in place",
        "model.to(device)\nrun()\n",
        [compiled(1)],
        "(device)\n",
        "(device)\nmodel = torch.compile(model)\n",
    ),
    Style(
        "call in a wrapper, wrapped",
        "import torch\nmodel = DDP(module=Net().to(\n    device).half())\n",
        [WrapExpression(location="train.py:2", template="f({})", functions=("to", "cuda"))],
        "Net().to(\n    device)",
        "f(Net().to(\n    device))",
    ),
    Style(
        "chain of calls, wrapped where it is returned",
        "def build():\n    return (Net()\n            .cuda()\n            .to(dtype))\n",
        [
            WrapExpression(
                location="train.py:4",
                template="{}.to(memory_format=torch.channels_last)",
                functions=("to", "cuda"),
                imports=TORCH,
            )
        ],
        "def build():\n    return (Net()\n            .cuda()\n            .to(dtype))\n",
        "import torch\ndef build():\n    return (Net()\n            .cuda()\n"
        "            .to(dtype).to(memory_format=torch.channels_last))\n",
    ),
    Style(
        "model in a wrapper",
        "from torch.nn.parallel import DistributedDataParallel as Wrapper\n"
        "model = Wrapper(\n    plant(Net().to(device), 1), device_ids=[0]\n).train()\n",
        [after(3, "{target}.compile()")],
        ").train()\n",
        ").train()\nmodel.module.compile()\n",
    ),
    Style(
        "model with a name in a wrapper",
        "model = DDP(net.eval().to(device))\n",
        [after(1, "{target}.compile()")],
        "(device))\n",
        "(device))\nnet.compile()\n",
    ),
    Style(
        "model in a tuple",
        "envs, self.net = Envs(), Net().to(device) if x else None\n",
        [after(1, "{target}.compile()")],
        "None\n",
        "None\nself.net.compile()\n",
    ),
    Style(
        "statement after a block with comments",
        "def main():\n\tfor x in y:\n\t\trun(x)\n\n\t\t# end of loop\n\n\t# end\n\tstop()\n",
        [after(2, "check()")],
        "loop\n",
        "loop\n\tcheck()\n",
    ),
    Style(
        "statements keep their order",
        "start()\nrun(\n    1)\n",
        [before(3, "a()"), before(2, "b()"), after(2, "c()"), after(3, "d()")],
        "run(\n    1)\n",
        "a()\nb()\nrun(\n    1)\nc()\nd()\n",
    ),
    Style(
        "statements in one line, with their import",
        "import os\nmodel = Net()\n",
        [before(2, "gc.collect(); gc.freeze()", ("import gc",))],
        "os\n",
        "os\nimport gc\ngc.collect(); gc.freeze()\n",
    ),
    Style(
        "statement between semicolons",
        "a = 1; model = Net(); b = 2\n",
        [after("1:8", "{target}.compile()")],
        "Net();",
        "Net(); model.compile();",
    ),
    Style(
        "name of a wrapper with a model in it",
        "from w import DistributedDataParallel\nif many:\n    ddp = DistributedDataParallel(Net().to(0))\n",
        [after(3, "{assigned}.register(hook)", ("from hooks import hook",))],
        "DistributedDataParallel\nif many:\n    ddp = DistributedDataParallel(Net().to(0))\n",
        "DistributedDataParallel\nfrom hooks import hook\nif many:\n"
        "    ddp = DistributedDataParallel(Net().to(0))\n    ddp.register(hook)\n",
    ),
    Style(
        "statement in a block of one line",
        "if cuda: model.cuda()\n",
        [after("1:10", "{target}.compile()")],
        "cuda()\n",
        "cuda(); model.compile()\n",
    ),
    Style(
        "statement before elif",
        "if a:\n    run()\nelif b(\n  1):\n    stop()\n",
        [before(3, "check()")],
        "if a:\n    run()",
        "check()\nif a:\n    run()",
    ),
    Style(
        "statement before a decorated function",
        "run()\n\n@wrap\n@torch.no_grad()\ndef test():\n    pass\n",
        [before(5, "check()")],
        "@wrap\n",
        "check()\n@wrap\n",
    ),
    Style(
        "import after docstring and future import",
        '"""Train."""\nfrom __future__ import annotations\n\nmodel = build()\n',
        [after(4, "torch.manual_seed(0)", TORCH)],
        "annotations\n\nmodel = build()\n",
        "annotations\nimport torch\n\nmodel = build()\ntorch.manual_seed(0)\n",
    ),
    Style(
        "import after a docstring of lines",
        '#!/usr/bin/env python\n"""Train.\n\nIt."""\nmodel = build()\n',
        [before(5, "torch.manual_seed(0)", TORCH)],
        'It."""\n',
        'It."""\n\nimport torch\ntorch.manual_seed(0)\n',
    ),
    Style(
        "import without others",
        "# license\nmodel = build()\n",
        [before(2, "torch.manual_seed(0)", TORCH)],
        "license\n",
        "license\nimport torch\ntorch.manual_seed(0)\n",
    ),
    Style(
        "import before its use, not after the last",
        "import os; import sys\n\ndef main():\n    model = build()\n\nimport json\nmain()\n",
        [after(4, "torch.manual_seed(0)", TORCH)],
        "sys\n\ndef main():\n    model = build()\n",
        "sys\nimport torch\n\ndef main():\n    model = build()\n    torch.manual_seed(0)\n",
    ),
    Style(
        "import is there",
        "try:\n    import torch.nn as nn, torch.optim\nexcept ImportError:\n    torch = None\n"
        "model = build()\n",
        [after(5, "torch.manual_seed(0)", TORCH)],
        "build()\n",
        "build()\ntorch.manual_seed(0)\n",
    ),
    Style(
        "import in the function is there",
        "def main():\n    import torch\n    model = build()\n",
        [after(3, "torch.manual_seed(0)", TORCH)],
        "build()\n",
        "build()\n    torch.manual_seed(0)\n",
    ),
    Style(
        "import for types only",
        "if TYPE_CHECKING:\n    import torch\nmodel = build()\n",
        [after(3, "torch.manual_seed(0)", TORCH)],
        "if TYPE_CHECKING:\n    import torch\nmodel = build()\n",
        "import torch\nif TYPE_CHECKING:\n    import torch\nmodel = build()\n"
        "torch.manual_seed(0)\n",
    ),
]


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.name)
def test_a_patch_applies_and_changes_what_it_says(style: Style, folder: Path) -> None:
    content = style.source.encode(style.encoding)
    patch = patched(folder, content, *style.edits)
    assert [str(each) for each in (*patch.refusals, *patch.flags)] == []
    assert patch.edits == tuple(style.edits)
    assert style.source.count(style.old) == 1
    expected = style.source.replace(style.old, style.new)
    (file,) = patch.files
    assert file.edited.decode(style.encoding) == expected
    assert file.edited == expected.encode(style.encoding)
    assert (folder / "train.py").read_bytes() == file.original == content
    apply_everywhere(folder, patch)


@dataclass(frozen=True)
class Refused:
    """A source and an edit that is refused, with words of the reason."""

    name: str
    source: str
    edit: SourceEdit
    reason: str


REFUSED = [
    Refused("no call", "x = make(data)\n", workers(), "no call of DataLoader"),
    Refused("no such line", "x = 1\n", workers(7), "no such line"),
    Refused(
        "two calls", "a, b = DataLoader(x), DataLoader(y)\n", workers(), "2 calls of DataLoader"
    ),
    Refused("wrong column", "a = DataLoader(x)\n", workers("1:2"), "at this column"),
    Refused(
        "subclass",
        "class Fast(DataLoader):\n    pass\nx = Fast(data)\n",
        workers(3),
        "Fast (line 1) is a subclass of DataLoader",
    ),
    Refused(
        "in a subclass",
        "class Fast(DataLoader):\n    def __init__(self, d):\n        super().__init__(d)\n",
        workers(3),
        "Fast (line 1) is a subclass",
    ),
    Refused(
        "partial",
        "from functools import partial\nmake = partial(DataLoader, num_workers=1)\nx = make(d)\n",
        workers(3),
        "line 2 makes a functools.partial",
    ),
    Refused(
        "own function",
        "def DataLoader(d):\n    return d\nx = DataLoader(d)\n",
        workers(3),
        "defined in line 1",
    ),
    Refused("in an f-string", 'print(f"{DataLoader(data)}")\n', workers(), "in an f-string"),
    Refused("star", "x = DataLoader(*parts)\n", workers(), "*parts may pass num_workers"),
    Refused("generator", "x = DataLoader(i for i in y)\n", workers(), "generator without"),
    Refused("set already", "x = DataLoader(d, num_workers=8)\n", workers(), "already"),
    Refused(
        "dictionary parameter",
        "def make(d, **settings):\n    return DataLoader(d, **settings)\n",
        workers(2),
        "**settings may pass num_workers, and is a parameter (line 1)",
    ),
    Refused(
        "dictionary with condition",
        "s = {'num_workers': 1} if cuda else {}\nx = DataLoader(d, **s)\n",
        workers(2),
        "line 1 does not set it to a dictionary literal",
    ),
    Refused(
        "dictionary that grows",
        "s = {'shuffle': True}\ns.update(more)\nx = DataLoader(d, **s)\n",
        workers(3),
        "line 2 may change it",
    ),
    Refused(
        "dictionary assigned twice",
        "s = {}\ns = {'shuffle': True}\nx = DataLoader(d, **s)\n",
        workers(3),
        "lines 1, 2 assign it",
    ),
    Refused(
        "dictionary of two calls with the key",
        "s = {'num_workers': 1}\nx = DataLoader(d, **s)\ny = DataLoader(e, **s)\n",
        workers(2),
        "is also used in line 3",
    ),
    Refused(
        "dictionary of a module",
        "s = {}\ndef make(d):\n    return DataLoader(d, **s)\n",
        workers(3),
        "not a variable of the same function",
    ),
    Refused(
        "dictionary from elsewhere",
        "x = DataLoader(d, **options.loader)\n",
        workers(),
        "**options.loader may pass num_workers",
    ),
    Refused(
        "a variable",
        "count = 4\nx = DataLoader(d, num_workers=count)\n",
        workers(2),
        "num_workers is set by count (line 1)",
    ),
    Refused(
        "a parameter",
        "def make(d, count):\n    return DataLoader(d, num_workers=count)\n",
        workers(2),
        "num_workers is set by count (parameter in line 1)",
    ),
    Refused(
        "a call",
        "x = DataLoader(d, num_workers=os.cpu_count())\n",
        workers(),
        "num_workers is set by os.cpu_count()",
    ),
    Refused(
        "an attribute of another file's parser",
        "args = read_options()\nx = DataLoader(d, num_workers=args.workers)\n",
        workers(2),
        "num_workers is set by args.workers",
    ),
    Refused("nothing assigned", "run(model)\n", compiled(1), "assigns no value"),
    Refused("returned", "def f():\n    return Net()\n", compiled(2), "assigns no value"),
    Refused(
        "two holes",
        "model = Net()\n",
        WrapExpression(location="train.py:1", template="f({}, {})"),
        "does not have {} once",
    ),
    Refused("no statement", "a = 1\n\n# text\n", after(3, "b()"), "no statement"),
    Refused("two statements", "a = 1; b = 2\n", after(1, "c()"), "2 statements"),
    Refused("after return", "def f():\n    return 1\n", after(2, "b()"), "nothing after it"),
    Refused("before a docstring", '"""Text."""\nrun()\n', before(1, "b()"), "docstring"),
    Refused(
        "before a future import",
        "from __future__ import annotations\n",
        before(1, "b()"),
        "not Python in line 2",
    ),
    Refused("no name", "train(Net())\n", after(1, "{target}.compile()"), "no name"),
    Refused("unnamed wrapper", "train(DDP(net))\n", after(1, "{assigned}.f()"), "no name"),
    Refused(
        "no name of the model",
        "optimizer = SGD(Net().to(device).parameters())\n",
        after(1, "{target}.compile()"),
        "no name",
    ),
    Refused(
        "second argument",
        "x = train(data, Net().to(device))\n",
        after(1, "{target}.compile()"),
        "no name",
    ),
    Refused(
        "two models",
        "models = [Net().to(a), Net().to(b)]\n",
        WrapExpression(location="train.py:1", template="f({})", functions=("to", "cuda")),
        "2 such calls, Net().to(a) and Net().to(b)",
    ),
    Refused(
        "not moved",
        "model = Net()\n",
        WrapExpression(location="train.py:1", template="f({})", functions=("to", "cuda")),
        "no call of to or cuda",
    ),
    Refused(
        "name of something else",
        "torch = 1\nrun()\n",
        after(2, "torch.manual_seed(0)", TORCH),
        "needs the name torch, which line 1 sets",
    ),
    Refused(
        "local name before its import",
        "import torch\ndef f():\n    run()\n    import torch\n",
        before(3, "torch.manual_seed(0)", TORCH),
        "which line 4 sets",
    ),
    Refused("syntax", "def f(:\n", workers(), "not Python in line 1"),
    Refused("null byte", "x = DataLoader(d)\x00\n", workers(), "not Python"),
    Refused("deep nesting", f"x = {'-' * 5000}DataLoader(d)\n", workers(), "nested|not Python"),
    Refused("lines of the original", "a()\nb()\n", workers(2), "no call"),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_a_refusal_has_a_reason(case: Refused, folder: Path) -> None:
    patch = patched(folder, case.source.encode(), case.edit)
    (refused,) = patch.refusals
    assert any(words in refused.reason for words in case.reason.split("|")), refused.reason
    assert refused.edit == case.edit
    assert not isinstance(case.edit, SetVariable)
    assert str(refused).startswith(f"{case.edit.location}: ")
    assert (patch.files, patch.edits, patch.flags, patch.diff) == ((), (), (), b"")


PARSER = """\
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("-j", "--num-workers", "--workers", dest="workers", type=int, default=4)
parser.add_argument("-b", type=int)
parser.add_argument("--pin-memory", action="store_true")
parser.add_argument("--keep", action=argparse.BooleanOptionalAction)
parser.add_argument("data")
args = parser.parse_args()
"""


@pytest.mark.parametrize(
    ("source", "keywords", "arguments", "removed"),
    [
        (PARSER + "x = DataLoader(d, num_workers=args.workers)\n", {}, ["--num-workers", "8"], []),
        (PARSER + "n = args.b\nx = DataLoader(d, num_workers=int(n))\n", {}, ["-b", "8"], []),
        (
            PARSER + "x = DataLoader(d, pin_memory=args.pin_memory)\n",
            {"pin_memory": "True"},
            ["--pin-memory"],
            [],
        ),
        (
            PARSER + "x = DataLoader(d, pin_memory=args.pin_memory)\n",
            {"pin_memory": "False"},
            [],
            ["--pin-memory"],
        ),
        (
            PARSER + "x = DataLoader(d, persistent_workers=vars(args)['keep'])\n",
            {"persistent_workers": "False"},
            ["--no-keep"],
            [],
        ),
        (PARSER + "s = {'num_workers': args.workers}\nx = DataLoader(d, **s)\n", {},
         ["--num-workers", "8"], []),
        (
            PARSER.replace("args = parser.parse_args()\n", "")
            + "def make(options):\n    return DataLoader(d, num_workers=options.workers)\n"
            "def main():\n    options, _ = parser.parse_known_args()\n    make(options)\n",
            {},
            ["--num-workers", "8"],
            [],
        ),
        (
            PARSER + "def rank(index, args):\n    DataLoader(d, num_workers=args.workers)\n"
            "mp.spawn(rank, args=(args,))\n",
            {},
            ["--num-workers", "8"],
            [],
        ),
        (
            "def read():\n    parser.add_argument('--jobs')\n    return parser.parse_args()\n"
            "class Training:\n    def __init__(self):\n        self.args = read()\n"
            "    def loader(self):\n        return DataLoader(d, num_workers=self.args.jobs)\n",
            {},
            ["--jobs", "8"],
            [],
        ),
        (
            "class Trainer:\n    def __init__(self, model, args):\n"
            "        self.loader = DataLoader(d, num_workers=args.jobs)\n"
            "p.add_argument('--jobs')\nTrainer(Net(), p.parse_args())\n",
            {},
            ["--jobs", "8"],
            [],
        ),
        (
            "@hydra.main(config_name='c')\ndef main(cfg):\n    build(cfg.data)\n"
            "def build(c):\n    return DataLoader(d, num_workers=c.loader['workers'])\n",
            {},
            ["data.loader.workers=8"],
            [],
        ),
        (
            "@hydra.main(config_name='c')\ndef main(cfg):\n    x = DataLoader(d, **cfg.loader)\n",
            {"pin_memory": "True"},
            ["++loader.pin_memory=true"],
            [],
        ),
        (
            "cfg = OmegaConf.merge(OmegaConf.load(f), OmegaConf.from_cli())\n"
            "x = DataLoader(d, num_workers=cfg.workers)\n",
            {},
            ["workers=8"],
            [],
        ),
        (
            "@click.command()\n@click.option('--jobs', '-j', 'workers', default=1)\n"
            "@click.option('--pin/--no-pin')\ndef main(workers, pin):\n"
            "    x = DataLoader(d, num_workers=workers)\n",
            {},
            ["--jobs", "8"],
            [],
        ),
        (
            "@click.command()\n@click.option('--pin/--no-pin')\ndef main(pin):\n"
            "    x = DataLoader(d, pin_memory=pin)\n",
            {"pin_memory": "False"},
            ["--no-pin"],
            [],
        ),
        (
            "import typer\ndef main(loader_workers: int = 2):\n"
            "    x = DataLoader(d, num_workers=loader_workers)\ntyper.run(main)\n",
            {},
            ["--loader-workers", "8"],
            [],
        ),
        (
            "import typer\napp = typer.Typer()\n@app.command()\n"
            "def main(pin: bool = typer.Option(False, '--pin')):\n"
            "    x = DataLoader(d, pin_memory=pin)\n",
            {"pin_memory": "False"},
            [],
            ["--pin"],
        ),
        (
            "from absl import flags\nFLAGS = flags.FLAGS\n"
            "x = DataLoader(d, num_workers=FLAGS.workers)\n",
            {},
            ["--workers=8"],
            [],
        ),
        (
            "W = flags.DEFINE_integer('workers', 1, '')\nx = DataLoader(d, num_workers=W.value)\n",
            {},
            ["--workers=8"],
            [],
        ),
    ],
)  # fmt: skip
def test_a_flag_is_named_instead(
    source: str, keywords: dict[str, str], arguments: list[str], removed: list[str], folder: Path
) -> None:
    lines = source.splitlines()
    line = next(number for number, text in enumerate(lines, 1) if "DataLoader(d" in text)
    edit = keyword(line, "DataLoader", **(keywords or {"num_workers": "8"}))
    patch = patched(folder, source.encode(), edit)
    assert [str(each) for each in patch.refusals] == []
    (flag,) = patch.flags
    assert (list(flag.arguments), list(flag.removed)) == (arguments, removed)
    assert flag.edit == edit
    assert flag.expression in lines[line - 1] or flag.expression in source
    assert not flag.caveat
    assert patch.diff == b""
    assert ("do not pass" in str(flag)) == bool(removed)


@pytest.mark.parametrize(
    ("source", "edit"),
    [
        ("x = DataLoader(d, num_workers=args.data)\n", workers(9)),  # an argument without option
        ("x = DataLoader(d, num_workers=args.gone)\n", workers(9)),
        (
            "x = DataLoader(d, pin_memory=args.pin_memory)\n",
            keyword(9, "DataLoader", pin_memory="1"),
        ),
    ],
)
def test_a_value_without_an_option_is_refused(source: str, edit: SetKeywords, folder: Path) -> None:
    patch = patched(folder, (PARSER + source).encode(), edit)
    assert "is no literal" in patch.refusals[0].reason
    assert not patch.flags


def test_a_changed_option_is_a_caveat_and_no_keyword_is_edited(folder: Path) -> None:
    source = f"{PARSER}args.workers //= 2\nx = DataLoader(d, num_workers=args.workers)\n"
    patch = patched(folder, source.encode(), workers(10, persistent_workers="True"))
    assert patch.flags[0].caveat == "line 9 changes .workers after parsing"
    assert "(line 9 changes" in str(patch.flags[0])
    assert not patch.files


def test_edits_of_several_files_and_variables(folder: Path) -> None:
    (folder / "src").mkdir()
    (folder / "src" / "data set.py").write_text("def make(d):\n    return DataLoader(d)\n")
    (folder / "models é.py").write_text("import torch\nmodel = Net()\n")
    (folder / "plain.py").write_text("run()\n")
    edits: list[SourceEdit] = [
        SetVariable(name="NCCL_P2P_DISABLE", value="1"),
        SetKeywords(
            location="src/data set.py:2", function="DataLoader", keywords=(("num_workers", "8"),)
        ),
        WrapExpression(location="models é.py:2", template="torch.compile({})"),
        AddStatement(location=f"{folder}/plain.py:1", statement="stop()"),
        AddStatement(location="plain.py:1", statement="end()"),
        compiled(1),
    ]
    patch = make_patch(edits, folder)
    assert [file.path for file in patch.files] == ["src/data set.py", "models é.py", "plain.py"]
    assert patch.files[2].edited == b"run()\nstop()\nend()\n"
    assert patch.variables == (edits[0],)
    assert patch.edits == tuple(edits[1:5])
    assert [each.reason for each in patch.refusals] == ["there is no such file"]
    apply_everywhere(folder, patch)


def test_a_refused_edit_leaves_the_others(folder: Path) -> None:
    source = b"import torch\n\nrun()\nmodel = Net()\nloader = DataLoader(d, num_workers=n)\n"
    edits: list[SourceEdit] = [before(3, "a()\nb()"), after(5, "c()"), workers(5), compiled(4)]
    patch = patched(folder, source, *edits)
    assert [str(each) for each in patch.refusals] == [
        "train.py:5: num_workers is set by n, which is no literal"
    ]
    assert patch.edits == (edits[0], edits[1], edits[3])
    assert patch.files[0].edited.splitlines() == [
        *(b"import torch", b"", b"a()", b"b()", b"run()", b"model = torch.compile(Net())"),
        *(b"loader = DataLoader(d, num_workers=n)", b"c()"),
    ]
    apply_everywhere(folder, patch)


def test_reasons_name_lines_of_the_original_file(folder: Path) -> None:
    source = b"a()\nn = 4\nx = DataLoader(d, num_workers=n)\n"
    patch = patched(folder, source, before(1, "b()\nc()", TORCH), workers(3))
    assert patch.refusals[0].reason == "num_workers is set by n (line 2), which is no literal"


def test_the_diff_is_small(folder: Path) -> None:
    lines = [f"x{number} = call({number % 7})" for number in range(500)]
    lines[250] = "loader = DataLoader(d)"
    patch = patched(folder, "\n".join(lines).encode(), workers(251))
    changed = [line for line in patch.diff.split(b"\n") if line[:1] in (b"+", b"-")]
    assert changed == [
        *(b"--- a/train.py", b"+++ b/train.py", b"-loader = DataLoader(d)"),
        b"+loader = DataLoader(d, num_workers=8)",
    ]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"x = '\xff'\n", "not text in the encoding"),
        (b"# coding: nonsense\nx = 1\n", "not text in the encoding"),
        (b"# coding: rot13\nx = 1\n", "not text in the encoding"),
        (b"# coding: utf-7\nx = '+AGE-'\n", "cannot be written back"),
    ],
)
def test_text_that_cannot_be_decoded_is_refused(content: bytes, reason: str, folder: Path) -> None:
    assert reason in patched(folder, content, workers()).refusals[0].reason


def test_a_character_outside_the_encoding_is_refused(folder: Path) -> None:
    source = b"# coding: latin-1\nrun()\n"
    assert "no such character" in patched(folder, source, after(2, "p('ж')")).refusals[0].reason


def test_files_that_a_patch_does_not_reach_are_refused(folder: Path) -> None:
    source = "x = DataLoader(d)\n"
    (folder.parent / "other.py").write_text(source)
    (folder / "link.py").symlink_to(folder.parent / "other.py")
    (folder / "nested").symlink_to(folder.parent)
    (folder / "here.py").write_text(source)
    (folder / "nested_folder").mkdir()
    expected = {
        f"{folder.parent}/other.py:1": "is not below",
        "../other.py:1": "is not below",
        "link.py:1": "link.py is a symbolic link",
        "nested/other.py:1": "nested is a symbolic link",
        "nested_folder:1": "no such file",
        "<string>:1": "no such file",
        "here.py": "no location FILE:LINE",
    }
    for location, reason in expected.items():
        edit = SetKeywords(location=location, function="DataLoader", keywords=(("a", "1"),))
        assert reason in make_patch([edit], folder).refusals[0].reason


def test_a_file_that_cannot_be_read_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    (folder / "train.py").touch()
    (refused,) = make_patch([workers()], folder).refusals
    assert refused.reason == "it cannot be read: Permission denied"


def test_a_read_only_file_is_patched(folder: Path) -> None:
    (folder / "train.py").write_text("x = DataLoader(d)\n")
    (folder / "train.py").chmod(0o444)
    assert make_patch([workers()], folder).files


def test_a_patch_applies_in_a_folder_of_a_repository(tmp_path: Path) -> None:
    folder = tmp_path / "repository" / "project"
    folder.mkdir(parents=True)
    subprocess.run(["git", "init", "-q"], cwd=folder.parent, env=GIT_ENVIRONMENT, check=True)
    patch = patched(folder, b"x = DataLoader(d)\n", workers())
    (tmp_path / "nfold.patch").write_bytes(patch.diff)
    command = ["git", "apply", str(tmp_path / "nfold.patch")]
    subprocess.run(command, cwd=folder, env=GIT_ENVIRONMENT, check=True)
    assert (folder / "train.py").read_bytes() == patch.files[0].edited


@pytest.mark.parametrize(
    ("function", "called"),
    [
        ("DataLoader", DataLoader),
        ("DistributedDataParallel", DistributedDataParallel),
        ("set_detect_anomaly", torch.autograd.set_detect_anomaly),
        ("zero_grad", torch.optim.Optimizer.zero_grad),
    ],
)
def test_positional_parameters_are_those_of_pytorch(
    function: str, called: Callable[..., object]
) -> None:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    method = called.__init__ if isinstance(called, type) else called  # type: ignore[misc]
    parameters = inspect.signature(method).parameters.values()
    names = [each.name for each in parameters if each.kind in kinds][1:]
    assert POSITIONAL[function] == tuple(names[: len(POSITIONAL[function])])
