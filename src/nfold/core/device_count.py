"""The syntax of ``--devices``, the same for every command."""

from __future__ import annotations

from nfold.core.errors import UsageError

DEVICE_TYPES = {"cpu": "cpu", "cuda": "cuda", "gpu": "cuda"}


def parse_device_count(text: str) -> tuple[str | None, int]:
    """Parse ``2``, ``cpu:2``, ``gpu:2`` or ``cuda:2`` into a device type and a count.

    The type is None if it is not given. Raises UsageError for any other text.
    """
    kind, colon, count = text.rpartition(":")
    known = not colon or kind in DEVICE_TYPES
    if not known or not (count.isascii() and count.isdigit()) or int(count) < 1:
        raise UsageError(
            f"--devices {text}: allowed are a count from 1, cpu:N, gpu:N and cuda:N; "
            "next: --devices 2"
        )
    return DEVICE_TYPES.get(kind), int(count)
