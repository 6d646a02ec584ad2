"""Prometheus' own checker of rules and configurations."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest


def promtool(*arguments: str) -> str:
    """Returns what promtool prints; skips without it, and fails where CI is set."""
    if shutil.which("promtool") is None:
        message = "NO promtool on this machine: the alert rules were not checked"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    ended = subprocess.run(["promtool", *arguments], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout
