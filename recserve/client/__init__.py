"""HTTP client of a recserve server: one method per operation, with typed bodies and answers."""

from recserve.client.attempts import AnswerTooLarge, ApiError, ClientOptions, DeadlinePassed
from recserve.client.client import AsyncClient, Client

__all__ = [
    "AnswerTooLarge",
    "ApiError",
    "AsyncClient",
    "Client",
    "ClientOptions",
    "DeadlinePassed",
]
