"""What is said about the remedies of a run, from the reports of its processes."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

from nfold.core.serialization import serialize
from nfold.core.variant import RunRemedies, Variant
from nfold.instrument.hooks.remedy_hooks import RemedyHooks
from nfold.instrument.hooks.script_remedies import ScriptRemedies
from nfold.instrument.run_remedies import describe_unapplied
from nfold.interventions.intervention import TorchSetting
from nfold.interventions.registry import REGISTRY
from nfold.tune.settings_file import keepable_remedies

REMEDIES = RunRemedies(
    variant=Variant(channels_last=True, threads=2),
    workers=3,
    refused=(("tf32", "CPU devices have no TF32"),),
)
REFUSED = "tf32 was not applied: CPU devices have no TF32"


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ({}, [REFUSED]),
        (
            {"0-7": ["threads"]},
            [
                REFUSED,
                "channels_last was not applied: no convolution",
                "workers was not applied: no DataLoader of the training",
            ],
        ),
        ({"0-7": ["threads"], "0-8": ["threads", "channels_last", "workers"]}, [REFUSED]),
        ({"0-7": ["threads", "workers"], "1-8": ["channels_last"]}, [REFUSED, "channels_last"]),
        ({"0-7": None, "0-8": ["threads", "channels_last", "workers"]}, [REFUSED]),
        (
            {"0-7": None},
            [REFUSED, *(f"{n} was not applied: the script did not" for n in REMEDIES.names)],
        ),
    ],
)
def test_what_no_process_of_the_rank_has_applied_is_said(
    tmp_path: Path, reports: dict[str, list[str] | None], expected: list[str]
) -> None:
    for name, applied in reports.items():
        (tmp_path / f"remedies-{name}.json").write_text(json.dumps(applied))
    lines = describe_unapplied(tmp_path, REMEDIES)
    assert len(lines) == len(expected)
    assert all(any(line.startswith(text) for line in lines) for text in expected)


PROCESS = """
import sys
from pathlib import Path
from nfold.instrument.run_remedies import RemediedProcess
process = RemediedProcess(sys.argv[1], Path(sys.argv[2]), 0)
process.install()
assert "torch" not in sys.modules
if sys.argv[3:]:
    import torch
    torch.set_num_threads(1)
    torch.backends.cudnn.benchmark = False
    model = torch.nn.Conv2d(1, 1, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 1, 3, 3)).sum().backward()
    optimizer.step()
    assert torch.get_num_threads() == 2
    assert torch.backends.cudnn.benchmark
    handles = torch.nn.modules.module._global_forward_hooks
    assert len(handles) == 0
process.write_report()
"""


@pytest.mark.slow(parts=8)
@pytest.mark.parametrize("with_torch", [False, True])
def test_hooks_are_installed_when_torch_is_imported(tmp_path: Path, *, with_torch: bool) -> None:
    remedies = RunRemedies(variant=Variant(channels_last=True, threads=2, cudnn_benchmark=True))
    text = json.dumps(serialize(remedies))
    arguments = [text, str(tmp_path), *(["torch"] if with_torch else [])]
    subprocess.run([sys.executable, "-c", PROCESS, *arguments], check=True)
    (report,) = tmp_path.iterdir()
    assert report.name.startswith("remedies-0-")
    applied = ["threads", "channels_last", "cudnn_benchmark"] if with_torch else None
    assert json.loads(report.read_text()) == applied


VALUES = {
    "compiled": "default",
    "threads": 2,
    "ddp_bucket_mb": 100,
    "nccl_algorithm": "Ring",
    "nccl_protocol": "LL",
    "loader_prefetch_factor": 4,
    "gradient_compression": "bf16",
    "run_plan": (("precision", "bf16"),),
}


@pytest.mark.parametrize("name", [n for n in keepable_remedies() if n in REGISTRY])
def test_a_run_applies_every_remedy_that_can_be_kept(name: str) -> None:
    """It is a variable, an argument of DDP or a setting, or the hooks of a run know its name."""
    intervention = REGISTRY[name]
    is_switch = isinstance(intervention.default, bool)
    value = not intervention.default if is_switch else VALUES[name]
    in_general = intervention.environment(value, {}) or isinstance(intervention, TorchSetting)
    sources = inspect.getsource(RemedyHooks) + inspect.getsource(ScriptRemedies)
    by_name = f'"{name}"' in sources
    wraps = bool(intervention.ddp_arguments(value) or intervention.loader_arguments(value))
    assert bool(in_general) + by_name + wraps == 1
    assert bool(intervention.needed_in_run) == (by_name or wraps)
