"""What happens in the steps of a warm-up, counted, with the lines of the user's code it is on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from nfold.place import called_here
from nfold.seen import Place

MOST_PLACES = 8


class Tally:
    """Events by kind. Nothing is counted before the first step or after the warm-up."""

    def __init__(self) -> None:
        self.on = False
        self.counts: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self._places: dict[str, Counter[tuple[str, str | None]]] = {}

    def note(self, kind: str, name: str, of_bytes: int = 0) -> None:
        """One event called ``name``; its line counts under ``kind``."""
        if not self.on:
            return
        self.counts[name] += 1
        self.bytes[name] += of_bytes
        self.place(kind)

    def place(self, kind: str) -> None:
        """Note the line of the user's code that is run now, also before the first step."""
        self.at(kind, *called_here())

    def at(self, kind: str, where: str | None, inside: str | None = None) -> None:
        """Note a line that is known, if it is."""
        if where is not None:
            self._places.setdefault(kind, Counter())[where, inside] += self.on

    def places(self, steps: int) -> Iterator[tuple[str, tuple[Place, ...]]]:
        """Lines by kind, the most frequent first, over so many steps."""
        for kind, counter in self._places.items():
            most = [
                Place(where=where, inside=inside, per_step=count / max(1, steps))
                for (where, inside), count in counter.most_common(MOST_PLACES)
            ]
            yield kind, tuple(most)
