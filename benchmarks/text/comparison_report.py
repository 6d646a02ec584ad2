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
    """Draws what each drafter gains per depth and its best speed, a line of panels per temperature.

    A row of both panels is one drafter; drafters with longer steps are further up.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    groups = by_temperature(rows)
    figure, panels = plt.subplots(
        len(groups), 2, figsize=(11, 5.6 * len(groups)), squeeze=False, layout="constrained"
    )
    for (left, right), (heat, own) in zip(panels, groups.items(), strict=True):
        batches = sorted({row["batch"] for row in own})
        longest = longest_steps(own, batches[0])
        places, height = np.arange(len(longest)), 0.8 / len(batches)
        accepted = np.array([one["acceptance_by_position"][:POSITIONS] for one in longest.values()])
        left.imshow(accepted, cmap="Blues", vmin=0, vmax=1, aspect="auto")
        for (line, depth), share in np.ndenumerate(accepted):
            color = "white" if share > 0.6 else "black"
            left.text(depth, line, f"{share:.2f}", ha="center", va="center", size=8, color=color)
        left.set(
            xlabel="depth in the draft",
            xticks=range(POSITIONS),
            xticklabels=range(1, POSITIONS + 1),
            yticks=places,
            yticklabels=[f"{arm} ({one['tokens_per_step']:.2f})" for arm, one in longest.items()],
            title=f"accepted share of the drafts (tokens per step), temperature {heat:g}",
        )
        for number, batch in enumerate(batches):
            best = [best_tree(own, arm, batch) for arm in longest]
            values = [0.0 if row is None else row["figures"]["ratio"] for row in best]
            right.barh(
                places - 0.4 + (number + 0.5) * height, values, height, label=f"batch {batch}"
            )
        right.axvline(1.0, color="black", linewidth=0.8)
        right.set(
            title=f"speed of the fastest tree, temperature {heat:g}",
            xlabel="tokens/s, plain decoding = 1",
            yticks=places,
            yticklabels=longest,
            ylim=left.get_ylim(),
        )
        right.legend(fontsize=8)
    matplotlib.rcParams["svg.hashsalt"] = "recserve"  # the same rows give the same file
    figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def longest_steps(rows: list[Row], batch: int) -> dict[str, Row]:
    """Returns the figures of each drafter's tree with the longest steps, the longest first."""
    found: dict[str, Row] = {}
    for row in sorted(rows, key=lambda row: -row["figures"]["tokens_per_step"]):
        if row["batch"] == batch:
            found.setdefault(row["arm"], row["figures"])
    return found
