"""HTML and SVG as values, and charts as inline SVG: lines over a plane, intervals on one scale.

Text is escaped unless it was made here. A chart is drawn twice, narrow for telephones and wide for
screens, and the style sheet shows one, so that text keeps its size. Colours are classes of the
style sheet: `a0` to `a5` are the arms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources

VOID = frozenset({"meta", "link", "br", "path", "line", "rect", "circle", "polyline", "polygon"})
STYLE = "report.css"
COLOURS = 6
LOG_STEPS = (1, 2, 5)
Point = tuple[float, float]


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


def html_page(title: str, body: Markup) -> str:
    """Returns one HTML document without scripts or links."""
    style = (resources.files("recserve.experiments") / STYLE).read_text(encoding="utf-8")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", Markup(style)),
    )
    return "<!doctype html>\n" + tag("html", head, tag("body", body), lang="en")


@dataclass(frozen=True)
class Frame:
    """Size of a drawing and its margins, in pixels."""

    name: str
    width: int
    height: int
    left: int = 52
    right: int = 14
    top: int = 10
    bottom: int = 42


NARROW = Frame(name="narrow", width=360, height=250)
WIDE = Frame(name="wide", width=620, height=300)


@dataclass(frozen=True)
class Tick:
    """A labelled place on an axis."""

    value: float
    label: str


@dataclass(frozen=True)
class Axis:
    """One direction of the plane.

    Attributes:
        title: With its unit.
        low: Value at the left or bottom.
        high: Value at the right or top.
        ticks: Labelled places.
        log: Whether the scale is logarithmic.
    """

    title: str
    low: float
    high: float
    ticks: tuple[Tick, ...]
    log: bool = False

    def share(self, value: float) -> float:
        """Returns 0 at the low end and 1 at the high end; values outside are clipped."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, self.low))
        return min(max((value - low) / (high - low), 0.0), 1.0) if high > low else 0.5


@dataclass(frozen=True)
class Line:
    """A line, or a band between two lines.

    Attributes:
        points: In order of x; nan in y breaks the line.
        style: Classes.
        upper: Upper edge of a band; None for a line.
    """

    points: tuple[Point, ...]
    style: str
    upper: tuple[Point, ...] | None = None


def linear_axis(title: str, low: float, high: float, count: int = 5) -> Axis:
    """Returns an axis with round ticks that holds both values."""
    if not high > low:
        low, high = low - 1, high + 1
    step = round_step((high - low) / count)
    first, last = math.floor(low / step), math.ceil(high / step)
    ticks = [n * step for n in range(first, last + 1)]
    labels = tuple(Tick(value, short(value, step)) for value in ticks)
    return Axis(title=title, low=ticks[0], high=ticks[-1], ticks=labels)


def log_axis(title: str, low: float, high: float) -> Axis:
    """Returns a logarithmic axis with ticks at 1, 2 and 5 times powers of ten."""
    low = max(low, 1e-6)
    high = max(high, low * 1.2)
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    marks = [step * 10.0**power for power in powers for step in LOG_STEPS]
    start = max(mark for mark in marks if mark <= low * 1.001)
    end = min(mark for mark in marks if mark >= high * 0.999)
    inside = [mark for mark in marks if start <= mark <= end]
    shown = inside if len(inside) <= 7 else [m for m in inside if _is_power(m) or m in (start, end)]
    ticks = tuple(Tick(mark, short(mark, mark)) for mark in shown)
    return Axis(title=title, low=start, high=end, ticks=ticks, log=True)


def percentile_axis(count: int) -> Axis:
    """Returns an axis on which 90 %, 99 % and 99.9 % are equally far apart.

    Args:
        count: Requests; percentiles that rest on fewer than two of them are left out.
    """
    ends = [0.0, 0.5, 0.9, 0.99, 0.999, 0.9999, 0.99999]
    high = min(tail(1 - 1 / max(count, 20)), 5.0)
    ticks = tuple(Tick(tail(s), f"{s * 100:g} %") for s in ends if tail(s) <= high + 1e-9)
    return Axis(title="share of requests that are faster", low=0.0, high=high, ticks=ticks)


def tail(share: float) -> float:
    """Returns the place of a share on the percentile axis: minus log10 of what is above it."""
    return -math.log10(max(1 - share, 1e-9))


def _is_power(value: float) -> bool:
    return abs(math.log10(value) - round(math.log10(value))) < 1e-9


