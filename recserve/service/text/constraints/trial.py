"""Compiles grammars on trial, in a process that a grammar may crash, fill or keep busy.

llguidance bounds most of what a grammar costs, but not all: a small grammar can overflow the stack,
and a short schema can compute for hours. So a grammar is first compiled in a child of this program,
with limits of the operating system. A server compiles only what has passed.

This file is also that program. Of the package it reads `json_schema.py` alone, which needs nothing
else. So a large schema, too, keeps no thread of the server busy.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

MAX_COMPILE_S = 0.5  # of a processor
MAX_COMPILE_BYTES = 256 << 20
# A quarter of what threads have in a server.
STACK_BYTES = 2 << 20
COSTLY = "takes more than"
NICENESS = 5  # requests that compute go first


@dataclass(frozen=True)
class Verdict:
    """What a trial has found.

    Attributes:
        error: Why the grammar is of no use; empty if it passes.
        path: Path inside a schema that is of no use; empty for all of it.
        grammar: The grammar as llguidance takes it.
        num_bytes: Memory that the compiled grammar takes.
    """

    error: str
    path: str = ""
    grammar: str = ""
    num_bytes: int = 0


def is_costly(error: str) -> bool:
    """Returns whether an error says that a grammar takes too much."""
    return COSTLY in error


class Trials:
    """Compiles grammars in another process, one after another. The process starts when needed."""

    def __init__(
        self,
        tokens: Sequence[bytes],
        special: Sequence[int],
        end_tokens: Sequence[int],
        limits: dict[str, Any],
    ) -> None:
        """Keeps the tokeniser.

        Args:
            tokens: What each token writes; the name of a special one.
            special: Special tokens.
            end_tokens: Tokens that end a text.
            limits: Arguments of `LLParserLimits`.
        """
        texts = [token.decode("latin-1") for token in tokens]
        head = {"tokens": texts, "special": list(special), "ends": list(end_tokens)}
        self._head = json.dumps({**head, "limits": limits})
        self._process: subprocess.Popen[str] | None = None

    def run(self, grammar: str, json_options: Any = None) -> Verdict:
        """Compiles a grammar. One thread calls it at a time.

        Args:
            grammar: A grammar of llguidance, or a JSON schema.
            json_options: How JSON of a schema is written; None for a grammar.

        Raises:
            OSError: If the process cannot run.
        """
        job = json.dumps([grammar, json_options])
        for _ in range(2):  # the system may have ended a process that was idle
            with contextlib.suppress(OSError):
                if answer := self._ask(job):
                    return Verdict(**json.loads(answer))
            self._stop()
        raise OSError("the process that compiles grammars on trial does not run")

    def _ask(self, job: str) -> str:
        """Returns a line of the process; empty if it has ended."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env={**os.environ, "MALLOC_ARENA_MAX": "1"},
            )
            weakref.finalize(self, _end, self._process)
            job = f"{self._head}\n{job}"
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(job + "\n")
        process.stdin.flush()
        return process.stdout.readline()

    def _stop(self) -> None:
        if self._process is not None:
            _end(self._process)
        self._process = None


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


class TokenTable:
    """A tokeniser as llguidance takes it from Python. It takes the longest token at each place."""

    def __init__(self, head: dict[str, Any]) -> None:
        self.tokens = [token.encode("latin-1") for token in head["tokens"]]
        self.special_token_ids = head["special"]
        self.eos_token_id, self.bos_token_id = head["ends"][0], None
        special = set(self.special_token_ids)
        numbered = [(text, n) for n, text in enumerate(self.tokens) if text and n not in special]
        self._numbers = dict(reversed(numbered))
        self._longest = max(map(len, self._numbers), default=0)

    def __call__(self, text: bytes) -> list[int]:
        """Returns tokens that write a text; none where no token does."""
        found, place = list[int](), 0
        while place < len(text):
            for size in range(min(self._longest, len(text) - place), 0, -1):
                token = self._numbers.get(text[place : place + size])
                if token is not None:
                    found.append(token)
                    place += size
                    break
            else:
                return []
        return found


