"""Requests to stop: the first one stops in an orderly way, a second interrupt at once."""

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
    """A request that SIGINT, SIGTERM or SIGHUP sets; whoever waits looks at it.

    A second SIGINT ends this process at once: the ranks end with it, because the kernel kills
    them when their parent is gone. A signal that was ignored before (nohup) stays ignored.
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

    heeded = [signum for signum in STOP_SIGNALS if signal.getsignal(signum) != signal.SIG_IGN]
    before = {signum: signal.signal(signum, handle) for signum in heeded}
    try:
        yield stop
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
