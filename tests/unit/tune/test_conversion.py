"""Conversions of small scripts in many styles: what they change, or the line that stands in the way."""

from __future__ import annotations

import ast
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nfold.core.script_profile import DataLoaderProfile, ScriptProfile, SourceLocation
from nfold.core.workload import Workload
from nfold.tune.conversion.conversion_edits import Conversion, plan_conversion
from nfold.tune.keep import convert_script, edit_script
from nfold.tune.remedies import Remedy
from nfold.tune.source_patch import make_patch

HEADER = """import torch
from torch import nn, optim
from torch.utils.data import DataLoader
"""
MODULE = """
loader = DataLoader(data, batch_size=32, shuffle=True)
model = nn.Linear(4, 2)
optimizer = optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
"""
FUNCTION = """
def main():
    args = parse()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader = DataLoader(data, batch_size=32)
    model = nn.Linear(4, 2).to(device)
    optimizer = optim.SGD(model.parameters(), lr=args.lr)
    for epoch in range(9):
        for x, y in loader:
            criterion(model(x), y).backward()
            optimizer.step()


if __name__ == "__main__":
    main()
"""


def line_of(source: str, text: str, number: int = 0) -> str:
    """Return ``train.py:7``, the line of the ``number``-th occurrence of a text."""
    lines = [at for at, line in enumerate(source.splitlines(), 1) if text in line]
    return f"train.py:{lines[number]}"


def profile_of(source: str, **changes: Any) -> ScriptProfile:
    """Return what a probe run observes in a script of this module."""
    optimizers = [
        f"train.py:{at}" for at, line in enumerate(source.splitlines(), 1) if "optim." in line
    ]
    loader = DataLoaderProfile(
        batch_size=32, sampler="RandomSampler", created_at=line_of(source, "DataLoader(")
    )
    locations = {
        "optimizer": tuple(SourceLocation(line=line) for line in optimizers),
        "step": (SourceLocation(line=line_of(source, ".step()"), per_step=1.0),),
    }
    found = ScriptProfile(loader=loader, source_locations=locations, optimizers=("SGD",))
    return dataclasses.replace(found, **changes)


@dataclass(frozen=True)
class Converted:
    plan: Conversion
    source: str
    edited: str

    @property
    def added(self) -> list[str]:
        return [line.strip() for line in self.edited.splitlines() if line not in self._old]

    @property
    def removed(self) -> list[str]:
        new = self.edited.splitlines()
        return [line.strip() for line in self.source.splitlines() if line not in new]

    @property
    def _old(self) -> list[str]:
        return self.source.splitlines()


def convert(folder: Path, source: str, **changes: Any) -> Converted:
    (folder / "train.py").write_bytes(source.encode())
    plan = plan_conversion(profile_of(source, **changes), "train.py", folder)
    patch = make_patch(plan.edits, folder)
    assert [str(one) for one in patch.refusals] == []
    edited = patch.files[0].edited.decode() if patch.files else source
    ast.parse(edited)
    return Converted(plan, source, edited)


def test_a_script_without_functions(tmp_path: Path) -> None:
    found = convert(tmp_path, HEADER + MODULE)
    assert found.edited == (
        """import torch
from torch import nn, optim
from torch.utils.data import DataLoader
import nfold

run = nfold.Run()
loader = DataLoader(data, batch_size=32, shuffle=True)
loader = run.loader(loader)
model = nn.Linear(4, 2)
optimizer = optim.SGD(model.parameters(), lr=0.1)
model, optimizer = run.prepare(model, optimizer)
for x, y in loader:
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
"""
    )


ADDED = [
    "import nfold",
    "run = nfold.Run()",
    "loader = run.loader(loader)",
    "model, optimizer = run.prepare(model, optimizer)",
]


def test_a_function_begins_the_run_before_its_first_use_of_a_device(tmp_path: Path) -> None:
    found = convert(tmp_path, HEADER + FUNCTION)
    assert found.added == ADDED
    assert found.removed == []
    lines = found.edited.splitlines()
    assert lines[lines.index("    run = nfold.Run()") + 1].startswith("    device = ")


