"""Counts the kernel launches of one warm item request on a GPU; needs no GPU.

    python -m benchmarks.gpu.launches [--layers 28] [--width 256] [--json launches.json]

A small model with the layers and levels of a large one runs on the CPU, and its torch operators are
counted. Each operator that computes is one launch; views and allocations are none. An operation
that one of our kernels replaces counts as that kernel (KERNELS). Prints a table for `beam` and
`nezha`, eager and as a CUDA graph. Counts are not times: they estimate how the host's work compares
between both modes.
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
from benchmarks.support.drawn import drawn_prefixes, drawn_there
from recserve.core.request import SlateQuery
from recserve.engine.beam_search_graph import SearchShape
from recserve.engine.capture import EagerRecorder
from recserve.engine.runner import Runner
from recserve.kernels import backend
from recserve.kernels.attention.attention import tree_attention
from recserve.kernels.layers import operators
from recserve.kernels.trie import level_search
from recserve.models.config import DecoderConfig

# Operators without a launch: views, allocations, metadata and copies to the host.
FREE = frozenset(
    ["view", "_unsafe_view", "reshape", "_reshape_alias", "expand", "slice", "select", "unsqueeze"]
    + ["squeeze", "permute", "t", "numpy_T", "transpose", "split", "split_with_sizes", "chunk"]
    + ["narrow", "unbind", "unflatten", "flatten", "as_strided", "alias", "detach", "empty"]
    + ["empty_like", "empty_strided", "new_empty", "resize_", "lift_fresh", "to", "item"]
    + ["resolve_conj", "resolve_neg", "is_nonzero", "_local_scalar_dense"]
)
# Launches of this project's kernels: the trie step with its top-k, RoPE with write and norms, the
# SiLU gate, residual sum with norm.
KERNELS = {
    (level_search, "best_children"): 8,
    (operators, "rope_write"): 1,
    (operators, "silu_mul"): 1,
    (operators, "add_rms_norm"): 1,
}
LAID_OUT, ATTENDED = 12, 2  # launches of tree attention: per batch, and per layer
FORWARDS, REST = "in forwards", "beside them"


class Launches(TorchDispatchMode):
    """Counts launches, separately for forward passes and the rest."""

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
        """Wraps a function so that its operators count as `launches` launches together."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._add(launches)
            self._inside += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._inside -= 1

        return counted

    def forward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a function so that its launches count as those of a forward pass."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            before, self.where = self.where, FORWARDS
            try:
                return function(*args, **kwargs)
            finally:
                self.where = before

        return counted


@contextmanager
def counting(engine: Any) -> Iterator[Launches]:
    """Counts the launches of an engine inside the context."""
    launches = Launches()
    lay_out = launches.as_kernel(tree_attention, LAID_OUT)
    runner = engine.schedulers["recommender"].runner
    patches = [
        mock.patch.object(home, name, launches.as_kernel(getattr(home, name), count))
        for (home, name), count in KERNELS.items()
    ]
    patches += [
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


@mock.patch.object(backend, "FORCED", "torch")
def counts_of(layers: int, width: int, items: int) -> list[dict[str, Any]]:
    """Returns the counts of `beam` and `nezha`, eager and captured."""
    catalogue = wide_catalogue(items, 1024)
    shape = DecoderConfig(64, layers, 2, 1, 32, 64, qk_norm=True)
    model = drawn_there(catalogue, shape, torch.float32, "cpu")
    engine = recommender_engine(model, 2**28)
    prefix = drawn_prefixes(model, 333, 1, 0)[0]
    rows = []
    for replayed in (False, True):
        if replayed:
            # Replays return the result of the capture.
            searches = (SearchShape(1, width),)
            recorded(engine, model, catalogue.trie, searches, 1024, Once())
        for strategy in ("beam", "nezha"):
            request = SlateQuery(
                prefix=prefix, trie=catalogue.trie, k=10, beam_width=width, strategy=strategy
            )
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


class Once(EagerRecorder):
    """Runs each function at its capture. A replay launches nothing and returns that result."""

    def __call__(self, step: Callable[[], Any]) -> Callable[[], Any]:
        """As Recorder."""
        found = step()
        return lambda: found


def main(arguments: list[str] | None = None) -> int:
    """Prints the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--layers", type=int, default=28, help="layers of the model; Qwen3-1.7B has 28"
    )
    parser.add_argument("--width", type=int, default=256, help="beam width")
    parser.add_argument(
        "--items", type=int, default=100_000, help="items in the catalogue, with three levels"
    )
    parser.add_argument("--json", type=Path, help="write the counts to this file")
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
