"""Tables, sentences and JSON of a field report, and the numbers of the published reports."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nfold.analysis import cell_labels
from nfold.analysis.cell_labels import Footnotes, failure_location
from nfold.analysis.comparison import CellResult
from nfold.core.format import (
    NO_NUMBER,
    STATUS_LABELS,
    format_half_width,
    format_number,
    superscript,
    terminal_safe,
)
from nfold.core.serialization import serialize
from nfold.core.stats import Interval

_NUMBER = (int, float, Interval)


@dataclass(frozen=True, kw_only=True)
class SheetEntry:
    """A table cell; ``value`` is the unrounded number."""

    text: str
    value: Any = None

    def to_json(self) -> Any:
        if self.value is not None:
            return serialize(self.value)
        return None if self.text in ("", NO_NUMBER) else self.text


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """One table of a field report; every row has an entry per head."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[SheetEntry, ...], ...]
    notes: tuple[str, ...] = ()

    @property
    def texts(self) -> list[list[str]]:
        return [[entry.text for entry in row] for row in self.rows]

    @property
    def numeric(self) -> list[bool]:
        """Which columns hold numbers, to be right-aligned."""
        columns = zip(*self.rows, strict=True)
        return [any(isinstance(e.value, _NUMBER) for e in column) for column in columns]

    def to_json(self) -> dict[str, Any]:
        heads = self.heads
        rows = [dict(zip(heads, (one.to_json() for one in row), strict=True)) for row in self.rows]
        return {"title": self.title, "rows": rows, "notes": list(self.notes)}


@dataclass(frozen=True, kw_only=True)
class FieldReport:
    """Tables with published and new numbers, and sentences computed from the new ones.

    ``published_setup`` is the hardware and software of the published numbers.
    """

    name: str
    title: str
    published_setup: str
    sentences: tuple[str, ...]
    sheets: tuple[Sheet, ...]

    def to_json(self) -> dict[str, Any]:
        """Return ``report`` of the versioned JSON: unrounded rows, by head."""
        return {
            "name": self.name,
            "title": self.title,
            "then": self.published_setup,
            "sentences": list(self.sentences),
            "tables": [sheet.to_json() for sheet in self.sheets],
        }


NO_NUMBER_ENTRY = SheetEntry(text=NO_NUMBER)
BLANK_ENTRY = SheetEntry(text="")


def number_entry(value: float | None, form: Callable[[float], str] = format_number) -> SheetEntry:
    """Return an entry of a rounded number, or of no number."""
    return NO_NUMBER_ENTRY if value is None else SheetEntry(text=form(value), value=value)


def interval_entry(
    interval: Interval | None, places: int | None = None, unit: str = ""
) -> SheetEntry:
    """Return an entry of a number and the half width of its interval."""
    if interval is None:
        return NO_NUMBER_ENTRY
    spread = format_half_width(interval, places)
    text = f"{format_number(interval.value, places)}{unit}{f' {spread}' if spread else ''}"
    return SheetEntry(text=text, value=interval)


@dataclass
class SheetBuilder:
    """Collects the rows of a sheet; reasons of failures become footnotes."""

    title: str
    heads: Sequence[str]
    _rows: list[tuple[SheetEntry, ...]] = field(default_factory=list)
    _notes: Footnotes = field(default_factory=Footnotes)

    def add(self, *entries: SheetEntry | str | int) -> None:
        """Add a row; missing entries at its end are blank."""
        blank = [BLANK_ENTRY] * (len(self.heads) - len(entries))
        self._rows.append((*map(_as_entry, entries), *blank))

    def failure_entry(self, result: CellResult) -> SheetEntry:
        """Return the status of a failed cell, with its cause as a footnote."""
        worst = result.cell.first_failed_or_first
        cause = failure_location(worst)
        mark = superscript((self._notes.mark(cause),)) if worst.cause else ""
        return SheetEntry(
            text=f"{STATUS_LABELS[worst.status]}{mark}",
            value={"status": worst.status, "cause": cause},
        )

    def build(self) -> Sheet:
        marked = [f"{superscript((k,))} {t}" for k, t in enumerate(self._notes.texts, start=1)]
        return Sheet(
            title=self.title, heads=tuple(self.heads), rows=tuple(self._rows), notes=tuple(marked)
        )


def _as_entry(entry: SheetEntry | str | int) -> SheetEntry:
    if isinstance(entry, SheetEntry):
        return entry
    if isinstance(entry, int):
        return SheetEntry(text=f"{entry:,}", value=entry)
    return SheetEntry(text=terminal_safe(entry))


def select_workloads(found: Iterable[CellResult], *names: str) -> list[CellResult]:
    """Return the cells of some workloads, with any parameters."""
    return [result for result in found if result.cell.first.workload.name in names]


def device_counts(found: Iterable[CellResult]) -> list[int]:
    return sorted({result.devices for result in found})


def differing_axes(found: Sequence[CellResult]) -> list[str]:
    """Return the axes that differ between cells of the same framework.

    Axes that follow from the framework are not among them.
    """
    frameworks = dict.fromkeys(result.plan.framework for result in found)
    groups = [[r.cell for r in found if r.plan.framework == name] for name in frameworks]
    named = {axis for group in groups if len(group) > 1 for axis in cell_labels.varying_axes(group)}
    return [axis for axis in cell_labels.CELL_AXES if axis in named]


def differing_self_explanatory_axes(found: Sequence[CellResult]) -> list[str]:
    """Return the differing axes whose values explain themselves."""
    shown = set(cell_labels.SELF_EXPLANATORY_AXES) - {"framework", "device"}
    return [axis for axis in differing_axes(found) if axis in shown]


