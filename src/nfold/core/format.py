"""Numbers and names as a reader sees them: units, few digits, nothing that acts."""

from __future__ import annotations

from nfold.core.stats import Interval

NO_NUMBER = "–"
"""Stands where there is no number."""

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
    """Digits after the point that leave about three significant ones."""
    size = abs(value)
    if size >= 100 or size == 0:
        return 0
    if size >= 10:
        return 1
    if size >= 1:
        return 2
    return 3 if size >= 0.1 else 4


def format_number(value: float, places: int | None = None) -> str:
    """``12,345``, ``123``, ``12.3``, ``1.23``, ``0.123``."""
    return f"{value:,.{decimals(value) if places is None else places}f}"


def format_range(interval: Interval, places: int | None = None, unit: str = "") -> str:
    """``1.80–1.86``; empty where there is no interval."""
    if interval.low is None or interval.high is None:
        return ""
    places = decimals(interval.value) if places is None else places
    return f"{format_number(interval.low, places)}–{format_number(interval.high, places)}{unit}"


def format_half_width(interval: Interval, places: int | None = None) -> str:
    """``±0.03``, the wider side of the interval; empty where there is none."""
    if interval.low is None or interval.high is None:
        return ""
    places = decimals(interval.value) if places is None else places
    widest = max(interval.high - interval.value, interval.value - interval.low)
    return f"±{format_number(widest, places)}"


def scale_interval(interval: Interval, factor: float) -> Interval:
    """The interval in another unit."""
    low, high = interval.low, interval.high
    return Interval(
        interval.value * factor,
        None if low is None else low * factor,
        None if high is None else high * factor,
    )


def format_duration(seconds: float) -> str:
    """``69.1 s``; from 100 seconds on ``0:23:15`` (hours, minutes, seconds)."""
    if seconds < 100:
        return f"{format_number(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def format_bytes(count: float) -> str:
    """Bytes as ``1.50 GiB`` or ``812 MiB``."""
    gibibytes = count / 2**30
    return (
        f"{format_number(gibibytes)} GiB"
        if gibibytes >= 1
        else f"{format_number(count / 2**20)} MiB"
    )


def format_ratio(value: float) -> str:
    """A ratio: ``1.83×``."""
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


def format_milliseconds_interval(cost: Interval) -> str:
    """``1.25 ms (1.10 to 1.40)``."""
    return f"{cost.value:.2f} ms{format_parenthesized_range(cost, '{:.2f}')}"


def format_ratio_interval(ratio: Interval) -> str:
    """``1.25 × (1.10 to 1.40)``."""
    return f"{ratio.value:.2f} ×{format_parenthesized_range(ratio, '{:.2f}')}"


def format_parenthesized_range(interval: Interval, form: str) -> str:
    """`` (1.10 to 1.40)``, its ends in this form; empty where nobody knows how sure it is."""
    if interval.low is None or interval.high is None or interval.low == interval.high:
        return ""
    return f" ({form.format(interval.low)} to {form.format(interval.high)})"


def terminal_safe(text: str, *, keep_lines: bool = False) -> str:
    """``text`` with control and direction characters written out, as ``\\x1b``.

    Line breaks and tabs become spaces, so that a name cannot break a table; with
    ``keep_lines`` line breaks stay.
    """
    return "".join(_escape_character(character, keep_lines) for character in text)


def _escape_character(character: str, keep_lines: bool) -> str:
    if character.isprintable() or (keep_lines and character == "\n"):
        return character
    return " " if character in "\n\t" else ascii(character)[1:-1]
