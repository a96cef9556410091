"""C2: the exchange between hosts, or by a backend that takes the host's way on one.

Several hosts are not measured. On one, gloo copies what is on GPUs to the host and back.
"""

from __future__ import annotations

from typing import ClassVar

from nfold.explain import lines
from nfold.explain.causes.link import LinkCause, uses_gloo_for_gpus
from nfold.explain.ladder import ExperimentDesign
from nfold.explain.view import MetricView


class NetworkCause(LinkCause):
    """Bytes on a way that is not made for GPUs: the real exchange against a barrier alone."""

    id: ClassVar[str] = "network"

    def not_applicable_reason(self, design: ExperimentDesign) -> str | None:
        """Experiments run on one host."""
        return None if uses_gloo_for_gpus(design) else "all devices are on one host"

    def fix(self, design: ExperimentDesign, view: MetricView) -> str:
        """Another backend."""
        del design, view
        return lines.USE_NCCL
