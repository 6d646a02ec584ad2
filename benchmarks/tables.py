"""Fills the tables of a documentation page from the JSON files of benchmarks.

    python -m benchmarks.tables docs/results/performance.md recommend=A.json rank=C.json

A block starts with `<!-- figures: recommend -->` and ends with `<!-- end -->`; the text between is
replaced. Several files of one name are shown one after another. It writes the page and prints only
errors.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
GROUPS = {
    "recommend": (("items", "model", "dtype", "batch"), "beams", "beam {:,}"),
    "rank": (("scorer", "model", "root"), "candidates", "{:,} candidates"),
    "strategies": (("model", "dtype", "batch", "beam"), "visit", "{}"),
}


def number(run: dict[str, Any] | None) -> str:
    """Returns the median in milliseconds, or the reason why there is none."""
    if run is None:
        return ""
    if run["median_ms"] is None:
        return str(run["note"])
    digits = 1 if run["median_ms"] < 100 else 0
    mark = "~" if run["note"].startswith("~") else ""
    once = " (once)" if run["note"] == "first run" else ""
    return f"{mark}{run['median_ms']:,.{digits}f}{once}{tail(run)}"


def tail(run: dict[str, Any]) -> str:
    """Returns the 99th percentile of at least a hundred runs, or the slowest run."""
    if run.get("runs", 0) < 2:
        return ""
    if run["p99_ms"] is not None:
        return f" / {run['p99_ms']:,.1f}"
    return f" / {run['slowest_ms']:,.1f} (slowest of {run['runs']})"


def row(words: list[str]) -> str:
    return f"| {' | '.join(words)} |"


def table(cells: list[dict[str, Any]], across: str, heading: str) -> list[str]:
    """Returns methods as rows, widths or candidates as columns; then the engine's stages."""
    counted = any("runs" in run for cell in cells for run in cell["runs"].values())
    measured = "ms, median / p99" if counted else "ms, median"
    methods = list(dict.fromkeys(name for cell in cells for name in cell["runs"]))
    lines = [
        row([measured, *(heading.format(cell[across]) for cell in cells)]),
        row(["---", *("---:" for _ in cells)]),
    ]
    lines += [row([m, *(number(c["runs"].get(m)) for c in cells)]) for m in methods]
    for name in ("cold", "warm"):
        staged = [c["stages"].get(name) for c in cells]
        if any(staged):
            words = [
                f"{s['prefill_ms']:.1f} + {s['draft_ms']:.1f} + {s['verify_ms']:.1f}; "
                f"{s['forwards']:.0f} forwards, {s['nodes']:.0f} nodes"
                if s
                else ""
                for s in staged
            ]
            lines.append(row([f"{name}: prefill + draft + verify, wall clock", *words]))
    return lines


def figures(kind: str, contents: list[dict[str, Any]]) -> str:
    """Returns all tables of one kind, each under the machine that measured it."""
    keys, across, heading = GROUPS[kind]
    lines: list[str] = []
    for content in contents:
        groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for cell in content["cells"]:
            groups.setdefault(tuple(str(cell[key]) for key in keys), []).append(cell)
        m = content["machine"]
        rate = content.get("matmul_gflops") or content["cells"][0]["matmul_gflops"]
        where = (
            f"{m['processor']}, {m['threads']} thread(s), {m['clock']} clock, load "
            f"{m['load_before']} before, torch {m['torch']}, transformers {m['transformers']}; "
            f"plain matmul {rate:.0f} GFLOP/s"
        )
        for group, cells in groups.items():
            names = ", ".join(f"{key} {value}" for key, value in zip(keys, group, strict=True))
            lines += [f"**{names}** ({where})", "", *table(cells, across, heading), ""]
    return "\n".join(lines) + "\n"


def main() -> int:
    page = Path(sys.argv[1])
    contents: dict[str, list[dict[str, Any]]] = {}
    for argument in sys.argv[2:]:
        kind, path = argument.split("=", 1)
        if kind not in GROUPS:
            print(f"{kind!r} is not a benchmark; choose one of {sorted(GROUPS)}", file=sys.stderr)
            return 2
        contents.setdefault(kind, []).append(json.loads(Path(path).read_text(encoding="utf-8")))

    def fill(match: re.Match[str]) -> str:
        kind = match[2]
        if kind not in contents:
            return match[0]
        return f"{match[1]}\n{figures(kind, contents[kind])}{match[3]}"

    page.write_text(BLOCK.sub(fill, page.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
