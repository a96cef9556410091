from __future__ import annotations

from nfold.telemetry.telemetry_csv import column_names


def test_the_columns_are_the_agreed_ones() -> None:
    gpu = (
        "gpu0_utilisation_percent,gpu0_memory_used_bytes,gpu0_power_w,gpu0_temperature_c,"
        "gpu0_sm_clock_mhz,gpu0_throttle_reasons,gpu0_pcie_rx_bytes_per_s,"
        "gpu0_pcie_tx_bytes_per_s,gpu0_energy_j,gpu0_other_processes"
    )
    host = "monotonic_s,utc,host_cpu_percent,host_disk_read_bytes_per_s,host_other_load_percent"
    assert ",".join(column_names([0], [0])) == f"{host},{gpu},rank0_cpu_percent,rank0_rss_bytes"
    assert ",".join(column_names([], [])) == host
    assert column_names([], [1, 0])[-1] == "rank1_rss_bytes"
