"""How many kernels a GPU would be asked for in one warm request for items; no GPU is needed.

    python -m benchmarks.gpu.launches [--layers 28] [--width 256] [--json launches.json]

A small model of the layers and levels of a large one is asked on the CPU, in torch, and its
operators are counted: each that computes is a launch, views and allocations are none, and what one
of our kernels does in its place counts as that kernel (KERNELS). A count, no time: an estimate of
how the host's part compares between searches that are launched and such that are one CUDA graph.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.engine import recommender_engine, recorded
from benchmarks.gpu.searches import wide_catalogue
from benchmarks.support.drawn import drawn_roots, drawn_there
from recserve.core.request import SlateQuery
from recserve.engine.items.graph_search import SearchShape
from recserve.engine.runtime.runner import Runner
from recserve.kernels import dispatch
from recserve.models.config import DecoderConfig

# Views, allocations, and what a tensor is asked or brought to the host for.
FREE = frozenset(
    ["view", "_unsafe_view", "reshape", "_reshape_alias", "expand", "slice", "select", "unsqueeze"]
    + ["squeeze", "permute", "t", "numpy_T", "transpose", "split", "split_with_sizes", "chunk"]
    + ["narrow", "unbind", "unflatten", "flatten", "as_strided", "alias", "detach", "empty"]
    + ["empty_like", "empty_strided", "new_empty", "resize_", "lift_fresh", "to", "item"]
    + ["resolve_conj", "resolve_neg", "is_nonzero", "_local_scalar_dense"]
)
# Launches of ours: the trie step with the unpacking of its top-k, RoPE with write, the gate.
KERNELS = {"best_children": 8, "rope_write": 1, "silu_mul": 2}
LAID_OUT, ATTENDED = 12, 2  # tree attention: once for a batch, and in each layer
FORWARDS, REST = "in forwards", "beside them"


class Launches(TorchDispatchMode):
    """Counts by where they happen."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.where, self._inside = REST, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ not in FREE:
            self._add(1)
        return func(*args, **(kwargs or {}))

    def _add(self, count: int) -> None:
        if not self._inside:
            self.counts[self.where] += count

    def as_kernel(self, function: Callable[..., Any], launches: int) -> Callable[..., Any]:
        """The function, whose operators count as so many launches together."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._add(launches)
            self._inside += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._inside -= 1

        return counted

    def forward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose launches are those of forwards."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            before, self.where = self.where, FORWARDS
            try:
                return function(*args, **kwargs)
            finally:
                self.where = before

        return counted


@contextmanager
def counting(engine: Any) -> Iterator[Launches]:
    """Counts what the engine launches meanwhile."""
    launches = Launches()
    lay_out = launches.as_kernel(dispatch.tree_attention, LAID_OUT)
    runner = engine.schedulers["recommender"].runner
    patches = [
        mock.patch.object(dispatch, name, launches.as_kernel(getattr(dispatch, name), count))
        for name, count in KERNELS.items()
    ]
    patches += [
        mock.patch.object(dispatch, "turns", lambda pool: True),
        mock.patch.object(Runner, "forward", launches.forward(Runner.forward)),
        mock.patch.object(
            runner, "attention", lambda *args: launches.as_kernel(lay_out(*args), ATTENDED)
        ),
    ]
    for patch in patches:
        patch.start()
    try:
        with launches:
            yield launches
    finally:
        for patch in patches:
            patch.stop()


@mock.patch.object(dispatch, "KERNELS", "torch")
def counts_of(layers: int, width: int, items: int) -> list[dict[str, Any]]:
    """Of `beam` and `nezha`, launched and recorded."""
    catalogue = wide_catalogue(items, 1024)
    shape = DecoderConfig(64, layers, 2, 1, 32, 64, qk_norm=True)
    model = drawn_there(catalogue, shape, torch.float32, "cpu")
    engine = recommender_engine(model, 2**28)
    root = drawn_roots(model, 333, 1, 0)[0]
    rows = []
    for replayed in (False, True):
        if replayed:
            # What a record's function found once is what its replays find.
            searches = (SearchShape(1, width),)
            recorded(engine, model, catalogue.trie, searches, 1024, lambda step: once(step()))
        for strategy in ("beam", "nezha"):
            request = SlateQuery(root, catalogue.trie, 10, width, strategy)
            engine.run(request)
            with counting(engine) as launches:
                answer = engine.run(request)
            rows.append(
                {
                    "strategy": strategy,
                    "recorded": replayed,
                    "rounds": answer.rounds,
                    FORWARDS: launches.counts[FORWARDS],
                    REST: launches.counts[REST],
                }
            )
    return rows


def once(found: Any) -> Callable[[], Any]:
    """A replay that launches nothing."""
    return lambda: found


def main(arguments: list[str] | None = None) -> int:
    """Show the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=28, help="28: those of Qwen3-1.7B")
    parser.add_argument("--width", type=int, default=256, help="beams")
    parser.add_argument("--items", type=int, default=100_000, help="of three levels")
    parser.add_argument("--json", type=Path, help="write the counts here")
    options = parser.parse_args(arguments)
    rows = counts_of(options.layers, options.width, options.items)
    table = Table(
        title=f"launches of a warm request, {options.layers} layers", title_justify="left"
    )
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
