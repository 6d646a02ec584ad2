"""Tables in Markdown and a plot of the rows of drafter_comparison.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

POSITIONS = 5  # depths whose acceptance the tables show
Row = dict[str, Any]


def print_tables(rows: list[Row]) -> None:
    """Prints one table per temperature."""
    print("\n\n".join(table(own, heat) for heat, own in by_temperature(rows).items()))


def by_temperature(rows: list[Row]) -> dict[float, list[Row]]:
    """Returns the rows with drafts by temperature, arms in order of their longest steps.

    A drafter without chains drafts nothing under a chain's rule; such a row is left out.
    """
    found: dict[float, list[Row]] = {}
    for row in rows:
        if row["figures"]["drafts"]:
            found.setdefault(row["temperature"], []).append(row)
    return {heat: _ordered(found[heat]) for heat in sorted(found)}


def _ordered(rows: list[Row]) -> list[Row]:
    longest: dict[str, float] = {}
    for row in rows:
        steps = row["figures"]["tokens_per_step"]
        longest[row["arm"]] = max(longest.get(row["arm"], 0.0), steps)
    nodes = {(row["arm"], row["tree"]): row["figures"]["nodes_per_step"] for row in rows}

    def place(row: Row) -> tuple[Any, ...]:
        arm, tree = row["arm"], row["tree"]
        return -longest[arm], arm, nodes[arm, tree], tree, row["batch"]

    return sorted(rows, key=place)


def table(rows: list[Row], temperature: float) -> str:
    """Returns a table: a line per drafter and tree, cost and speed at each batch size."""
    batches = sorted({row["batch"] for row in rows})
    lines: dict[tuple[str, str], dict[int, Row]] = {}
    for row in rows:
        lines.setdefault((row["arm"], row["tree"]), {})[row["batch"]] = row["figures"]
    heads = ["drafter", "tree", "tokens per step", f"accepted at depth 1..{POSITIONS}"]
    heads += ["nodes per step", "kappa"]
    heads += [f"draft cost, batch {batch}" for batch in batches]
    heads += [f"speed, batch {batch}" for batch in batches]
    out = [_line(heads), _line(["---", "---", *["---:"] * (len(heads) - 2)])]
    for (arm, tree), by_batch in lines.items():
        first = by_batch[min(by_batch)]
        cells = [arm, tree, f"{first['tokens_per_step']:.2f}"]
        cells.append(" ".join(f"{p:.2f}" for p in first["acceptance_by_position"][:POSITIONS]))
        cells += [f"{first['nodes_per_step']:.1f}", f"{first['kappa']:.2f}"]
        cells += [_cell(by_batch.get(batch), "draft_share", ".0%") for batch in batches]
        cells += [_cell(by_batch.get(batch), "ratio", ".2f") for batch in batches]
        out.append(_line(cells))
    return "\n".join([_title(rows, temperature, batches), "", *out])


def _title(rows: list[Row], temperature: float, batches: list[int]) -> str:
    """Returns what the rows share, and the speed of plain decoding."""
    options, m = rows[0]["options"], rows[0]["machine"]
    speeds = [
        f"{np.median([r['figures']['plain_tokens_per_s'] for r in rows if r['batch'] == b]):,.0f}"
        for b in batches
    ]
    return (
        f"**Temperature {temperature:g}**: {options['prompts']} texts of {options['tokens']} "
        f"tokens after {options['length']}; plain decoding writes {' / '.join(speeds)} "
        f"tokens/s at batch {' / '.join(map(str, batches))}, which is speed 1; {m['processor']}, "
        f"{options['threads']} thread(s), {options['clock']} clock, torch {m['torch']}"
    )


def _cell(figures: Row | None, name: str, form: str) -> str:
    return "" if figures is None else format(figures[name], form)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def best_tree(rows: list[Row], arm: str, batch: int) -> Row | None:
    """Returns the fastest row of a drafter at a batch size."""
    own = [row for row in rows if row["arm"] == arm and row["batch"] == batch]
    return max(own, key=lambda row: row["figures"]["ratio"], default=None)


def save_plot(rows: list[Row], path: Path) -> None:
    """Draws acceptance by depth and the best speed of each drafter, a line of panels per
    temperature.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    groups = by_temperature(rows)
    figure, panels = plt.subplots(
        len(groups), 2, figsize=(12, 5.2 * len(groups)), squeeze=False, layout="constrained"
    )
    for (left, right), (heat, own) in zip(panels, groups.items(), strict=True):
        arms = list(dict.fromkeys(row["arm"] for row in own))
        batches = sorted({row["batch"] for row in own})
        places, height = np.arange(len(arms)), 0.8 / len(batches)
        colors = plt.get_cmap("tab20").colors  # type: ignore[attr-defined]
        for number, arm in enumerate(arms):
            some = [row for row in own if row["arm"] == arm and row["batch"] == batches[0]]
            if not some:
                continue
            longest = max(some, key=lambda row: row["figures"]["tokens_per_step"])["figures"]
            left.plot(
                range(1, POSITIONS + 1),
                longest["acceptance_by_position"][:POSITIONS],
                marker="o",
                markersize=3,
                color=colors[number % len(colors)],
                linestyle="-" if number < len(colors) else "--",
                label=f"{arm} ({longest['tokens_per_step']:.2f})",
            )
        for number, batch in enumerate(batches):
            best = [best_tree(own, arm, batch) for arm in arms]
            values = [0.0 if row is None else row["figures"]["ratio"] for row in best]
            right.barh(places + number * height, values, height, label=f"batch {batch}")
        left.set(
            xlabel="depth in the draft",
            ylabel="accepted share of the drafts",
            xticks=range(1, POSITIONS + 1),
            ylim=(0, 1),
            title=f"longest steps, temperature {heat:g} (tokens per step)",
        )
        left.legend(fontsize=7, ncols=2)
        right.axvline(1.0, color="black", linewidth=0.8)
        right.set(
            title=f"fastest tree, temperature {heat:g}",
            xlabel="tokens/s, plain decoding = 1",
            yticks=places + height * (len(batches) - 1) / 2,
            yticklabels=arms,
        )
        right.invert_yaxis()
        right.legend(fontsize=7)
    matplotlib.rcParams["svg.hashsalt"] = "recserve"  # the same rows give the same file
    figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
