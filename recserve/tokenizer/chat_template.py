"""Renders chat messages as a prompt with the model's own template, in a process of its own.

A template is an untrusted program. template_sandbox.py runs it without access to anything but the
messages, and bounds its output, its time and its memory. Processor time alone would not do: on a
busy machine, a second of it can take ten.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from recserve.tokenizer.template_sandbox import TemplateError

MAX_PROMPT_CHARACTERS = 8 << 20
MAX_SECONDS = 1.0  # of processor time
MAX_WAIT_S = 5.0  # by the clock, whatever else the machine computes
SPARE_S = 0.05  # a request waits so long for a process before another one starts
MAX_RENDERERS = 8  # processes; as many as the server has threads for texts
RUN = "from recserve.tokenizer.template_sandbox import main; main()"


class TemplateTimeout(TimeoutError):
    """The prompt was not ready in time. That says nothing about the messages."""


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
        deadline_s: float | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Returns the prompt of a chat.

        Args:
            messages: Chat messages, oldest first.
            settings: Further variables of the template, such as `enable_thinking`.
            answer_follows: True ends the prompt with the start of the assistant's turn.
            deadline_s: time.monotonic() value after which it is useless; None means never.
            tools: Functions that the model may call, as OpenAI's API writes them; None for none.

        Raises:
            TemplateError: If the template rejects the messages, fails, writes more than
                MAX_PROMPT_CHARACTERS, or computes for more than MAX_SECONDS.
            TemplateTimeout: If the prompt is not ready before the deadline or within MAX_WAIT_S.
        """
        request = {
            "messages": [dict(message) for message in messages],
            "settings": dict(settings or {}),
            "answer_follows": answer_follows,
            "most_characters": MAX_PROMPT_CHARACTERS,
            "tools": None if tools is None else [dict(tool) for tool in tools],
        }
        return self._ask(request, deadline_s)

    def _ask(self, request: dict[str, Any], deadline_s: float | None = None) -> str:
        whole = {**self._template, **request, "most_s": MAX_SECONDS}
        answer = _renderers().ask(whole, deadline_s)
        if "error" in answer:
            raise TemplateError(answer["error"])
        return answer["text"]


class Renderers:
    """Processes that render templates, each for one request at a time.

    One process suffices while templates are quick. Another one starts when a request has waited for
    SPARE_S, so that a slow template holds nobody else.

    After a fork, the new process has renderers of its own.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._idle: list[Renderer] = []
        self._num_busy = 0
        os.register_at_fork(after_in_child=_renderers.cache_clear)
        atexit.register(self.close)

    def ask(self, request: dict[str, Any], deadline_s: float | None = None) -> dict[str, str]:
        """Returns the answer of a process.

        Args:
            request: As `template_sandbox.main` reads it.
            deadline_s: time.monotonic() value after which it is useless; None means never.

        Raises:
            TemplateError: If the template computes for too long, or ends the process.
            TemplateTimeout: If the answer is not there in time.
        """
        renderer = self._take(deadline_s)
        try:
            return renderer.ask(request, deadline_s)
        finally:
            with self._changed:
                self._num_busy -= 1
                self._idle.append(renderer)
                self._changed.notify()

    def close(self) -> None:
        """Ends the processes."""
        with self._changed:
            for renderer in self._idle:
                renderer.close()

    def _take(self, deadline_s: float | None) -> Renderer:
        """Returns a renderer that nobody uses. Raises TemplateTimeout."""
        with self._changed:
            if not self._idle and self._num_busy:
                self._changed.wait_for(lambda: self._idle, SPARE_S)
            if not self._idle and self._num_busy >= MAX_RENDERERS:
                left_s = MAX_WAIT_S if deadline_s is None else deadline_s - time.monotonic()
                if not self._changed.wait_for(lambda: self._idle, max(0.0, left_s)):
                    raise TemplateTimeout("all processes that apply chat templates are busy")
            renderer = self._idle.pop() if self._idle else Renderer()
            self._num_busy += 1
            return renderer


class Renderer:
    """A process that renders templates. It starts with the first request, and again if it ends."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def ask(self, request: dict[str, Any], deadline_s: float | None) -> dict[str, str]:
        """Returns the process's answer; see `Renderers.ask`."""
        line = json.dumps(request).encode() + b"\n"
        process = self._running()
        until_s = time.monotonic() + MAX_WAIT_S
        try:
            answer = _exchange(process, line, min(until_s, deadline_s or until_s))
        except TimeoutError:
            self.close()
            raise TemplateTimeout(
                f"the chat template was not applied within {MAX_WAIT_S:g} s, or before the "
                "deadline; the server is busy, or the template is slow for these messages"
            ) from None
        if not answer:
            self._process = None
            if process.wait() == -signal.SIGPROF:
                raise TemplateError(
                    f"the chat template takes more than {request['most_s']:g} s for these messages"
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
        """Returns the process, started again if it has ended or belongs to a parent process.

        It waits until a new process is ready: on a busy machine, that takes longer than a template.
        """
        process = self._process
        if process is None or self._owner != os.getpid() or process.poll() is not None:
            path = os.pathsep.join(entry for entry in sys.path if entry)
            process = subprocess.Popen(
                [sys.executable, "-c", RUN],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": path},
                bufsize=0,
            )
            assert process.stdout is not None
            process.stdout.read(1)
            self._process, self._owner = process, os.getpid()
        return process


def _exchange(process: subprocess.Popen[bytes], line: bytes, until_s: float) -> bytes:
    """Sends a line to a process and returns the line that it answers; empty if it ends.

    Raises:
        TimeoutError: If the answer is not complete at `until_s`, whatever the process does.
    """
    assert process.stdin is not None and process.stdout is not None
    sending, receiving = process.stdin.fileno(), process.stdout.fileno()
    os.set_blocking(sending, False)
    poller, left, parts = select.poll(), memoryview(line), list[bytes]()
    poller.register(sending, select.POLLOUT)
    poller.register(receiving, select.POLLIN)
    while not (parts and parts[-1].endswith(b"\n")):
        wait_ms = (until_s - time.monotonic()) * 1e3
        ready = dict(poller.poll(max(0.0, wait_ms)))
        if not ready:
            raise TimeoutError
        if left and sending in ready:
            try:
                left = left[os.write(sending, left) :]
            except BrokenPipeError:
                return b""
            if not left:
                poller.unregister(sending)
        if receiving in ready:
            part = os.read(receiving, 1 << 20)
            if not part:
                return b""
            parts.append(part)
    return b"".join(parts)


@cache
def _renderers() -> Renderers:
    return Renderers()
