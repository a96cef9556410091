"""JPEGs to pixels, whole or at a reduced scale: simplejpeg where it is installed, else Pillow.

Both stand on libjpeg-turbo and give the same bytes (docs/decisions/input-pipeline.md); Pillow takes 1.6 times
as long.
"""

from __future__ import annotations

import io
import struct
from typing import Any

import numpy as np

from nfold.data.arrays import Images
from nfold.errors import ExtraMissing

try:
    import simplejpeg
except ImportError:
    simplejpeg = None

MAX_DCT_REDUCTION = 8
"""A JPEG's blocks have 8 × 8 coefficients: decoding can leave out all but one of them."""
MAX_PIXELS = 2**27
DECODE_ERRORS = (OSError, ValueError, SyntaxError, EOFError, struct.error)
"""What Pillow's reader raises for damaged bytes."""


def import_pillow() -> Any:
    """Pillow's module Image, or ExtraMissing."""
    try:
        from PIL import Image
    except ImportError:
        raise ExtraMissing("Pillow", "images") from None
    return Image


def verified_size(encoded: bytes) -> tuple[int, int]:
    """Height and width of a JPEG that decodes to its end; ValueError says what is wrong with it."""
    image_of = import_pillow()
    try:
        with image_of.open(io.BytesIO(encoded)) as image:
            width, height = image.size
            if image.format not in ("JPEG", "MPO"):
                raise ValueError(f"is {image.format}, not JPEG")
            if width * height > MAX_PIXELS:
                raise ValueError(f"is {width} × {height}, over {MAX_PIXELS} pixels")
            image.load()
    except image_of.DecompressionBombError as error:
        raise ValueError(f"is too large: {error}") from error
    except DECODE_ERRORS as error:
        said = str(error).replace(repr(error.__class__), "")
        raise ValueError(said if said.startswith("is ") else f"is no whole JPEG: {said}") from error
    return height, width


def decode_jpeg(encoded: Images, height: int, width: int, reduction: int = 1) -> Images:
    """The image [⌈height / reduction⌉, ⌈width / reduction⌉, 3] of a JPEG of this size.

    ``reduction`` is a power of two; up to 8 the transform itself leaves detail out, and beyond
    that every so-many-th pixel of the eighth is taken. Grayscale and CMYK become RGB.
    """
    by_dct = min(reduction, MAX_DCT_REDUCTION)
    step = reduction // by_dct
    image = _decode_reduced(encoded, height, width, by_dct)
    return image[::step, ::step] if step > 1 else image


def _decode_reduced(encoded: Images, height: int, width: int, reduction: int) -> Images:
    if simplejpeg is None:
        return decode_with_pillow(encoded, height, width, reduction)
    try:
        image: Images = simplejpeg.decode_jpeg(
            encoded,
            "RGB",
            min_height=-(-height // reduction),
            min_width=-(-width // reduction),
            min_factor=reduction,
            strict=False,
        )
    except ValueError:  # CMYK, which TurboJPEG leaves to others
        return decode_with_pillow(encoded, height, width, reduction)
    return image


def decode_with_pillow(encoded: Images, height: int, width: int, reduction: int) -> Images:
    """The same by Pillow, which also knows CMYK."""
    with import_pillow().open(io.BytesIO(encoded.tobytes()), formats=("JPEG",)) as image:
        if reduction > 1:
            image.draft(None, (width // reduction, height // reduction))
        return np.asarray(image.convert("RGB"))
