"""What the process that plants costs (planted.py) and the one that asks for them agree on."""

from __future__ import annotations

ENVIRONMENT = "PLANTED_COSTS"
CAUSES = ("input", "imbalance", "link", "synchronization", "launch-bound")
SETTLING = 150
"""Steps before the first turn, which no turn is compared with: a GPU's first ones are slow."""
WARMUP, TIMED = 10, 50
"""Steps of a turn."""
SHARES = {"digits": 64, "pictures": 1024}
"""Samples of a device in a step, of two devices."""
