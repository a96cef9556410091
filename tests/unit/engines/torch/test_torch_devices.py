"""Free memory of a device."""

import torch

from nfold.core.machine import parse_available_bytes
from nfold.engines.torch.devices import free_bytes

MEMINFO = """MemTotal:       24606624 kB
MemFree:         1024000 kB
MemAvailable:   20480000 kB
HugePages_Total:       0
"""


def test_available_is_what_the_kernel_estimates_not_what_is_unused() -> None:
    assert parse_available_bytes(MEMINFO) == 20_480_000 * 1024


def test_a_cpu_device_has_the_host_s_memory() -> None:
    assert 2**20 < free_bytes(torch.device("cpu")) < 2**50
