"""What happens in the steps of a warm-up, counted, with the lines of the user's code it is on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from nfold.place import current_user_call
from nfold.seen import SourceLocation

MAX_LOCATIONS = 8


class EventCounter:
    """Events by kind. Nothing is counted before the first step or after the warm-up."""

    def __init__(self) -> None:
        self.enabled = False
        self.counts: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self._locations: dict[str, Counter[tuple[str, str | None]]] = {}

    def count(self, event: str, name: str, byte_count: int = 0) -> None:
        """One event called ``name``; its line counts under ``kind``."""
        if not self.enabled:
            return
        self.counts[name] += 1
        self.bytes[name] += byte_count
        self.record_location(event)

    def record_location(self, event: str) -> None:
        """Note the line of the user's code that is run now, also before the first step."""
        self.record_line(event, *current_user_call())

    def record_line(self, event: str, line: str | None, package_line: str | None = None) -> None:
        """Note a line that is known, if it is."""
        if line is not None:
            self._locations.setdefault(event, Counter())[line, package_line] += self.enabled

    def source_locations(self, steps: int) -> Iterator[tuple[str, tuple[SourceLocation, ...]]]:
        """Lines by kind, the most frequent first, over so many steps."""
        for kind, counter in self._locations.items():
            most = [
                SourceLocation(line=where, package_line=inside, per_step=count / max(1, steps))
                for (where, inside), count in counter.most_common(MAX_LOCATIONS)
            ]
            yield kind, tuple(most)
