"""HTTP client of a recserve server: one method per operation, with typed bodies and answers."""

from recserve.client.asynchronous import AsyncClient
from recserve.client.attempts import ApiError, ClientOptions, DeadlinePassed
from recserve.client.synchronous import Client

__all__ = ["ApiError", "AsyncClient", "Client", "ClientOptions", "DeadlinePassed"]
