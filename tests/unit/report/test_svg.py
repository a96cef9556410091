from __future__ import annotations

from xml.etree import ElementTree

from nfold.report.chart_elements import apply_size_and_style, base_chart, render_svg, spread_values

HOSTILE = "</text></svg><script>alert(1)</script>\"'&"


def drawn(label: str = "a", description: str = "d") -> ElementTree.Element:
    chart = base_chart([{"x": 1, "y": 2, "name": label}]).mark_text(clip=True)
    chart = chart.encode(x="x:Q", y="y:Q", text="name:N")
    return ElementTree.fromstring(
        render_svg(apply_size_and_style(chart), name="f1", description=description)
    )


def test_only_known_elements_and_attributes_stay() -> None:
    found = drawn(HOSTILE)
    names = {element.tag.rpartition("}")[2] for element in found.iter()}
    assert names <= {"svg", "g", "path", "rect", "line", "text", "defs", "clipPath"}
    keys = {key for element in found.iter() for key in element.attrib}
    assert not keys & {"style", "class", "href"}
    assert HOSTILE in [element.text for element in found.iter()]


def test_ids_are_the_figures_own() -> None:
    found = drawn()
    ids = [element.get("id") for element in found.iter() if element.get("id")]
    clips = [element.get("clip-path") for element in found.iter() if element.get("clip-path")]
    assert ids
    assert all(str(name).startswith("f1-") for name in ids)
    assert clips == [f"url(#{name})" for name in ids]


def test_the_drawing_scales_and_is_described() -> None:
    found = drawn(description=HOSTILE)
    assert found.get("viewBox", "").startswith("0 0 400 ")
    assert found.get("width") is None
    assert (found.get("role"), found.get("aria-label")) == ("img", HOSTILE)


def test_names_are_moved_apart_upwards_and_no_further_than_needed() -> None:
    assert spread_values([1.0, 1.05, 3.0], 0.2) == [1.0, 1.2, 3.0]
    assert spread_values([3.0, 1.0, 1.0], 0.5) == [3.0, 1.0, 1.5]