@pytest.mark.parametrize(("old", "new"), [("    ", "\t"), ("\n", "\r\n"), ("    ", "  ")])
def test_tabs_line_ends_and_indentation_stay(tmp_path: Path, old: str, new: str) -> None:
    source = (HEADER + FUNCTION).replace(old, new)
    found = convert(tmp_path, source)
    assert found.edited.replace(new, old) == convert(tmp_path, HEADER + FUNCTION).edited


def test_the_main_block_of_a_script(tmp_path: Path) -> None:
    block = "\nif __name__ == '__main__':\n    torch.manual_seed(1)" + MODULE.replace(
        "\n", "\n    "
    )
    found = convert(tmp_path, HEADER + block)
    assert found.added == ADDED
    assert "    torch.manual_seed(1)\n    run = nfold.Run()\n    loader = " in found.edited


HELPERS = """
def build():
    return nn.Linear(4, 2).cuda()


def make_loader(train):
    return DataLoader(data(train), batch_size=32)


def make_optimizer(net, lr):
    return optim.SGD(net.parameters(), lr=lr)


def train(net, loader, optimizer):
    net.train()
    for i, (x, y) in enumerate(loader):
        criterion(net(x), y).backward()
        optimizer.step()
    print(len(loader.dataset))


def main():
    model = build()
    train_loader = make_loader(True)
    test_loader = make_loader(False)
    optimizer = make_optimizer(model, lr=0.1)
    for epoch in range(3):
        train(model, train_loader, optimizer)


if __name__ == "__main__":
    main()
"""


def test_helper_functions_make_model_loader_and_optimizer(tmp_path: Path) -> None:
    found = convert(tmp_path, HEADER + HELPERS)
    assert found.removed == []
    assert found.added == [
        "import nfold",
        "run = nfold.Run()",
        "train_loader = run.loader(train_loader)",
        "model, optimizer = run.prepare(model, optimizer)",
    ]
    assert "def main():\n    run = nfold.Run()\n    model = build()\n" in found.edited


def test_a_function_that_makes_two_loaders_is_left_as_it_is(tmp_path: Path) -> None:
    old = "    return DataLoader(data(train), batch_size=32)\n"
    new = "    loader = DataLoader(data(train), batch_size=32)\n    return loader\n"
    found = convert(tmp_path, HEADER + HELPERS.replace(old, new))
    assert "train_loader = run.loader(train_loader)" in found.added
    assert new in found.edited


def test_names_in_several_functions_need_a_run_of_the_module(tmp_path: Path) -> None:
    save = "\ndef save(model):\n    torch.save(\n        model.state_dict(), 'a.pt'\n    )\n\n"
    found = convert(tmp_path, HEADER + save + FUNCTION)
    assert 'if __name__ == "__main__":\n    run = nfold.Run()\n    main()\n' in found.edited
    assert (
        "def save(model):\n    if run.is_main:\n        torch.save(\n"
        "            model.state_dict(), 'a.pt'\n        )\n"
    ) in found.edited


def test_two_optimizers_with_models_of_their_own(tmp_path: Path) -> None:
    source = HEADER + (
        "loader = DataLoader(data, batch_size=32)\n"
        "net_d, net_g = nn.Linear(4, 1), nn.Linear(1, 4)\n"
        "d = optim.Adam(net_d.parameters())\n"
        "g = optim.Adam(\n    net_g.parameters(),\n    lr=0.1,\n)\n"
        "for x in loader:\n    d.step(); g.step()\n"
    )
    found = convert(
        tmp_path,
        source,
        source_locations={
            "optimizer": tuple(
                SourceLocation(line=line_of(source, text)) for text in ("d = opt", "g = opt")
            ),
            "step": (SourceLocation(line=line_of(source, "d.step()")),),
        },
    )
    assert "net_d, d = run.prepare(net_d, d)" in found.added
    assert "net_g, g = run.prepare(net_g, g)" in found.added
    assert found.removed == []


