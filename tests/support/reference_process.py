"""Answers of one process that runs the torch kernels, to compare other processes with.

By default each process measures which kernels are faster, and the last bits of scores may differ.
A test therefore starts the other processes under `ENVIRONMENT` too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from recserve.schemas.items import RankRequest, RecommendRequest
from recserve.service import Service
from tests.support.paths import ROOT
from tests.support.request_set import Request, stable

ENVIRONMENT = {"RECSERVE_KERNELS": "torch", "OMP_NUM_THREADS": "1"}


def process_answers(bundle: Path, store: str, requests: Sequence[Request]) -> list[bytes]:
    """Returns the comparable answers of a new process that gets the requests one by one."""
    lines = [b"rank" if isinstance(one, RankRequest) else b"recommend" for one in requests]
    lines = [b + b" " + msgspec.json.encode(one) for b, one in zip(lines, requests, strict=True)]
    done = subprocess.run(
        [sys.executable, "-m", __name__, bundle, store],
        input=b"\n".join(lines), cwd=ROOT, env={**os.environ, **ENVIRONMENT}, capture_output=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.splitlines()


def main() -> None:
    """Answers the requests of standard input, one line for each."""
    bundle, store = sys.argv[1:]
    with Service.open(bundle, store, "cpu") as service:
        for line in sys.stdin.buffer.read().splitlines():
            kind, _, body = line.partition(b" ")
            if kind == b"rank":
                answer = stable(service.rank(msgspec.json.decode(body, type=RankRequest)))
            else:
                request = msgspec.json.decode(body, type=RecommendRequest)
                answer = stable(service.recommend(request))
            print(answer.decode())


if __name__ == "__main__":
    main()