def round_step(rough: float) -> float:
    """Returns the next 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next((step * power for step in (1, 2, 5) if step * power >= rough * 0.999), 10 * power)


def short(value: float, step: float) -> str:
    """Returns a label with as many decimals as the step needs."""
    decimals = max(0, -math.floor(math.log10(abs(step)) + 1e-9)) if step else 0
    text = f"{value:,.{decimals}f}"
    return text.replace("-", "\N{MINUS SIGN}")


def chart(x: Axis, y: Axis, lines: Sequence[Line], label: str, zero: bool = False) -> Markup:
    """Returns a chart in both sizes.

    Args:
        x: Horizontal axis.
        y: Vertical axis.
        lines: Lines and bands, the first at the back.
        label: What a screen reader says.
        zero: Whether the line y = 0 is marked.
    """
    return join(*(_drawing(frame, x, y, lines, label, zero) for frame in (NARROW, WIDE)))


def _drawing(
    frame: Frame, x: Axis, y: Axis, lines: Sequence[Line], label: str, zero: bool
) -> Markup:
    inner_width = frame.width - frame.left - frame.right
    inner_height = frame.height - frame.top - frame.bottom

    def place(point: Point) -> Point:
        return (
            frame.left + x.share(point[0]) * inner_width,
            frame.top + (1 - y.share(point[1])) * inner_height,
        )

    bottom = frame.top + inner_height
    right = frame.left + inner_width
    parts: list[Markup] = []
    for tick in y.ticks:
        height = place((x.low, tick.value))[1]
        parts.append(
            tag("line", x1=frame.left, x2=right, y1=n(height), y2=n(height), class_="grid")
        )
        parts.append(tag("text", tick.label, x=frame.left - 7, y=n(height + 4), text_anchor="end"))
    taken = -math.inf
    for tick in x.ticks:
        across = place((tick.value, y.low))[0]
        parts.append(
            tag("line", x1=n(across), x2=n(across), y1=n(bottom), y2=n(bottom + 4), class_="axis")
        )
        half = 3.6 * len(tick.label)
        if across - half > taken:
            middle = min(across, frame.width - half)
            parts.append(
                tag("text", tick.label, x=n(middle), y=n(bottom + 17), text_anchor="middle")
            )
            taken = across + half + 4
    parts.append(tag("line", x1=frame.left, x2=right, y1=n(bottom), y2=n(bottom), class_="axis"))
    if zero and y.low < 0 < y.high:
        height = place((x.low, 0.0))[1]
        parts.append(
            tag("line", x1=frame.left, x2=right, y1=n(height), y2=n(height), class_="zero")
        )
    parts.extend(_path(line, place) for line in lines)
    title = tag(
        "text",
        x.title,
        x=n(frame.left + inner_width / 2),
        y=frame.height - 6,
        text_anchor="middle",
        class_="title",
    )
    return tag(
        "svg",
        *parts,
        title,
        viewBox=f"0 0 {frame.width} {frame.height}",
        class_=f"chart {frame.name}",
        role="img",
        aria_label=label,
    )


def _path(line: Line, place: Callable[[Point], Point]) -> Markup:
    if line.upper is not None:
        around = [place(point) for point in (*line.points, *reversed(line.upper))]
        return tag(
            "polygon", points=" ".join(f"{n(a)},{n(b)}" for a, b in around), class_=line.style
        )
    words = []
    drawing = False
    for point in line.points:
        if math.isnan(point[1]):
            drawing = False
            continue
        across, down = place(point)
        words.append(f"{'L' if drawing else 'M'}{n(across)} {n(down)}")
        drawing = True
    return tag("path", d=" ".join(words), class_=line.style)


def interval(low: float, estimate: float, high: float, axis: Axis, style: str) -> Markup:
    """Returns a bar from low to high with its estimate, over a zero line, on a common axis."""
    width, height = 240.0, 26.0

    def place(value: float) -> float:
        return 6 + axis.share(value) * (width - 12)

    middle = height / 2
    parts = [
        tag("line", x1=n(place(0.0)), x2=n(place(0.0)), y1=0, y2=n(height), class_="zero"),
        tag(
            "line", x1=n(place(low)), x2=n(place(high)), y1=middle, y2=middle, class_=f"bar {style}"
        ),
        tag("circle", cx=n(place(estimate)), cy=middle, r=5, class_=f"dot {style}"),
    ]
    label = f"{estimate:.4g}, from {low:.4g} to {high:.4g}"
    return tag(
        "svg",
        *parts,
        viewBox=f"0 0 {width:g} {height:g}",
        class_="mini",
        role="img",
        aria_label=label,
    )


def n(value: float) -> str:
    """Returns a coordinate with one decimal at most."""
    return f"{value:.1f}".removesuffix(".0")
