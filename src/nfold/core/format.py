"""Formats numbers and names for display. Pure functions."""

from __future__ import annotations

from nfold.core.stats import Interval

NO_NUMBER = "–"

STATUS_LABELS = {
    "ok": "ok",
    "oom": "out of memory",
    "crashed": "crashed",
    "hung": "hung",
    "killed": "killed",
    "diverged": "diverged",
    "unsupported": "unsupported",
    "interrupted": "interrupted",
}

_SUPERSCRIPT = str.maketrans("0123456789,", "⁰¹²³⁴⁵⁶⁷⁸⁹˒")


def decimals(value: float) -> int:
    """Return the digits after the point for about three significant digits, at most 4."""
    size = abs(value)
    if size == 0:
        return 0
    return next((places for places, limit in enumerate((100, 10, 1, 0.1)) if size >= limit), 4)


def format_number(value: float, places: int | None = None) -> str:
    """``12,345``, ``123``, ``12.3``, ``1.23``, ``0.123``."""
    return f"{value:,.{decimals(value) if places is None else places}f}"


def format_range(interval: Interval, places: int | None = None, unit: str = "") -> str:
    """``1.80–1.86``; empty without bounds."""
    if interval.low is None or interval.high is None:
        return ""
    places = decimals(interval.value) if places is None else places
    return f"{format_number(interval.low, places)}–{format_number(interval.high, places)}{unit}"


def format_half_width(interval: Interval, places: int | None = None) -> str:
    """``±0.03``, the wider side of the interval; empty without bounds."""
    if interval.low is None or interval.high is None:
        return ""
    places = decimals(interval.value) if places is None else places
    widest = max(interval.high - interval.value, interval.value - interval.low)
    return f"±{format_number(widest, places)}"


def scale_interval(interval: Interval, factor: float) -> Interval:
    low, high = interval.low, interval.high
    return Interval(
        interval.value * factor,
        None if low is None else low * factor,
        None if high is None else high * factor,
    )


def format_duration(seconds: float) -> str:
    """``69.1 s``; ``0:23:15`` (hours, minutes, seconds) from 100 seconds."""
    if seconds < 100:
        return f"{format_number(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def format_bytes(count: float) -> str:
    """``1.50 GiB`` or ``812 MiB``."""
    unit, size = ("GiB", 2**30) if count >= 2**30 else ("MiB", 2**20)
    return f"{format_number(count / size)} {unit}"


def format_ratio(value: float) -> str:
    """``1.83×``."""
    return f"{value:.2f}×"


def format_percent(fraction: float) -> str:
    """``92 %``."""
    return f"{100 * fraction:.0f} %"


def pluralize(number_of: int, noun: str) -> str:
    """``1 device``, ``2 devices``."""
    return f"{number_of} {noun}" if number_of == 1 else f"{number_of} {noun}s"


def superscript(marks: tuple[int, ...]) -> str:
    """Footnote marks: ``¹˒³``."""
    return ",".join(map(str, marks)).translate(_SUPERSCRIPT)


def join_words(items: list[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)


def format_ratio_interval(ratio: Interval) -> str:
    """``1.25 × (1.10 to 1.40)``."""
    return f"{ratio.value:.2f} ×{format_parenthesized_range(ratio, '{:.2f}')}"


def format_parenthesized_range(interval: Interval, form: str) -> str:
    """`` (1.10 to 1.40)`` with bounds in a format such as ``{:.2f}``; empty without bounds."""
    if interval.low is None or interval.high is None or interval.low == interval.high:
        return ""
    return f" ({form.format(interval.low)} to {form.format(interval.high)})"


def terminal_safe(text: str, *, keep_lines: bool = False) -> str:
    """Escape control and direction characters, as ``\\x1b``.

    Line breaks and tabs become spaces; ``keep_lines`` keeps line breaks.
    """
    return "".join(_escape_character(character, keep_lines) for character in text)


def _escape_character(character: str, keep_lines: bool) -> str:
    if character.isprintable() or (keep_lines and character == "\n"):
        return character
    return " " if character in "\n\t" else ascii(character)[1:-1]
