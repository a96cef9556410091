"""A user's own workload: its module found, its function called, what it returns checked."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nfold import workloads
from nfold.core.errors import UnknownValue, UsageError
from nfold.core.workload import Workload
from nfold.workloads import user_workload

HEAD = """
import numpy as np, torch, nfold
MODEL = torch.nn.Linear(3, 2)
IMAGES, FLOATS, LABELS = np.zeros((4, 8, 8, 3), np.uint8), np.zeros((4, 3)), np.arange(4)
def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)
"""
_numbers = itertools.count()
Written = Callable[..., Workload]


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Written]:
    """Writes a module with a function ``make`` that returns a Training of what is given."""
    before = list(sys.path)
    monkeypatch.chdir(tmp_path)

    def write(given: str = "", *, body: str = "", head: str = HEAD) -> Workload:
        name = f"made_{next(_numbers)}"
        parts = f"model=MODEL, train=(FLOATS, LABELS), optimizer=sgd, {given}"
        made = body or f"return nfold.Training(**dict({parts}))"
        (tmp_path / f"{name}.py").write_text(f"{head}\ndef make(depth=3):\n    {made}\n")
        return Workload.parse(f"{name}:make")

    yield write
    sys.path[:] = before


def test_arrays_and_tensors_are_kept_as_what_pytorch_computes_with(written: Written) -> None:
    found = user_workload.call_user_workload(
        written(body="return nfold.Training(model=MODEL, optimizer=sgd, train=(FLOATS, LABELS))")
    )
    assert [str(array.dtype) for array in found.train] == ["float32", "int64"]
    assert found.test is None
    tensors = "train=(torch.zeros(4, 5, dtype=torch.int32), torch.zeros(4, 5))"
    made = f"return nfold.Training(model=MODEL, optimizer=sgd, {tensors})"
    samples, targets = user_workload.call_user_workload(written(body=made)).train
    assert [str(samples.dtype), str(targets.dtype)] == ["int32", "float32"]
    assert targets.shape == (4, 5)


@pytest.mark.parametrize(
    ("samples", "kept"),
    [("u2", "int32"), ("u8", "int64"), (">i4", "int32"), ("f2", "float16"), ("?", "bool")],
)
def test_kinds_of_numbers(written: Written, samples: str, kept: str) -> None:
    given = f"train=(np.zeros((4, 2), {samples!r}), LABELS)"
    made = f"return nfold.Training(model=MODEL, optimizer=sgd, {given})"
    assert user_workload.call_user_workload(written(body=made)).train[0].dtype == kept


@pytest.mark.parametrize(
    ("samples", "are"),
    [("(2, 8, 8, 3)", True), ("(2, 8, 8, 1)", True), ("(2, 3, 8, 8)", False), ("(2, 8)", False)],
)
def test_images_are_uint8_with_few_channels_last(written: Written, samples: str, are: bool) -> None:
    train = f"train=(np.zeros({samples}, np.uint8), LABELS[:2])"
    made = f"return nfold.Training(model=MODEL, optimizer=sgd, {train})"
    assert user_workload.call_user_workload(written(body=made)).has_images is are


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return {}", "returned dict; allowed is nfold.Training"),
        ("train=(FLOATS, LABELS[:3])", "4 samples and 3 targets"),
        ("train=(FLOATS[:0], LABELS[:0])", "0 samples and 0 targets"),
        ("train=FLOATS", r"train is ndarray; allowed is a pair \(samples, targets\)"),
        ("train=(['a', 'b'], [0, 1])", "train samples are .*; allowed are numbers"),
        ("train=([[1], [1, 2]], [0, 1])", "train samples are list, not an array"),
        ("test=(FLOATS[:, :2], LABELS)", r"test samples are float32 \[n, 2\]"),
        ("model=3", "model is int; allowed is a torch.nn.Module"),
        ("model=torch.nn.ReLU()", "no parameters"),
        ("optimizer=sgd(MODEL)", "optimizer is SGD; allowed is a function"),
        ("loss='mse'", "loss is str"),
        ("batch=0", "batch 0: allowed are whole numbers from 1"),
        ("augmentation=(('crop', 4),)", "allowed are uint8 images"),
        ("train=(IMAGES, LABELS), augmentation=(('flop', 4),)", "allowed are flip"),
        ("augmentation=('flip',)", "allowed are pairs"),
        ("return nfold.Training()", r"TypeError.*made_\d+\.py:9\); next: python -c"),
        ("raise SystemExit(3)", r"SystemExit: 3 \(made_\d+\.py:9\)"),
        ("return 1 /", r"SyntaxError.*made_\d+\.py:9"),
    ],
)
def test_what_cannot_be_is_refused_with_what_is_allowed(
    written: Written, body: str, said: str
) -> None:
    whole = body.startswith(("return", "raise"))
    parts = f"dict(model=MODEL, train=(FLOATS, LABELS), optimizer=sgd) | dict({body})"
    made = body if whole else f"return nfold.Training(**({parts}))"
    with pytest.raises(UsageError, match=said):
        user_workload.call_user_workload(written(body=made))


def test_what_is_not_there_is_named(written: Written) -> None:
    workload = written()
    with pytest.raises(UnknownValue, match="'mak': allowed are make, sgd"):
        user_workload.call_user_workload(Workload.parse(workload.name[:-1]))
    with pytest.raises(UsageError, match=r"no module 'mad_x'; modules in this folder: .*made"):
        user_workload.call_user_workload(Workload.parse("mad_x:make"))
    missing = written(head="import nowhere_at_all")
    with pytest.raises(UsageError, match=r"nowhere_at_all.*\(made_\d+\.py:1\); next: install"):
        user_workload.call_user_workload(missing)


def test_parameters_are_the_integers_with_a_default() -> None:
    def make(depth: int = 3, rate: float = 0.1, deep: bool = True, *, width: int = 2) -> None: ...
    def needs(depth: int) -> None: ...

    workload = Workload.parse("a:make")
    assert user_workload.integer_parameters(workload, make) == {"depth": 3, "width": 2}
    with pytest.raises(UsageError, match="'depth' has no default"):
        user_workload.integer_parameters(workload, needs)


def test_code_that_changed_since_is_refused(written: Written) -> None:
    workload = written()
    user_workload.call_user_workload(workload)
    code = user_workload.code_digest(workload)
    assert len(code) == 16
    user_workload.call_user_workload(Workload(name=workload.name, code=code))
    Path(f"{workload.name.partition(':')[0]}.py").write_text("# other\n")
    with pytest.raises(UsageError, match="changed during the run"):
        user_workload.call_user_workload(Workload(name=workload.name, code=code))


@pytest.mark.slow(parts=8)
def test_what_its_module_imports_or_names_makes_it_another(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NCCL_ALGO", raising=False)
    Path("net_of_mine.py").write_text("DEPTH = 3\n")
    asked = written(head=f"{HEAD}import net_of_mine, os\nRATE = os.environ.get('RATE')\n")
    before = workloads.with_fingerprint(asked)
    assert len(before.imports) == 16
    assert workloads.with_fingerprint(asked) == before
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    ring = workloads.with_fingerprint(asked)
    assert ring.imports == before.imports
    assert {*ring.variables} - {*before.variables} == {("NCCL_ALGO", "Ring")}
    monkeypatch.setenv("RATE", "0.2")
    rated = workloads.with_fingerprint(asked)
    Path("net_of_mine.py").write_text("DEPTH = 4\n")
    deeper = workloads.with_fingerprint(asked)
    assert len({before.imports, rated.imports, deeper.imports}) == 3
    assert {before.code, rated.code, deeper.code} == {before.code}


@pytest.mark.slow(parts=8)
def test_fingerprint_of_a_package_covers_all_its_modules(written: Written) -> None:
    asked = written()
    Path("pack_of_mine").mkdir()
    Path(f"{asked.name.partition(':')[0]}.py").rename("pack_of_mine/__init__.py")
    package = Workload.parse("pack_of_mine:make")
    before = workloads.with_fingerprint(package)
    Path("pack_of_mine/net.py").write_text("")
    assert workloads.with_fingerprint(package).imports != before.imports


@pytest.mark.slow(parts=8)
def test_parent_describes_user_workload_without_imports(written: Written) -> None:
    workload = written("batch=2, test=(FLOATS, LABELS)", head="print('hello')" + HEAD)
    code = (
        "import sys; from nfold import workloads; from nfold.core.workload import Workload; "
        f"one = workloads.with_fingerprint(Workload.parse('{workload}:depth=4')); "
        "known = workloads.info(one.name); "
        "print(one, len(one.code), known.training_samples, known.defaults.batch, "
        "known.defaults.data_bytes, workloads.parameters(one), "
        "[m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{workload}:depth=4 16 4 2 80 {{'depth': 4}} []\n"


@pytest.mark.slow(parts=8)
def test_the_process_that_describes_may_fail(written: Written) -> None:
    asked = written(body="raise ValueError('too deep\\nindeed')")
    with pytest.raises(UsageError, match=r"ValueError: too deep \(made_\d+\.py:9\)"):
        workloads.info(asked.name)
    ended = written(head="import os; os._exit(7)")
    with pytest.raises(UsageError, match="exited with code 7"):
        workloads.info(ended.name)
    wrong = written(body="return nfold.Training(model=MODEL, train=(FLOATS, LABELS), "
                    "optimizer=lambda m: torch.optim.SGD(m.parameter()))")  # fmt: skip
    with pytest.raises(UsageError, match=r"AttributeError.*made_\d+\.py:9"):
        workloads.info(wrong.name)


def test_the_working_directory_is_importable(written: Written) -> None:
    user_workload.call_user_workload(written())
    assert sys.path[0] == os.getcwd()
