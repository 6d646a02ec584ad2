"""Measures how long quantisers take, and the size of the index of a million items.

    python -m benchmarks.recommend.quantizer [--items 12101 200000] [--dim 256] [--out F.json]

Vectors are drawn from a mixture of Gaussians. Prints one JSON line per quantiser with wall and CPU
seconds, then the index and the peak memory. Goals on two idle cores: 12,101 x 256 in 15 s, 200,000
x 256 in 120 s, index and trie of a million items in 5 s and 100 MB.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import time
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch

from recserve.features.catalog.semantic_ids import build_semantic_ids
from recserve.features.vectors.quantizer import fit_quantizer, reconstruction_error
from recserve.features.vectors.text_encoder import unit
from recserve.kernels.trie.trie import build_trie

KINDS = (("residual", 4), ("product", 16), ("product", 32), ("product", 64))


def drawn(items: int, dim: int, seed: int) -> np.ndarray:
    """Returns [items, dim] float32 vectors of unit length around 500 centres."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(500, dim)).astype(np.float32)
    noise = rng.normal(size=(items, dim)).astype(np.float32)
    return unit(centres[rng.integers(500, size=items)] + 0.5 * noise)


def quantise(items: int, dim: int, kind: str, levels: int) -> dict[str, Any]:
    """Fits, encodes and indexes; returns wall and CPU seconds."""
    vectors = drawn(items, dim, seed=0)
    wall, processor = time.perf_counter(), time.process_time()
    quantizer = fit_quantizer(kind, vectors, (256,) * levels, seed=0)
    fitted = time.perf_counter()
    codes = quantizer.encode(vectors)
    done, spent = time.perf_counter(), time.process_time() - processor
    ids = [str(row) for row in range(items)]
    _, report = build_semantic_ids(ids, codes, quantizer.codebook_sizes, np.zeros(items))
    return {
        "items": items,
        "dim": dim,
        "quantizer": kind,
        "levels": levels,
        "fit_s": round(fitted - wall, 2),
        "encode_s": round(done - fitted, 2),
        "total_s": round(done - wall, 2),
        "processor_s": round(spent, 2),
        "reconstruction_error": round(reconstruction_error(vectors, quantizer.decode(codes)), 4),
        "collision_share": round(report.collision_share, 4),
    }


def million() -> dict[str, Any]:
    """Measures index and trie of a million items with five levels."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, size=(1_000_000, 4)).astype(np.uint16)
    ids = [f"item{row:07d}" for row in range(len(codes))]
    started = time.perf_counter()
    index, _ = build_semantic_ids(ids, codes, (256,) * 4, rng.random(len(codes)))
    index_bytes = index.codes.nbytes + index.order.nbytes
    indexed = time.perf_counter()
    trie = build_trie(torch.from_numpy(index.codes.astype(np.int64)), index.codebook_sizes)
    done = time.perf_counter()
    tensors = [value for value in vars(trie).values() if isinstance(value, torch.Tensor)]
    return {
        "index_s": round(indexed - started, 2),
        "trie_s": round(done - indexed, 2),
        "index_bytes": index_bytes,
        "trie_bytes": sum(tensor.nbytes for tensor in tensors),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--items", type=int, nargs="+", default=[12_101, 200_000], help="numbers of vectors"
    )
    parser.add_argument("--dim", type=int, default=256, help="size of the vectors")
    parser.add_argument("--out", type=Path, help="write the results to this file")
    options = parser.parse_args()
    machine = {
        "cores": os.cpu_count(),
        "threads": faiss.omp_get_max_threads(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "faiss": faiss.__version__,
        "numpy": np.__version__,
    }
    print(json.dumps(machine))
    results = []
    for items in options.items:
        for kind, levels in KINDS:
            results.append(quantise(items, options.dim, kind, levels))
            print(json.dumps(results[-1]), flush=True)
    index = million()
    print(json.dumps(index))
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB")
    if options.out:
        figures = {"machine": machine, "quantizers": results, "million": index}
        options.out.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
