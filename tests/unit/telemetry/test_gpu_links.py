from __future__ import annotations

import pytest

from nfold.core.machine import GpuLink
from nfold.telemetry.machine_inspection import find_gpu_links
from nfold.telemetry.nvml import Nvml
from nvml_fake import FakeCard, FakeNvml


def _links(*cards: FakeCard) -> tuple[GpuLink, ...]:
    return find_gpu_links(Nvml(FakeNvml(list(cards))).cards())


def test_direct_nvlinks_are_counted_pair_by_pair() -> None:
    found = _links(
        FakeCard(0, nvlinks=["1", "1", "", "2"]),
        FakeCard(1, nvlinks=["0", "0"]),
        FakeCard(2, nvlinks=["0"]),
    )
    assert found == (
        GpuLink(first=0, second=1, kind="nvlink", detail="2 links"),
        GpuLink(first=0, second=2, kind="nvlink", detail="1 links"),
        GpuLink(first=1, second=2, kind="pcie", detail="same switch"),
    )


def test_links_to_a_switch_reach_everybody_at_it() -> None:
    (link,) = _links(
        FakeCard(0, nvlinks=["switch"] * 18),
        FakeCard(1, nvlinks=["switch"] * 18),
    )
    assert (link.kind, link.detail) == ("nvlink", "18 links through NVSwitch")


def test_nvlink_known_by_capabilities_only() -> None:
    (link,) = _links(FakeCard(0, nvlink_p2p=0), FakeCard(1))
    assert link.kind == "nvlink"


@pytest.mark.parametrize(
    ("ancestor", "detail"), [(0, "same board"), (30, "same host bridge"), (50, "across NUMA nodes")]
)
def test_a_pcie_link_has_the_common_ancestor(ancestor: int, detail: str) -> None:
    (link,) = _links(FakeCard(0, ancestor=ancestor), FakeCard(1))
    assert (link.kind, link.detail) == ("pcie", detail)


def test_refused_peer_to_peer_is_no_link_whatever_the_cable() -> None:
    (link,) = _links(FakeCard(0, p2p=1, nvlinks=["1"], ancestor=40), FakeCard(1))
    assert link.kind == "none"
    assert link.detail == "P2P: the chipset does not support it, 1 links, same NUMA node"


def test_unknown_links_are_pcie() -> None:
    quiet = {"P2PStatus", "TopologyCommonAncestor", "NvLinkState"}
    (link,) = _links(FakeCard(0, refuses=quiet), FakeCard(1))
    assert (link.kind, link.detail) == ("pcie", "")


def test_one_card_has_no_links() -> None:
    assert _links(FakeCard(0)) == ()
