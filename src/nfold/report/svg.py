"""A chart as SVG that can stand inside an HTML page: script-free, no styles, names of its own."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import vl_convert

SVG_NAMESPACE = "http://www.w3.org/2000/svg"
ALLOWED_ELEMENTS = frozenset(
    {"svg", "g", "path", "rect", "line", "text", "tspan", "title", "defs", "clipPath"}
)
"""Elements that a figure needs; any other is dropped."""
DROPPED_ATTRIBUTES = frozenset(
    {"style", "class", "role", "pointer-events", "width", "height", "version"}
)


def render_svg(chart: Any, *, name: str, description: str) -> str:
    """The chart as an SVG element.

    ``name`` makes its ids unique on the page; ``description`` is what a screen reader says.
    Only known elements and attributes stay, whatever text the data holds.
    """
    drawn = vl_convert.vegalite_to_svg(chart.to_dict(validate=False))
    root = ElementTree.fromstring(drawn)  # noqa: S314  # our own drawing, not a stranger's file
    _clean(root, name)
    root.set("role", "img")
    root.set("aria-label", description)
    ElementTree.register_namespace("", SVG_NAMESPACE)
    return ElementTree.tostring(root, encoding="unicode")


def _clean(element: ElementTree.Element, name: str) -> None:
    box = _local(element.tag) == "rect"
    for key in list(element.attrib):
        if (key in DROPPED_ATTRIBUTES and not (box and key in ("width", "height"))) or _foreign(
            key
        ):
            del element.attrib[key]
        elif key == "id":
            element.set(key, f"{name}-{element.get(key)}")
        else:
            element.set(key, re.sub(r"url\(#", f"url(#{name}-", element.attrib[key]))
    for child in list(element):
        if _local(child.tag) in ALLOWED_ELEMENTS:
            _clean(child, name)
        else:
            element.remove(child)


def _local(tag: str) -> str:
    return tag.removeprefix(f"{{{SVG_NAMESPACE}}}")


def _foreign(key: str) -> bool:
    """Links, event handlers and accessibility roles of single marks."""
    return key.startswith(("on", "aria-", "{")) or key == "href"
