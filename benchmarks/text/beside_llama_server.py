"""recserve and llama.cpp's server with the same weights under the same load, as a table.

    LLAMA_SERVER=build/bin/llama-server python -m benchmarks.text.beside_llama_server \
        --llm FOLDER --prompts PROMPTS.jsonl [--workers 1 8] [--seconds 20] [--rounds 3]

Both run with one thread and weights of the folder's type; llama-server's caches are float32. The
load generator of `recserve bench` drives one server at a time in a closed loop, and the servers
take turns. Texts are greedy with a fixed number of tokens. A figure is the median of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from benchmarks.support.baselines.llama_cpp import write_gguf
from benchmarks.support.baselines.llama_server import llama_server, running
from recserve.load.generator import Arm, Design
from recserve.load.measurements import ArmSummary
from recserve.load.session import Workload, run_session, this_machine
from recserve.load.targets import find_target
from recserve.models.loading import load_language_model

HEAD = "| at once | server | requests | first token p50 ms | per token p50 ms | tokens/s |"


def main() -> int:
    """Runs the comparison and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--llm", type=Path, required=True, help="model folder")
    parser.add_argument("--prompts", type=Path, required=True, help="as for recserve bench")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--seconds", type=float, default=20.0, help="per run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="per text")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        gguf = folder / "model.gguf"
        model = load_language_model(options.llm)
        write_gguf(model, gguf, options.llm)
        context = model.config.decoder.max_positions
        command = [sys.executable, "-m", "recserve", "serve", "--llm", str(options.llm)]
        arms = [
            Arm("llama-server", stack.enter_context(llama_server(gguf, slots=8, context=context))),
            Arm(
                "recserve",
                stack.enter_context(running(command, "/health/ready", folder / "serve.log")),
            ),
        ]
        print(f"{this_machine()}\n\n{HEAD}\n|---:|---|---:|---:|---:|---:|")
        for workers in options.workers:
            runs: dict[str, list[ArmSummary]] = {arm.name: [] for arm in arms}
            for _ in range(options.rounds):
                for arm in arms:
                    runs[arm.name].append(asyncio.run(measured(options, arm, workers)))
            for name, summaries in runs.items():
                print(row(workers, name, summaries), flush=True)
    return 0


async def measured(options: argparse.Namespace, arm: Arm, workers: int) -> ArmSummary:
    """Drives one server.

    Raises:
        RuntimeError: If a request failed, or a text has another length.
    """
    workload = Workload(
        target=find_target("completions"),
        data=options.prompts,
        fields={"temperature": 0, "max_tokens": options.tokens, "ignore_eos": True},
        arrivals="closed",
        workers=workers,
        duration_s=options.seconds,
        warmup_s=min(2.0, options.seconds / 4),
        calibrate=False,
    )
    session = await run_session(workload, [arm], Design(), lambda stage, state: None)
    (summary,) = session.summaries
    text = summary.text
    if summary.errors or text is None or set(text.finish_reasons) != {"length"}:
        raise RuntimeError(f"{arm.name}: {summary.errors} {text} {session.warnings}")
    return summary


def row(workers: int, name: str, runs: list[ArmSummary]) -> str:
    """Returns a row of the table, with the median of the runs."""
    texts = [run.text for run in runs if run.text is not None]
    first = median(text.ttft_ms.percentiles["p50"] for text in texts if text.ttft_ms)
    token = median(text.tpot_ms.percentiles["p50"] for text in texts if text.tpot_ms)
    rate = median(text.tokens_per_s for text in texts)
    count = sum(run.num_requests for run in runs)
    return f"| {workers} | {name} | {count} | {first:.2f} | {token:.3f} | {rate:.0f} |"


if __name__ == "__main__":
    sys.exit(main())
