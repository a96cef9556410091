"""What happened on the host between two snapshots, as rates."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from nfold.telemetry.host import Snapshot

LEAST_ELAPSED_S = 0.05
"""Rates over less than five ticks of the kernel's clock (10 ms) are mostly rounding."""


@dataclass(frozen=True)
class Interval:
    """The time between two snapshots. A rate is None where it would be mostly rounding."""

    before: Snapshot
    after: Snapshot

    @property
    def elapsed_s(self) -> float:
        """Seconds between the two."""
        return self.after.at_s - self.before.at_s

    @property
    def _long_enough(self) -> bool:
        return self.elapsed_s >= LEAST_ELAPSED_S

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
        core busy, or two cores half busy.
        """
        if not (self._long_enough and self._clock_ran):
            return None
        roots = set(ranks)
        single = {os.getpid(), parent}
        single.update(*(self.after.between(parent, rank) for rank in roots))
        own_s = sum(map(self._tree_s, roots)) + sum(map(self._single_s, single - roots))
        working_s = self.after.working_s - self.before.working_s
        return max(0.0, 100 * (working_s - own_s) / self.elapsed_s)

    def _tree_s(self, root: int) -> float:
        earlier_s = self.before.tree_seconds(root) if self._was_there(root) else 0.0
        return self.after.tree_seconds(root) - earlier_s

    def _single_s(self, pid: int) -> float:
        """What one process used; nothing is known of one that has ended."""
        if pid not in self.after.processes:
            return 0.0
        earlier_s = self.before.processes[pid].seconds if self._was_there(pid) else 0.0
        return self.after.processes[pid].seconds - earlier_s

    def _was_there(self, pid: int) -> bool:
        """Whether the id belonged to the same process before, not to an earlier one."""
        now, then = self.after.processes.get(pid), self.before.processes.get(pid)
        return now is not None and then is not None and now.started == then.started
