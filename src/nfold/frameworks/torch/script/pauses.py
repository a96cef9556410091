"""How long a script does something else after a step, by its host: work that is not in every one.

An evaluation every so many steps, a checkpoint, a log that one rank writes. What that costs a
device tells; the host's time only says after which steps it was.
"""

from __future__ import annotations

import time

from nfold.frameworks.torch.script.whereabouts import StackSampler


class HostGaps:
    """For every step the time from the end of the one before until a batch is asked for.

    With what is done apart from the training after that. Where nobody is seen to ask, or only after
    that, until a model trains on the batch that is there, or gradients are computed.
    ``whereabouts`` is told of all of it, and of what lies between passes.
    """

    def __init__(self, sampler: StackSampler) -> None:
        self._sampler = sampler
        self._ms: list[float] = []
        self._pass_starts: dict[int, None] = {}
        self._gap_start_s = time.monotonic()
        self._request_s: float | None = None
        self._other_work_start_s: float | None = None
        self._other_work_s = 0.0

    @property
    def ms(self) -> tuple[float, ...]:
        """Of every step so far."""
        return tuple(self._ms)

    @property
    def pass_starts(self) -> tuple[int, ...]:
        """The steps that passes began with, but for the first pass."""
        return tuple(self._pass_starts)

    def begin_gap(self) -> None:
        """A step is over."""
        self._sampler.begin_gap()
        self._reset()

    def _reset(self) -> None:
        self._gap_start_s = time.monotonic()
        self._request_s = self._other_work_start_s = None
        self._other_work_s = 0.0

    def on_pass_end(self) -> None:
        """A pass over the data is over; until another begins, all is between the two."""
        self._sampler.begin_gap()

    def on_pass_start(self) -> None:
        """A pass over the data begins: what was before it is no pause of a step."""
        self._pass_starts[len(self._ms)] = None
        self._sampler.end_gap(at_epoch_boundary=True)
        self._reset()
        self.on_batch_request()

    def on_batch_request(self) -> None:
        """A batch for the training is asked for: the first one ends the pause."""
        if self._request_s is None:
            self._request_s = time.monotonic()
            self._sampler.end_gap(at_epoch_boundary=False)

    def on_other_batch(self) -> None:
        """Something is seen that does not belong to the training; until a model trains."""
        if self._request_s is not None and self._other_work_start_s is None:
            self._other_work_start_s = time.monotonic()
            self._sampler.begin_gap()

    def on_compute(self) -> None:
        """A model trains on a batch from here on, or gradients are computed."""
        self.on_batch_request()
        if self._other_work_start_s is not None:
            self._other_work_s += time.monotonic() - self._other_work_start_s
            self._other_work_start_s = None
            self._sampler.end_gap(at_epoch_boundary=False)

    def end_step(self) -> None:
        """A step is over, and has had a pause."""
        self.on_compute()
        assert self._request_s is not None
        self._ms.append(round(1e3 * (self._request_s - self._gap_start_s + self._other_work_s), 4))
