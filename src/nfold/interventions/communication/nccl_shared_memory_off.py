"""Let GPUs that cannot copy directly communicate through the network instead of host memory."""

from __future__ import annotations

from nfold.interventions.communication.nccl_variable import NcclVariable


class NcclSharedMemoryOff(NcclVariable[bool]):
    """NCCL uses no shared memory of the host.

    GPUs that cannot access each other's memory then communicate through the network.
    """

    default = False
    variable = "NCCL_SHM_DISABLE"

    def setting(self, value: bool) -> str:
        return "1" if value else "0"
