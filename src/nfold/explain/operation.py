"""An operation, such as conv2d: which causes it cannot have, and why. A call of it is a step."""

from __future__ import annotations

from collections.abc import Mapping

NO_COMMUNICATION = "the devices of an operation exchange nothing"
NOT_APPLICABLE_TO_OPERATIONS: Mapping[str, str] = {
    "epoch-boundary": "an operation has no epochs",
    "imbalance": "the devices of an operation do not wait for each other in a call",
    "input": "what an operation reads is in the host's memory before the first call",
    "link": NO_COMMUNICATION,
    "synchronization": NO_COMMUNICATION,
    "undivided-work": "an operation divides its batch by itself",
}
