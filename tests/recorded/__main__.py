"""Replays all recorded answers, or records wanted changes.

python -m tests.recorded                      exit status 1 if anything differs
python -m tests.recorded --record "REASON"    the new answers are right, for this reason
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from tests.recorded.cases import read_cases
from tests.recorded.files_check import check_files, record_files
from tests.recorded.record import check_reason, record_changes
from tests.recorded.replay import Finding, replay_http, replay_service
from tests.recorded.worlds import WORLDS

SHOWN = 60  # differences that are printed
AT_ONCE = 2  # replays that run at the same time


def find_differences(worlds: list[str], ways: list[str]) -> list[Finding]:
    """Replays worlds and returns all differences."""
    calls: list[Callable[[], Iterator[Finding]]] = []
    for name in worlds:
        world, cases = WORLDS[name], read_cases(name)
        if "http" in ways:
            calls.append(partial(replay_http, world, cases))
        if "service" in ways and world.bundle is not None:
            calls.append(partial(replay_service, world, cases))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = [pool.submit(lambda call=call: list(call())) for call in calls]
        return [finding for future in found for finding in future.result()]


def main() -> int:
    """Runs the command and returns its exit status."""
    parser = argparse.ArgumentParser(
        "python -m tests.recorded",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--world", choices=list(WORLDS), action="append", help="only this world")
    parser.add_argument("--way", choices=["http", "service", "files"], action="append")
    parser.add_argument("--record", metavar="REASON", help="store the new answers for this reason")
    arguments = parser.parse_args()
    if arguments.record is not None:
        check_reason(arguments.record)
    worlds = arguments.world or list(WORLDS)
    ways = arguments.way or ["http", "service", "files"]
    began_s = time.monotonic()
    findings = find_differences(worlds, ways)
    lines = [str(finding) for finding in findings]
    files = check_files() if "files" in ways else []
    lines += files
    if arguments.record is not None and lines:
        count = record_changes(findings, arguments.record, bool(files))
        if files:
            record_files()
        print(f"recorded {count} answers{' and the files' if files else ''}")
        return 0
    print("\n".join(lines[:SHOWN]))
    if len(lines) > SHOWN:
        print(f"... and {len(lines) - SHOWN} more")
    routes = Counter(f"{f.world}/{f.case.route}" for f in findings)
    summary = ", ".join(f"{route} {count}" for route, count in routes.most_common())
    print(f"{len(lines)} differences in {time.monotonic() - began_s:.0f} s {summary}")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
