"""How long a script does something else after a step, by its host: work that is not in every one.

An evaluation every so many steps, a checkpoint, a log that one rank writes. What that costs a
device tells; the host's time only says after which steps it was.
"""

from __future__ import annotations

import time

from nfold.frameworks.torch.script.whereabouts import Whereabouts


class Pauses:
    """For every step the time from the end of the one before until a batch is asked for.

    With what is done apart from the training after that. Where nobody is seen to ask, or only after
    that, until a model trains on the batch that is there, or gradients are computed.
    ``whereabouts`` is told of all of it, and of what lies between passes.
    """

    def __init__(self, whereabouts: Whereabouts) -> None:
        self._whereabouts = whereabouts
        self._ms: list[float] = []
        self._passes: dict[int, None] = {}
        self._began_at = time.monotonic()
        self._asked_at: float | None = None
        self._apart_at: float | None = None
        self._apart_s = 0.0

    @property
    def ms(self) -> tuple[float, ...]:
        """Of every step so far."""
        return tuple(self._ms)

    @property
    def pass_starts(self) -> tuple[int, ...]:
        """The steps that passes began with, but for the first pass."""
        return tuple(self._passes)

    def begin(self) -> None:
        """A step is over."""
        self._whereabouts.open()
        self._anew()

    def _anew(self) -> None:
        self._began_at = time.monotonic()
        self._asked_at = self._apart_at = None
        self._apart_s = 0.0

    def pass_ended(self) -> None:
        """A pass over the data is over; until another begins, all is between the two."""
        self._whereabouts.open()

    def begin_pass(self) -> None:
        """A pass over the data begins: what was before it is no pause of a step."""
        self._passes[len(self._ms)] = None
        self._whereabouts.close(between_passes=True)
        self._anew()
        self.asked()

    def asked(self) -> None:
        """A batch for the training is asked for: the first one ends the pause."""
        if self._asked_at is None:
            self._asked_at = time.monotonic()
            self._whereabouts.close(between_passes=False)

    def apart(self) -> None:
        """Something is seen that does not belong to the training; until a model trains."""
        if self._asked_at is not None and self._apart_at is None:
            self._apart_at = time.monotonic()
            self._whereabouts.open()

    def computing(self) -> None:
        """A model trains on a batch from here on, or gradients are computed."""
        self.asked()
        if self._apart_at is not None:
            self._apart_s += time.monotonic() - self._apart_at
            self._apart_at = None
            self._whereabouts.close(between_passes=False)

    def stepped(self) -> None:
        """A step is over, and has had a pause."""
        self.computing()
        assert self._asked_at is not None
        self._ms.append(round(1e3 * (self._asked_at - self._began_at + self._apart_s), 4))
