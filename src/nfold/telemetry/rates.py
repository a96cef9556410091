"""What happened on the host between two snapshots, as rates."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from nfold.telemetry.host import HostSnapshot

MIN_ELAPSED_S = 0.05
"""Rates over less than five ticks of the kernel's clock (10 ms) are mostly rounding."""


@dataclass(frozen=True)
class SnapshotInterval:
    """The time between two snapshots. A rate is None where it would be mostly rounding."""

    before: HostSnapshot
    after: HostSnapshot

    @property
    def elapsed_s(self) -> float:
        """Seconds between the two."""
        return self.after.at_s - self.before.at_s

    @property
    def _long_enough(self) -> bool:
        return self.elapsed_s >= MIN_ELAPSED_S

    @property
    def _clock_ran(self) -> bool:
        """Some containers show a /proc/stat that stands still."""
        return self.after.total_s > self.before.total_s

    def cpu_percent(self) -> float | None:
        """The busy share of all cores, interrupts included."""
        if not (self._long_enough and self._clock_ran):
            return None
        busy = self.after.busy_s - self.before.busy_s
        share = busy / (self.after.total_s - self.before.total_s)
        return min(100.0, max(0.0, 100 * share))

    def disk_read_bytes_per_s(self) -> float | None:
        """Reads of the host's physical disks."""
        before, after = self.before.disk_read_bytes, self.after.disk_read_bytes
        if before is None or after is None or not self._long_enough:
            return None
        return max(0.0, (after - before) / self.elapsed_s)

    def tree_cpu_percent(self, root: int) -> float | None:
        """CPU time of a process and its descendants, in % of one core.

        A descendant that ended counts for as long as it ran: its parent inherits its time.
        """
        if root not in self.after.processes or not self._long_enough:
            return None
        return max(0.0, 100 * self._tree_s(root) / self.elapsed_s)

    def other_load_percent(self, ranks: Iterable[int], parent: int) -> float | None:
        """CPU time of everybody else's processes, in % of one core.

        That is: the user and system time of the whole host (interrupts left out), less the
        ranks with all their descendants, this process, ``parent`` (nfold itself), and the
        processes between ``parent`` and a rank (the agent). 100 means that others kept one
        core busy, or two cores half busy. None where a rank left workers behind when it ended:
        all that they ever computed would be another's.
        """
        if not (self._long_enough and self._clock_ran):
            return None
        roots = list(ranks)
        single = {os.getpid(), parent}
        for seen in (self.before, self.after):
            single.update(*(seen.intermediate_processes(parent, rank) for rank in roots))
        single.difference_update(roots)
        own_s = self._own_s(self.after, roots, single) - self._own_s(self.before, roots, single)
        if own_s < 0:
            return None
        working_s = self.after.working_s - self.before.working_s
        return max(0.0, 100 * (working_s - own_s) / self.elapsed_s)

    def _own_s(self, seen: HostSnapshot, roots: Iterable[int], single: Iterable[int]) -> float:
        """CPU seconds of the ranks' trees and of single processes with their dead children.

        So a rank that ends takes nothing away: the agent inherits its time, then nfold.
        """
        there = [seen.processes[pid] for pid in single if self._holds(seen, pid)]
        trees_s = sum(seen.tree_seconds(root) for root in roots if self._holds(seen, root))
        return trees_s + sum(process.cpu_s + process.reaped_s for process in there)

    def _tree_s(self, root: int) -> float:
        earlier_s = self.before.tree_seconds(root) if self._holds(self.before, root) else 0.0
        return self.after.tree_seconds(root) - earlier_s

    def _holds(self, seen: HostSnapshot, pid: int) -> bool:
        """Whether a process is in a snapshot, and its id was not given to a new one since."""
        then, now = seen.processes.get(pid), self.after.processes.get(pid)
        return then is not None and (now is None or now.started == then.started)
