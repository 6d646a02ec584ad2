"""HTTP client of a recserve server: one method per operation, with typed bodies and answers."""

from recserve.extras import describe_missing

try:
    from recserve.client.attempts import AnswerTooLarge, ApiError, ClientOptions, DeadlinePassed
    from recserve.client.client import AsyncClient, Client
except ModuleNotFoundError as error:
    message = describe_missing(error, "recserve.client")
    if message is None:
        raise
    raise ModuleNotFoundError(message, name=error.name) from None

__all__ = [
    "AnswerTooLarge",
    "ApiError",
    "AsyncClient",
    "Client",
    "ClientOptions",
    "DeadlinePassed",
]
