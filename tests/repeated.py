"""Repeat tests whose subject is real time, because a busy host may disturb a measurement."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec

P = ParamSpec("P")
ATTEMPTS = 3


def repeated(test: Callable[P, None]) -> Callable[P, None]:
    """Repeat a test that fails an assertion, up to ``ATTEMPTS`` times in all."""

    @functools.wraps(test)
    def attempt(*args: P.args, **kwargs: P.kwargs) -> None:
        for _ in range(ATTEMPTS - 1):
            try:
                return test(*args, **kwargs)
            except AssertionError:
                continue
        return test(*args, **kwargs)

    return attempt