# axes that may differ within a group
GROUP_DIFFERENCES = ("devices", "batch", *cell_labels.DEVICE_DEPENDENT_AXES)


@dataclass(frozen=True, kw_only=True)
class DeviceGroup:
    """Cells by device count. ``batch`` is global, or named as per device."""

    cells: dict[int, CellResult]
    batch: str

    @property
    def smallest(self) -> CellResult:
        return self.cells[min(self.cells)]

    @property
    def largest(self) -> CellResult:
        return self.cells[max(self.cells)]


def group_by_batch(found: Sequence[CellResult]) -> list[DeviceGroup]:
    """Group cells by global batch; or by batch per device, if each global batch has one cell."""
    kept = [axis for axis in cell_labels.CELL_AXES if axis not in GROUP_DIFFERENCES]
    alike: dict[tuple[Any, ...], list[CellResult]] = defaultdict(list)
    for result in sorted(found, key=lambda r: r.devices):
        alike[tuple(cell_labels.axis_value(result.cell.first, axis) for axis in kept)].append(
            result
        )
    return [group for results in alike.values() for group in _split(results)]


def _split(results: Sequence[CellResult]) -> list[DeviceGroup]:
    strong = _by([(r.batch, r) for r in results])
    weak = _by([(r.batch // r.devices, r) for r in results])
    is_weak = len(strong) == len(results) > len(weak)
    chosen, form = (weak, "{:,} a device") if is_weak else (strong, "{:,}")
    return [DeviceGroup(cells=cells, batch=form.format(batch)) for batch, cells in chosen.items()]


def _by(keyed: Sequence[tuple[int, CellResult]]) -> dict[int, dict[int, CellResult]]:
    groups: dict[int, dict[int, CellResult]] = defaultdict(dict)
    for key, result in keyed:
        groups[key].setdefault(result.devices, result)
    return dict(sorted(groups.items()))


# Numbers of the five field reports of 2016 to 2019, as published.

CONV2D_SETUP = (
    "TensorFlow 1 on K80 and V100 cards, 12 virtual cores; 840 images of 100 × 100, filter 3 × 3, "
    "one timed call without warm-up"
)
# one timed call on 1 to 8 GPUs, by card
CONV2D_MS = {
    "V100": (14897.8, 4328.1, 5645.4, 684.2, 744.7, 731.5, 726.5, 721.6),
    "K80": (3248.4, 3380.7, 3837.3, 690.7, 691.7, 588.1, 581.1, 647.2),
}
CONVOLVE2D_MS = 222.0  # scipy.signal.convolve2d in a loop on one core, ± 4

MNIST_SETUP = "TensorFlow 1 Estimator with MirroredStrategy on GTX 1080 cards, 10,000 steps"
MNIST_STEPS = 10_000
# devices, batch per device, accuracy, seconds
MNIST_ROWS = ((1, 100, 0.9511, 68.0), (2, 50, 0.9515, 90.6))

INCEPTION_SETUP = "TensorFlow 1 on two Titan X cards, December 2016, batch 32"
# examples/s and s/batch (minimum, maximum), by device of the distortion and GPUs
INCEPTION_RATES = {
    ("cpu", 1): ((44.6, 45.2), (0.71, 0.71)),
    ("cpu", 2): ((38.8, 42.3), (0.77, 0.82)),
    ("device", 1): ((69.2, 69.6), (0.46, 0.46)),
    ("device", 2): ((88.7, 108.9), (0.29, 0.36)),
}

CIFAR_SETUP = "PyTorch 1.1, nn.DataParallel on two RTX 2080 Ti cards, 2019, float32, 100 epochs"
CIFAR_EPOCHS = 100
# By model, global batch and GPUs: seconds of epoch 1, median of later epochs, total seconds, test
# accuracy; None ran out of memory. The Wide ResNet is WRN-28-10.
CIFAR_CELLS: dict[tuple[str, int, int], tuple[float, float, float, float] | None] = {
    ("cnn10", 128, 1): (15.86, 13.90, 1395.0, 0.8915),
    ("cnn10", 128, 2): (16.07, 11.92, 1204.0, 0.8896),
    ("cnn10", 256, 1): (12.72, 12.29, 1228.0, 0.8900),
    ("cnn10", 256, 2): (8.96, 9.00, 900.0, 0.8912),
    ("cnn10", 512, 1): (13.60, 11.33, 1133.0, 0.8837),
    ("cnn10", 512, 2): (8.74, 7.80, 781.0, 0.8816),
    ("cnn10", 1024, 1): (16.52, 10.93, 1097.0, 0.8860),
    ("cnn10", 1024, 2): (9.52, 7.24, 725.0, 0.8814),
    ("cnn10", 2048, 1): (15.50, 10.80, 1083.0, 0.8639),
    ("cnn10", 2048, 2): (8.34, 7.05, 705.0, 0.8688),
    ("wide_resnet", 128, 1): (111.89, 110.42, 11037.0, 0.8743),
    ("wide_resnet", 128, 2): (72.75, 70.58, 7058.0, 0.8559),
    ("wide_resnet", 256, 1): (105.71, 105.47, 10548.0, 0.8011),
    ("wide_resnet", 256, 2): (58.43, 60.83, 6082.0, 0.8109),
    ("wide_resnet", 512, 1): None,
    ("wide_resnet", 512, 2): (59.01, 56.49, 5654.0, 0.7695),
}

LAYOUT_SETUP = "TensorFlow/Keras 1.13.1 on two RTX 2080 Ti cards, 2019, float32"
# channels_first over channels_last on one GPU, by model
LAYOUT_GAINS = {"cnn10": "a little under 1.10", "wide_resnet": "a little under 1.05"}
