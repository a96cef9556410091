"""The field reports by name, made from whatever measurements there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nfold.errors import UnknownValue
from nfold.measurement import Measurement
from nfold.report.field import cifar, conv2d, inception, layout, mnist
from nfold.report.field.base import FieldReport
from nfold.report.results import Result, results
from nfold.summary import cells

MADE: dict[str, Callable[[Sequence[Result]], FieldReport]] = {
    "conv2d-devices": conv2d.report,
    "mirrored-mnist": mnist.report,
    "inception-input": inception.report,
    "cifar-scaling": cifar.report,
    "layout": layout.report,
}


def field_report(name: str, measurements: Sequence[Measurement]) -> FieldReport:
    """The field report of that name, of the newest measurement's machine.

    Raises UnknownValue with the names for another one.
    """
    if name not in MADE:
        raise UnknownValue("report", name, MADE)
    machine = measurements[-1].machine.id if measurements else None
    own = [m for m in measurements if m.machine.id == machine]
    return MADE[name](results(cells(own)))
