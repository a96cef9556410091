"""Let GPUs communicate through host memory instead of directly."""

from __future__ import annotations

from nfold.interventions.communication.nccl_variable import NcclVariable


class NcclP2p(NcclVariable[bool]):
    """NCCL copies directly between GPUs that can access each other's memory."""

    default = True
    variable = "NCCL_P2P_DISABLE"

    def setting(self, value: bool) -> str:
        return "0" if value else "1"
