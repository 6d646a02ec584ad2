"""Write the headline figures of README.md and docs/results/performance.md, and their chart.

    python docs/_build/headline.py recommend.json rank.json text.json

The arguments are the JSON files of three benchmarks; docs/results/performance.md has their
commands. The figures go between the `figures: headline` markers of both pages, and into
docs/images/headline.svg. All three files must come from one machine.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", ROOT / "docs" / "results" / "performance.md")
CHART = ROOT / "docs" / "images" / "headline.svg"
BLOCK = re.compile(r"(<!-- figures: headline -->\n).*?(<!-- end -->)", re.DOTALL)
SAME_MACHINE = ("processor", "torch", "threads", "clock")

RECOMMEND = {
    "generate": "transformers `generate`, trie-masked beams",
    "kv-copy": "torch loop that copies the cache per beam",
    "bare-tree": "bare tree-attention loop",
    "cold": "**recserve**, new user",
    "warm": "**recserve**, returning user",
}
RANK = {
    "pointwise": "one forward pass per candidate",
    "dense mask": "one forward pass with a dense mask",
    "cold": "**recserve**, new user",
    "warm": "**recserve**, returning user",
}
TEXT = {
    "transformers": "transformers, greedy",
    "llama.cpp": "llama.cpp, greedy",
    "plain": "**recserve**, greedy",
    "assisted-70": "transformers, assisted, 70 % of the drafts right",
    "oracle-70": "**recserve** with the same drafts",
    "together": "**recserve**, eight texts at once",
}


@dataclass(frozen=True)
class Panel:
    """One table and one part of the chart.

    Attributes:
        title: What is measured.
        unit: Unit of the values.
        rows: Method and value; a value that was extrapolated has True.
    """

    title: str
    unit: str
    rows: list[tuple[str, float, bool]]


def timed(content: dict[str, Any], wanted: dict[str, Any], names: dict[str, str]) -> Panel:
    """The medians of the cell that has the wanted properties."""
    for cell in content["cells"]:
        if all(cell[key] == value for key, value in wanted.items()):
            runs = cell["runs"]
            rows = [
                (words, float(runs[name]["median_ms"]), runs[name]["note"].startswith("~"))
                for name, words in names.items()
                if runs.get(name) and runs[name]["median_ms"] is not None
            ]
            return Panel("", "ms", rows)
    raise SystemExit(f"no cell has {wanted}")


def written(content: dict[str, Any]) -> Panel:
    """Tokens per second in bfloat16, prompt included."""
    cell = next(cell for cell in content["cells"] if cell["dtype"] == "bfloat16")
    found = cell["figures"]
    rows = [(words, found[n]["tokens_per_s"], False) for n, words in TEXT.items() if n in found]
    return Panel("", "tokens/s", rows)


def panels(recommend: dict[str, Any], rank: dict[str, Any], text: dict[str, Any]) -> list[Panel]:
    """The three parts, in the order of the page."""
    slate = timed(recommend, {"beams": 50, "batch": 1, "dtype": "float32"}, RECOMMEND)
    ranking = timed(rank, {"scorer": "ranker", "candidates": 500, "root": 200}, RANK)
    return [
        Panel("A slate: beam 50, 12,101 items, 200 tokens of history", slate.unit, slate.rows),
        Panel("A ranking: 500 candidates, 200 rows of history", ranking.unit, ranking.rows),
        Panel("A text: 254 M weights, bfloat16, prompt included", "tokens/s", written(text).rows),
    ]


def number(value: float, about: bool) -> str:
    """At most three digits behind the point, as a reader compares them."""
    shown = f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
    return f"~{shown}" if about else shown


def tables(parts: list[Panel], machine: dict[str, Any]) -> str:
    """One Markdown table, and a line that names the machine."""
    where = (
        f"{machine['processor']}, {machine['threads']} thread, "
        f"{'processor time' if machine['clock'] == 'cpu' else 'wall clock'}, "
        f"torch {machine['torch'].split('+')[0]}, transformers {machine['transformers']}, medians"
    )
    lines = [f"| {where} | |", "|---|---:|"]
    for part in parts:
        lines.append(f"| **{part.title}** | **{part.unit}** |")
        lines += [f"| {words} | {number(value, about)} |" for words, value, about in part.rows]
    return "\n".join(lines) + "\n"


def draw(parts: list[Panel]) -> None:
    """Horizontal bars, one panel each; a logarithmic axis, because methods are far apart."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.hashsalt": "recserve", "font.size": 9, "svg.fonttype": "none"}
    heights = [len(part.rows) for part in parts]
    figure, axes = plt.subplots(
        len(parts), 1, figsize=(8.4, 0.32 * sum(heights) + 1.9), height_ratios=heights
    )
    for part, ax in zip(parts, axes, strict=True):
        rows = part.rows[::-1]
        plain = [words.replace("**", "").replace("`", "") for words, _, _ in rows]
        ours = [words.startswith("**") for words, _, _ in rows]
        values = [value for _, value, _ in rows]
        colors = ["#3b5bdb" if own else "#adb5bd" for own in ours]
        ax.barh(plain, values, color=colors, height=0.68)
        for place, (_, value, about) in enumerate(rows):
            ax.annotate(
                number(value, about), (value, place), (4, 0), textcoords="offset points", va="center"
            )
        unit = "ms, log scale ↓" if part.unit == "ms" else f"{part.unit} ↑"
        ax.set_title(f"{part.title} ({unit})", loc="left", fontsize=9.5, weight="bold", x=-0.3)
        if part.unit == "ms":
            ax.set_xscale("log")
            ax.set_xlim(min(values) / 2, max(values) * 2.2)
        else:
            ax.set_xlim(0, max(values) * 1.12)
        ax.xaxis.set_visible(False)
        ax.spines[["top", "right", "bottom"]].set_visible(False)
        ax.tick_params(left=False)
    figure.tight_layout()
    figure.savefig(CHART, metadata={"Date": None})


def main(files: list[str]) -> None:
    """Reads the three files, rewrites both pages and the chart."""
    if len(files) != 3:
        raise SystemExit((__doc__ or "").split("\n\n")[1])
    contents = [json.loads(Path(file).read_text(encoding="utf-8")) for file in files]
    machines = [{key: c["machine"][key] for key in SAME_MACHINE} for c in contents]
    if machines[1:] != machines[:-1]:
        raise SystemExit(f"the files are of different machines: {machines}")
    parts = panels(*contents)
    block = tables(parts, contents[0]["machine"])
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        page.write_text(BLOCK.sub(lambda m: m[1] + block + m[2], text), encoding="utf-8")
    draw(parts)


if __name__ == "__main__":
    main(sys.argv[1:])
