"""Augmentation of uint8 images on the device: ``nfold.Images``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nfold.core.errors import UnknownValue, UsageError

AUGMENTATIONS = ("crop", "flip", "cutout")
MAX_CHANNELS = 4  # of a stored image


class Images:
    """Augments and normalises the images of a batch, each with its own random numbers.

        train = run.loader((images, labels), 512, augment=nfold.Images(("crop", 4), ("flip", 0)))
        test = run.loader((images, labels), 512, train=False, augment=nfold.Images())

    The first tensor of a batch holds uint8 images [n, h, w, c] or [n, c, h, w] of 1 to 4
    channels. They become float [n, c, h, w]: (image / 255 - ``mean``) / ``std``, with one mean and
    std per channel. ``operations`` are applied in order: ``("crop", padding)``, ``("flip", 0)``,
    ``("cutout", size)``. Their random numbers depend on (seed, epoch, sample, operation) only, not
    on the number of devices; the generator is Philox 4×32 (J. Salmon and others, Parallel Random
    Numbers: As Easy as 1, 2, 3, 2011). Raises UsageError for an unknown operation and for a mean
    without a std.
    """

    def __init__(
        self,
        *operations: tuple[str, int],
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> None:
        check_augmentations(operations)
        if (mean is None) != (std is None) or len(mean or ()) != len(std or ()):
            raise UsageError(f"mean {mean} and std {std}: allowed are both, of one length, or none")
        if any(value <= 0 for value in std or ()):
            raise UsageError(f"std {std}: allowed are numbers above 0")
        self.operations = operations
        self.mean = None if mean is None else tuple(mean)
        self.std = None if std is None else tuple(std)


def check_augmentations(operations: Sequence[Any]) -> None:
    """Raise UsageError unless ``operations`` are pairs of a known name and a number from 0."""
    for entry in operations:
        if not (isinstance(entry, tuple) and len(entry) == 2 and type(entry[1]) is int):
            raise UsageError(f'augmentation {entry!r}: allowed are pairs such as ("crop", 4)')
        if entry[0] not in AUGMENTATIONS:
            raise UnknownValue("augmentation", entry[0], AUGMENTATIONS)
        if entry[1] < 0:
            raise UsageError(f"augmentation {entry!r}: allowed are whole numbers from 0")
