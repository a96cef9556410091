"""C2: the exchange between hosts, or by a backend that takes the host's way on one.

Several hosts are not measured. On one, gloo copies what is on GPUs to the host and back.
"""

from __future__ import annotations

from typing import ClassVar

from nfold.explain import lines
from nfold.explain.causes.link import Link, through_host
from nfold.explain.ladder import Ladder
from nfold.explain.view import View


class Network(Link):
    """Bytes on a way that is not made for GPUs: the real exchange against a barrier alone."""

    id: ClassVar[str] = "network"

    def silent(self, ladder: Ladder) -> str | None:
        """Experiments run on one host."""
        return None if through_host(ladder) else "all devices are on one host"

    def fix(self, ladder: Ladder, view: View) -> str:
        """Another backend."""
        del ladder, view
        return lines.NCCL
