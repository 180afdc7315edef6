"""A page as a list of elements, and what must hold of every page."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "link", "br", "hr", "input", "img"}
SVG_VOID = {"rect", "path", "circle"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str]
    inside: tuple[str, ...]
    text: str = ""


@dataclass
class Document(HTMLParser):
    elements: list[Element] = field(default_factory=list)
    open: list[Element] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {k: v or "" for k, v in attrs}, tuple(e.tag for e in self.open))
        self.elements.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID | SVG_VOID, f"<{tag}/> is not closed in HTML"
        self.elements.append(Element(tag, {k: v or "" for k, v in attrs}, tuple(e.tag for e in self.open)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1].tag == tag, f"</{tag}> closes {[e.tag for e in self.open][-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        for element in self.open:
            element.text += data


def parse(text: str) -> Document:
    document = Document()
    document.feed(text)
    document.close()
    assert not document.open, f"never closed: {[e.tag for e in document.open]}"
    return document


def assert_sound(text: str) -> Document:
    """Well formed, self-contained, nothing but its own script may run, labelled for people who do not see it."""
    assert len(text.encode()) < 2_000_000
    document = parse(text)
    ids = [e.attributes["id"] for e in document.elements if "id" in e.attributes]
    assert len(ids) == len(set(ids)), sorted(i for i in ids if ids.count(i) > 1)
    scripts = []
    for element in document.elements:
        for name, value in element.attributes.items():
            assert not name.startswith("on"), (element.tag, name)
            if name in ("href", "src", "action", "xlink:href"):
                assert value.startswith("#") or value == "data:,", value
            if name == "href" and value.startswith("#"):
                assert value[1:] in ids, f"{value} leads nowhere"
        assert element.tag not in ("img", "iframe", "object", "embed", "base", "form", "video", "audio"), element.tag
        if element.tag == "svg" and "aria-hidden" not in element.attributes and not _hidden(element):
            assert element.attributes.get("role") == "img" and element.attributes.get("aria-label")
        if element.tag == "th":
            assert element.attributes.get("scope") in ("col", "row")
        if element.tag == "button":
            assert element.attributes.get("type") == "button"
        if element.tag == "script" and element.attributes.get("type") != "application/json":
            scripts.append(element.text)
    assert not re.search(
        r"url\((?!#)|@import|https?://(?!www\.w3\.org/2000/svg)", re.sub(r"<(pre|p|td|dd|span|code)\b[^>]*>[^<]*", "", text)
    )
    (script,) = scripts
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text and "default-src 'none'" in text
    return document


def _hidden(element: Element) -> bool:
    """Signs of a legend: their container is aria-hidden, and they hold no words."""
    return "span" in element.inside
