"""HTML and SVG as values: text is escaped unless it was made here."""

from __future__ import annotations

from html import escape

VOID = frozenset({"meta", "link", "br", "path", "line", "rect", "circle", "polyline", "polygon"})


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


Child = str | Markup | None


def tag(name: str, /, *children: Child, **attributes: object) -> Markup:
    """Returns one element.

    Args:
        name: Name of the element.
        children: Markup as it is, other text escaped; None is left out.
        attributes: `class_` is written `class`, `stroke_width` is written `stroke-width`;
            None is left out, values are escaped.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in VOID and not children:
        return Markup(
            f"<{name}{written}/>" if name not in ("meta", "link") else f"<{name}{written}>"
        )
    inside = join(*children)
    return Markup(f"<{name}{written}>{inside}</{name}>")


def join(*children: Child) -> Markup:
    """Returns children one after the other, plain text escaped."""
    return Markup(
        "".join(
            child if isinstance(child, Markup) else escape(child)
            for child in children
            if child is not None
        )
    )


def table(headings: list[str], rows: list[list[str]]) -> Markup:
    """Returns a table; the first column is text, the others are numbers."""
    head = tag("tr", *(tag("th", heading) for heading in headings))
    body = [tag("tr", *(tag("td", cell) for cell in row)) for row in rows]
    return tag("div", tag("table", head, *body), class_="scroll")


def section(title: str, *children: Markup | None) -> Markup:
    """Returns a card with a heading."""
    return tag("section", tag("h2", title), *children, class_="card")
