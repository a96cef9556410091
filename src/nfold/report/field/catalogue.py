"""The field reports by name, made from whatever measurements there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nfold.errors import UnknownValue
from nfold.measurement import Measurement
from nfold.report.field import cifar, conv2d, inception, layout, mnist
from nfold.report.field.base import FieldReport
from nfold.report.results import CellResult, compute_results
from nfold.summary import group_cells

REPORT_BUILDERS: dict[str, Callable[[Sequence[CellResult]], FieldReport]] = {
    "conv2d-devices": conv2d.conv2d_report,
    "mirrored-mnist": mnist.mnist_report,
    "inception-input": inception.inception_report,
    "cifar-scaling": cifar.cifar_report,
    "layout": layout.layout_report,
}


def build_field_report(name: str, measurements: Sequence[Measurement]) -> FieldReport:
    """The field report of that name, of the newest measurement's machine.

    Raises UnknownValue with the names for another one.
    """
    if name not in REPORT_BUILDERS:
        raise UnknownValue("report", name, REPORT_BUILDERS)
    machine = measurements[-1].machine.id if measurements else None
    own = [m for m in measurements if m.machine.id == machine]
    return REPORT_BUILDERS[name](compute_results(group_cells(own)))
