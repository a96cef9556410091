"""The reference result, and the comparison that makes a wrong result a failed measurement."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np
import numpy.typing as npt
from scipy import signal

from nfold.errors import Mismatch

AnyFloat = npt.NDArray[np.floating]

TOLERANCES: dict[str, float] = {"fp32": 5e-5, "tf32": 5e-3, "bf16": 2e-2, "fp16": 5e-3}
"""The largest difference allowed, relative to the largest value of the reference.

A few units in the last place of each format (24, 11, 8 and 11 significant bits), with room for
the error of Winograd's algorithm (Lavin and Gray, CVPR 2016). fp32's bound also finds tf32 where
it was not asked for: rounding images to 11 bits makes 2.3e-4 and more with random filters.
"""


def convolve_image(image: AnyFloat, filters: AnyFloat) -> AnyFloat:
    """scipy's ``same`` convolution of [channels in, h, w], summed over input channels.

    ``filters`` is [channels out, channels in, k, k]; the result is [channels out, h, w].
    """
    return np.stack([_convolve_channels(image, per_channel) for per_channel in filters])


def _convolve_channels(image: AnyFloat, filters: AnyFloat) -> AnyFloat:
    pairs = zip(image, filters, strict=True)
    return reduce(np.add, [signal.convolve2d(x, f, mode="same") for x, f in pairs])


def scipy_reference(images: AnyFloat, filters: AnyFloat) -> npt.NDArray[np.float64]:
    """The convolution of images [n, channels, h, w] by scipy in double precision."""
    wide = filters.astype(np.float64)
    return np.stack([convolve_image(image.astype(np.float64), wide) for image in images])


def spot_check_indices(count: int) -> list[int]:
    """The places of a handful of images out of ``count``: first, middle and last."""
    return sorted({0, count // 2, count - 1}) if count else []


def check_result(
    result: AnyFloat, expected: AnyFloat, images: Sequence[int], precision: str
) -> None:
    """Raise Mismatch where a result [n, ...] is not the expected one, NaN and Inf included.

    ``images`` are the indices to name in the message. Differences are relative to the largest
    expected value of all, because a sum of many products rounds in units of its largest.
    """
    if result.shape != expected.shape:
        raise Mismatch(f"the result has shape {result.shape}, its reference {expected.shape}")
    gaps = np.abs(result.astype(np.float64) - expected).reshape(len(images), -1).max(axis=1)
    worst = int(np.argmax(np.where(np.isfinite(gaps), gaps, np.inf)))
    scale = float(np.abs(expected).max())
    allowed = TOLERANCES[precision] * scale
    if not gaps[worst] <= allowed:
        raise Mismatch(
            f"image {images[worst]} differs from scipy's by up to {gaps[worst]:.3g}; allowed at "
            f"{precision} are {allowed:.3g} ({TOLERANCES[precision]:g} of the largest, {scale:.3g})"
        )
