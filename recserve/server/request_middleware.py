"""The way of every request: its id, who sent it, its answer or error, and what is recorded."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from recserve.core.plugins import request_error
from recserve.server.access import Access
from recserve.server.context import SCOPE_KEY, AppState, RequestContext
from recserve.server.errors import ClientGone, error_response, row_of
from recserve.server.routing import Routes
from recserve.server.trace import HEADER, Recorder

log = logging.getLogger(__name__)
CLOSE = (b"connection", b"close")


class RequestMiddleware:
    """ASGI middleware in front of all routes.

    Attributes:
        app: The application behind it.
        state: State of the application.
        routes: Paths of the table of operations.
        access: Refuses requests without a key.
        recorders: Take each ended request.
    """

    def __init__(
        self,
        app: ASGIApp,
        state: AppState,
        routes: Routes,
        access: Access,
        recorders: Sequence[Recorder] = (),
    ) -> None:
        self.app = app
        self.state = state
        self.routes = routes
        self.access = access
        self.recorders = recorders

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request to the application, or answers it with an error."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        # Routes answer HEAD like GET. The connection, which has the other scope, omits the body.
        routed = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        route, parameters = self.routes.match(routed)
        operations = None if route is None else route.operations
        context = RequestContext(self.state, routed, receive, route, operations, parameters)
        routed[SCOPE_KEY] = context
        answer = _Answer(context, send)
        generation = self.state.lifecycle.enter()
        try:
            try:
                context.trace.rename(context.request.headers.get(HEADER))
                context.client = self.access.admit(context)
                context.refuse_on_arrival()
                # The router calls OperationRoute.handle: body, handler, response.
                await self.app(routed, receive, answer)
            except (Exception, SystemExit) as raised:
                error = request_error(raised)  # SystemExit of a plug-in would end the server
                self._note(context, error)
                if not answer.started and not isinstance(error, ClientGone):
                    response = error_response(error, scope["path"], context.operation)
                    await response(scope, receive, answer)
        finally:
            context.close()
            self.state.lifecycle.leave(generation)
            # The framework names the routes that a program has added to the application.
            context.trace.route = getattr(route or routed.get("route"), "path", "other")
            self._record(scope, context)

    def _note(self, context: RequestContext, error: Exception) -> None:
        """Records a failure in the trace, and logs what the operator has to know."""
        row, trace = row_of(error, context.operation), context.trace
        trace.failure, trace.error_code = row.reason, row.code
        trace.status = trace.status or row.status
        if row.status == 500:
            log.error("request %s failed", trace.request_id, exc_info=error)
        elif row.status == 503 and row.message is not None:
            # The response hides the cause; the operator needs it to repair disk or store.
            log.warning("request %s failed: %s", trace.request_id, error)

    def _record(self, scope: Scope, context: RequestContext) -> None:
        """Counts an ended request, and passes it to the recorders."""
        metrics, trace = self.state.metrics, context.trace
        seconds = time.monotonic() - trace.began_s
        metrics.request(trace.route, trace.strategy, seconds, trace.arm)
        if trace.failure is not None and not context.open:
            metrics.failure(trace.failure, trace.error_code)
        if trace.timing_ms is not None:
            stages = {n: getattr(trace.timing_ms, n) for n in trace.timing_ms.__struct_fields__}
            metrics.stages(stages)
        metrics.count_degraded(trace.degraded)
        trace.counted = context.counted
        for record in self.recorders:
            record(scope, trace)


class _Answer:
    """Sends a response with the headers of every response, and records its status.

    Attributes:
        started: True once the status has been sent.
    """

    def __init__(self, context: RequestContext, send: Send) -> None:
        self._context, self._send = context, send
        self.started = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            context = self._context
            context.trace.status = message["status"]
            message["headers"] = [*message["headers"], *context.trace.headers()]
            if context.state.lifecycle.draining and context.upload.last:
                message["headers"].append(CLOSE)
        await self._send(message)
