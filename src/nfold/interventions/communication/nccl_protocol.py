"""Fix the protocol of NCCL."""

from __future__ import annotations

from typing import Any, Literal

from nfold.core.plan import Plan
from nfold.interventions.communication.nccl_variable import NcclVariable

Protocol = Literal["", "LL", "Simple"]


class NcclProtocol(NcclVariable[Protocol]):
    """The protocol of NCCL; empty: NCCL chooses it by the size of the message.

    ``LL`` has the lowest latency and about half of the bandwidth, ``Simple`` the highest bandwidth.
    LL128 is no value: if it is set, NCCL does not check that the hardware supports it, and corrupts
    data where it does not. NCCL chooses it by itself where it is safe.
    """

    default = ""
    variable = "NCCL_PROTO"

    def values_to_try(self, profile: Any, plan: Plan, cores: int) -> tuple[Protocol, ...]:
        return ("LL", "Simple")
