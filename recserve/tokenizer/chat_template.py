"""Renders chat messages as a prompt with the model's own template, in a process of its own.

A template is an untrusted program. template_sandbox.py runs it without access to anything but the
messages, and bounds its output, its time and its memory.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from recserve.tokenizer.template_sandbox import TemplateError

MAX_PROMPT_CHARACTERS = 8 << 20
MAX_SECONDS = 1.0  # of processor time
RUN = "from recserve.tokenizer.template_sandbox import main; main()"


class ChatTemplate:
    """One chat template."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        """Checks a template.

        Args:
            source: Jinja source.
            special: Special tokens by name, such as `bos_token`, which the template can use.

        Raises:
            TemplateError: If the source does not parse.
        """
        self._template = {"source": source, "special": dict(special)}
        self._ask({"messages": None})

    @property
    def source(self) -> str:
        """Jinja source of the template."""
        return str(self._template["source"])

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        settings: Mapping[str, Any] | None = None,
        answer_follows: bool = True,
    ) -> str:
        """Returns the prompt of a chat.

        Args:
            messages: Chat messages, oldest first.
            settings: Further variables of the template, such as `enable_thinking`.
            answer_follows: True ends the prompt with the start of the assistant's turn.

        Raises:
            TemplateError: If the template rejects the messages, fails, writes more than
                MAX_PROMPT_CHARACTERS, or computes for more than MAX_SECONDS.
        """
        request = {
            "messages": [dict(message) for message in messages],
            "settings": dict(settings or {}),
            "answer_follows": answer_follows,
            "most_characters": MAX_PROMPT_CHARACTERS,
        }
        return self._ask(request)

    def _ask(self, request: dict[str, Any]) -> str:
        answer = _renderer().ask({**self._template, **request, "most_s": MAX_SECONDS})
        if "error" in answer:
            raise TemplateError(answer["error"])
        return answer["text"]


class Renderer:
    """A process that renders templates, one at a time. It starts with the first request.

    After a fork, the new process gets a renderer of its own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        atexit.register(self.close)

    def ask(self, request: dict[str, Any]) -> dict[str, str]:
        """Returns the process's answer. Raises TemplateError if the template does not end."""
        line = json.dumps(request).encode() + b"\n"
        with self._lock:
            process = self._running()
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
                answer = process.stdout.readline()
            except OSError:
                answer = b""
            if not answer:
                self._process = None
                if process.wait() == -signal.SIGPROF:
                    raise TemplateError(
                        f"the chat template takes more than {request['most_s']:g} s for these "
                        "messages"
                    )
                raise TemplateError("the chat template cannot be applied to these messages")
        found: dict[str, str] = json.loads(answer)
        return found

    def close(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            process.kill()
            process.wait()

    def _running(self) -> subprocess.Popen[bytes]:
        """Returns the process, started again if it has ended or belongs to a parent process."""
        process = self._process
        if process is None or self._owner != os.getpid() or process.poll() is not None:
            path = os.pathsep.join(entry for entry in sys.path if entry)
            process = subprocess.Popen(
                [sys.executable, "-c", RUN],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": path},
            )
            self._process, self._owner = process, os.getpid()
        return process


@cache
def _renderer() -> Renderer:
    return Renderer()