@pytest.mark.parametrize(
    ("wrapped", "unwrapped"),
    [
        ("model = nn.DataParallel(model)\n", ""),
        ("model = nn.DataParallel(model)  # all\n", "# all\n"),
        ("model = nn.DataParallel(model, device_ids=[0, 1]).cuda()\n", "model = model.cuda()\n"),
        ("model = nn.DataParallel(net if a else b).cuda()\n", "model = (net if a else b).cuda()\n"),
        ("model = torch.nn.DataParallel(module=Net())\n", "model = Net()\n"),
        ("if n > 1:\n    model = nn.DataParallel(model)\n", "if n > 1:\n    pass\n"),
        (
            "if n > 1:\n    print(n)\n    model = nn.DataParallel(model)\n",
            "if n > 1:\n    print(n)\n",
        ),
        (
            "model = nn.DataParallel(model)\nsave(model.module.state_dict())\n",
            "save(model.state_dict())\n",
        ),
    ],
)
def test_data_parallel_is_removed(tmp_path: Path, wrapped: str, unwrapped: str) -> None:
    def script(line: str) -> str:
        return HEADER + MODULE.replace("optimizer = ", line + "optimizer = ", 1)

    found = convert(tmp_path, script(wrapped), parallel="dp")
    assert found.edited == convert(tmp_path, script(unwrapped)).edited


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('device = "cuda:0"\n', 'device = "cuda"\n'),
        ("device = torch.device('cuda:1' if ok else 'cpu')\n", None),
        ("p.add_argument('--device', default='cuda:0')\n", None),
        ("x.cuda(0)\n", "x.cuda()\n"),
        ("device = torch.device('cuda', 0)\n", "device = torch.device('cuda')\n"),
        ("device = torch.device('cuda', index=1)\n", "device = torch.device('cuda')\n"),
    ],
)
def test_devices_with_a_number_become_the_current_one(
    tmp_path: Path, old: str, new: str | None
) -> None:
    new = new or old.replace("cuda:0", "cuda").replace("cuda:1", "cuda")
    found = convert(tmp_path, HEADER + old + MODULE)
    assert found.edited == convert(tmp_path, HEADER + new + MODULE).edited


def test_a_schedule_is_prepared_with_its_optimizer(tmp_path: Path) -> None:
    schedule = "scheduler = optim_lr.StepLR(optimizer, 3)\nfor x, y"
    found = convert(tmp_path, HEADER + MODULE.replace("for x, y", schedule))
    prepared = "model, optimizer, scheduler = run.prepare(model, optimizer, scheduler)"
    assert f"StepLR(optimizer, 3)\n{prepared}\n" in found.edited


def test_a_choice_of_optimizers_is_prepared_as_a_whole(tmp_path: Path) -> None:
    choice = (
        "if adam:\n    optimizer = optim.Adam(model.parameters())\n"
        "else:\n    optimizer = SGD(model.parameters())\n"
    )
    line = "optimizer = optim.SGD(model.parameters(), lr=0.1)\n"
    found = convert(tmp_path, HEADER + MODULE.replace(line, choice))
    assert f"{choice}model, optimizer = run.prepare(model, optimizer)\n" in found.edited


def test_another_name_for_the_run_if_the_script_has_one(tmp_path: Path) -> None:
    found = convert(tmp_path, HEADER + "run = 3\n" + MODULE)
    assert "nfold_run = nfold.Run()" in found.added
    assert "loader = nfold_run.loader(loader)" in found.added


def test_a_model_of_the_module_is_not_made_local(tmp_path: Path) -> None:
    source = (
        HEADER
        + "model = nn.Linear(4, 2)\n"
        + FUNCTION.replace("    model = nn.Linear(4, 2).to(device)\n", "")
    )
    found = convert(tmp_path, source)
    assert "    run.prepare(model, optimizer)\n" in found.edited


TRAINER = """
class Trainer:
    def __init__(self):
        self.loader = DataLoader(data, batch_size=32)
        self.model = nn.Linear(4, 2)
        self.optimizer = optim.SGD(self.model.parameters(), lr=0.1)

    def train(self):
        for x, y in self.loader:
            self.optimizer.step()
"""


@pytest.mark.parametrize(
    ("source", "text", "reason"),
    [
        (TRAINER, "optim.SGD", "an object keeps the model"),
        (
            MODULE.replace("loader = DataLoader", "loaders['a'] = DataLoader").replace(
                "in loader", "in loaders['a']"
            ),
            "in loaders",
            "loaders['a'] is no plain name",
        ),
        (MODULE + "loader.sampler.set_epoch(1)\n", "set_epoch", "has no sampler"),
        ("import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '1'" + MODULE, "os.environ", "it sets"),
        ("torch.cuda.set_device(0)" + MODULE, "set_device", "every device would use this GPU"),
        ("a, b = 'cuda:0', 'cuda:1'" + MODULE, "cuda:0", "several GPUs itself: cuda:0, cuda:1"),
        (
            MODULE.replace("optimizer = ", "optimizers = [").replace("lr=0.1)", "lr=0.1)]"),
            "optim.SGD",
            "no plain name is assigned the optimizer",
        ),
        (
            MODULE + "s = ReduceLROnPlateau(optimizer)\n",
            "ReduceLROnPlateau",
            "differ between devices",
        ),
        (MODULE.replace("model.parameters()", "weights"), "optim.SGD", "the model whose param"),
    ],
)
def test_the_line_that_stands_in_the_way(
    tmp_path: Path, source: str, text: str, reason: str
) -> None:
    source = HEADER + source
    (tmp_path / "train.py").write_text(source)
    plan = plan_conversion(profile_of(source), "train.py", tmp_path)
    assert plan.edits == ()
    place, _, found = plan.obstacle.partition(": ")
    assert place == line_of(source, text)
    assert reason in found


@pytest.mark.parametrize(
    ("changes", "text", "reason"),
    [
        ({"loader": None}, ".step()", "no DataLoader makes the batches"),
        ({"accumulation": 4}, ".step()", "accumulate=4"),
        ({"parallel": "ddp"}, ".step()", "over processes itself"),
        ({"trainer": "lightning"}, None, "lightning moves the model"),
        ({"loader": {"sampler": "WeightedRandomSampler"}}, "DataLoader(", "WeightedRandomSampler"),
        ({"loader": {"batch_size": None}}, "DataLoader(", "batch size of the DataLoader"),
    ],
)
def test_what_the_probe_run_observed_may_stand_in_the_way(
    tmp_path: Path, changes: dict[str, Any], text: str | None, reason: str
) -> None:
    source = HEADER + MODULE
    profile = profile_of(source)
    if changes.get("loader"):
        changes = {"loader": dataclasses.replace(profile.training_loader, **changes["loader"])}
    plan = plan_conversion(dataclasses.replace(profile, **changes), "train.py", tmp_path)
    assert plan.edits == ()
    assert reason in plan.obstacle
    assert text is None or plan.obstacle.startswith(f"{line_of(source, text)}: ")


def test_optimizers_in_two_files_stand_in_the_way(tmp_path: Path) -> None:
    source = HEADER + MODULE
    (tmp_path / "train.py").write_text(source)
    lines = (line_of(source, "optim.SGD"), "other.py:3")
    locations = {"optimizer": tuple(SourceLocation(line=line) for line in lines)}
    profile = profile_of(source, source_locations=locations)
    plan = plan_conversion(profile, "train.py", tmp_path)
    assert plan.obstacle == "other.py:3: it constructs an optimizer, as another file does"


def test_copies_with_and_without_shuffling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = HEADER + MODULE
    (tmp_path / "train.py").write_text(source)
    workload = Workload.from_script("train.py")
    found = convert_script(profile_of(source), workload, tmp_path, tmp_path / "copies")
    texts = [
        Path(copy).read_text()
        for ((_, copy),) in (found.copy.sources, found.ordered_copy, found.ordered_original)
    ]
    assert [("nfold.Run()" in text, "shuffle=True" in text) for text in texts] == [
        (True, True),
        (True, False),
        (False, False),
    ]
    assert (tmp_path / "train.py").read_text() == source


def test_a_copy_has_the_conversion_and_the_remedies_of_its_loader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = HEADER + MODULE
    (tmp_path / "train.py").write_text(source)
    profile, copies = profile_of(source), tmp_path / "copies"
    converted = convert_script(profile, Workload.from_script("train.py"), tmp_path, copies).copy
    remedies = (Remedy(name="workers", value=2), Remedy(name="loader_pin_memory", value=True))
    found = edit_script(remedies, profile, converted, folder=tmp_path, copies=copies)
    ((_, copy),) = found.sources
    text = Path(copy).read_text()
    assert "nfold.Run()" in text
    assert "num_workers=2" in text
    assert "pin_memory=True" in text
    assert {*converted.patch.edits} < {*found.patch.edits}
    assert Path(converted.sources[0][1]).read_text() != text
    # The edited source has the second, and nfold's plan would say the number of workers before.
    assert found.at_run_time == remedies[:1]