def main() -> None:
    """Reads a tokeniser, and then a grammar per line. Writes a verdict for each."""
    import llguidance as ll

    schemas = _load_beside("json_schema")
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    head = json.loads(sys.stdin.readline())
    table, limits = TokenTable(head), ll.LLParserLimits(**head["limits"])
    wrapped = ll.TokenizerWrapper(table)
    tokenizer = ll.LLTokenizer(wrapped, n_vocab=len(table.tokens), eos_token=head["ends"])
    job = partial(compile_once, ll, schemas, tokenizer, limits)
    for line in sys.stdin:
        print(json.dumps(try_apart(job, *json.loads(line))), flush=True)


def _load_beside(name: str) -> Any:
    """Imports a file of this folder without its package."""
    place = spec_from_file_location(name, os.path.join(os.path.dirname(__file__), f"{name}.py"))
    assert place is not None and place.loader is not None
    module = sys.modules[name] = module_from_spec(place)
    place.loader.exec_module(module)
    return module


def try_apart(
    job: Callable[[str, Any], dict[str, Any]], grammar: str, json_options: Any
) -> dict[str, Any]:
    """Returns the verdict of a child that compiles a grammar; arguments as in `Trials.run`."""
    source, sink = os.pipe()
    child = os.fork()
    if not child:
        try:
            _limit()
            found: list[dict[str, Any]] = []
            threading.stack_size(STACK_BYTES)
            thread = threading.Thread(target=lambda: found.append(job(grammar, json_options)))
            thread.start()
            thread.join()
            with os.fdopen(sink, "wb") as pipe:
                pipe.write(json.dumps(found[0]).encode())
        finally:
            os._exit(0)
    os.close(sink)
    with os.fdopen(source, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    if answer and not status:  # a child that a limit ends while it writes leaves part of an answer
        verdict: dict[str, Any] = json.loads(answer)
        return verdict
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if number == signal.SIGPROF:
        return {"error": f"{COSTLY} {MAX_COMPILE_S} s to compile; make it smaller"}
    if number in (signal.SIGSEGV, signal.SIGBUS):
        return {"error": f"{COSTLY} {STACK_BYTES >> 20} MB of stack; it is nested too deeply"}
    return {"error": f"{COSTLY} {MAX_COMPILE_BYTES >> 20} MB to compile; make it smaller"}


def _limit() -> None:
    """Bounds what this process may use from now on."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, MAX_COMPILE_S)
    if size := _num_bytes(0):
        resource.setrlimit(resource.RLIMIT_AS, (size + MAX_COMPILE_BYTES,) * 2)


def compile_once(
    ll: Any, schemas: Any, tokenizer: Any, limits: Any, grammar: str, json_options: Any
) -> dict[str, Any]:
    """Returns the verdict about a grammar, as far as it neither crashes nor takes too much."""
    before, schema = _num_bytes(1), {}
    try:
        if json_options is not None:
            schema = schemas.read_schema(grammar)
            text = json.dumps(schema)
            grammar = ll.LLMatcher.grammar_from_json_schema(text, overrides=json_options)
        matcher = ll.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        if error := matcher.get_error():
            path, reason = schemas.describe(schema, error)
            return {"error": reason, "path": path}
        for _ in range(2):  # the second one meets the states of the first
            copy = matcher.deep_copy()
            copy.compute_bitmask()
            if copy.is_error():
                reason = schemas.one_line(copy.get_error())
                return {"error": f"the constraint cannot go on: {reason}"}
        if copy.is_stopped() and not copy.is_accepting():
            return {"error": "no text can fulfil it"}
    except schemas.UnfitSchema as error:
        return {"error": str(error), "path": error.path}
    except MemoryError:
        raise
    except BaseException as error:  # a panic of Rust is no Exception
        return {"error": f"is not supported: {schemas.one_line(str(error))}"}
    return {"error": "", "grammar": grammar, "num_bytes": max(0, _num_bytes(1) - before)}


def _num_bytes(field: int) -> int:
    """Returns address space (0) or memory (1) of this process; 0 where Linux does not tell."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[field]) * resource.getpagesize()
    except OSError:
        return 0


if __name__ == "__main__":
    main()
