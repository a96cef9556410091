"""Signals: the first one requests an orderly stop, a second SIGINT exits at once."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from nfold.core.format import terminal_safe
from nfold.launch.launch_spec import StopRequest

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SHOW_CURSOR = "\x1b[?25h"


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Yield a request that SIGINT, SIGTERM or SIGHUP sets.

    A second SIGINT exits at once; the guardian then ends the run. A signal that was ignored before
    (nohup) stays ignored.
    """
    stop = StopRequest()

    def handle(signum: int, _: FrameType | None) -> None:
        if stop and signum == signal.SIGINT:
            if sys.stderr.isatty():
                os.write(2, SHOW_CURSOR.encode())
            if notice := stop.abort_notice():
                os.write(2, f"\nnfold: {terminal_safe(notice)}\n".encode())
            os._exit(128 + signum)
        stop.signum = signum

    handled = [signum for signum in STOP_SIGNALS if signal.getsignal(signum) != signal.SIG_IGN]
    before = {signum: signal.signal(signum, handle) for signum in handled}
    try:
        yield stop
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
