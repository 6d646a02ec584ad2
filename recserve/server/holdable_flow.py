"""Flow control of a connection that keeps some bytes from the parser for a while."""

from __future__ import annotations

from uvicorn.protocols.http.flow_control import FlowControl


class HoldableFlow(FlowControl):
    """Keeps reading paused while earlier bytes wait for the parser."""

    _held = False

    def resume_reading(self) -> None:
        """Reads on, unless bytes are held."""
        if not self._held:
            super().resume_reading()

    def hold(self, held: bool, resume: bool) -> None:
        """Says whether bytes wait for the parser.

        Args:
            held: True pauses reading until the next call with False.
            resume: Whether reading resumes at once where it was paused for that reason; if not,
                it resumes with the next answer.
        """
        was_held, self._held = self._held, held
        if held:
            self.pause_reading()
        elif was_held and resume:
            self.resume_reading()
