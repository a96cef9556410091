"""What a process waits for before it ends: that its other threads have nothing to do."""

from __future__ import annotations

import sys
import threading

import pytest

from nfold.frameworks.torch.user.rest import let_threads_rest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads are seen on Linux only")


def test_threads_that_wait_are_at_rest() -> None:
    over = threading.Event()
    waiting = threading.Thread(target=over.wait)
    waiting.start()
    try:
        assert let_threads_rest()
        assert waiting.is_alive()
    finally:
        over.set()
        waiting.join()


def test_a_busy_thread_is_waited_for() -> None:
    counted: list[int] = []

    def count() -> None:
        counted.append(sum(range(5_000_000)))

    busy = threading.Thread(target=count)
    busy.start()
    assert let_threads_rest(longest_s=60)
    assert counted


def test_a_thread_that_never_rests_is_given_up() -> None:
    over = threading.Event()

    def spin() -> None:
        while not over.is_set():
            pass

    busy = threading.Thread(target=spin)
    busy.start()
    try:
        assert not let_threads_rest(longest_s=0.1)
    finally:
        over.set()
        busy.join()
