"""Following the logs of the shown ranks: what they print, on nfold's own output, as it comes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import BinaryIO

from nfold.run.handoff import HandoffFolder

CHUNK_BYTES = 2**20


class LogFollower:
    """Copies new text of the shown ranks' logs to ``output`` whenever it is asked to.

    ``shown`` are local ranks. One alone is copied as it is; of several, whole lines are copied
    with ``[rank K]`` before each.
    """

    def __init__(self, folder: HandoffFolder, shown: Sequence[int], output: BinaryIO) -> None:
        self._folder = folder
        self._output = output
        self._several = len(shown) > 1
        self._read_bytes = dict.fromkeys(shown, 0)
        self._begun = dict.fromkeys(shown, b"")

    def copy(self) -> None:
        """Copy what was printed since the last call."""
        for local_rank in self._read_bytes:
            while text := self._next(local_rank):
                self._output.write(self._lines(local_rank, text) if self._several else text)
        self._output.flush()

    def finish(self) -> None:
        """Copy the rest, also of lines that were never ended."""
        self.copy()
        for local_rank, begun in self._begun.items():
            if begun:
                self._output.write(self._lines(local_rank, b"\n"))
        self._output.flush()

    def _next(self, local_rank: int) -> bytes:
        try:
            with self._folder.local_rank_log(local_rank).open("rb") as log:
                log.seek(self._read_bytes[local_rank])
                text = log.read(CHUNK_BYTES)
        except FileNotFoundError:
            return b""
        self._read_bytes[local_rank] += len(text)
        return text

    def _lines(self, local_rank: int, text: bytes) -> bytes:
        """The whole lines of ``text`` with their rank; the last, unended one waits."""
        rank = self._folder.local_rank_log(local_rank).stem.partition("-")[2]
        *whole, self._begun[local_rank] = (self._begun[local_rank] + text).split(b"\n")
        return b"".join(b"[rank %s] %s\n" % (rank.encode(), line) for line in whole)
