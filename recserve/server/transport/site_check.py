"""Keeps web pages away from a server without API keys: `Host` and `Origin` must be this server's.

A page that the user of this machine visits can make the browser send requests to a loopback
address. By DNS rebinding (a name that first leads to the page's server, then to 127.0.0.1) it could
read the answers too. Such a request carries the page's own name in `Host`.
"""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from recserve.config import is_loopback
from recserve.server.errors import CrossSite


class SiteCheck:
    """Checks the headers that a browser sets and a page cannot change.

    Attributes:
        host: Address on which the server listens.
        names: Host names that are accepted beside it and those of the loopback interface.
    """

    def __init__(self, host: str, names: Collection[str]) -> None:
        self.host = host
        self.names = frozenset(name.lower().rstrip(".") for name in names)

    def check(self, headers: Headers) -> None:
        """Raises CrossSite if `Host` or `Origin` is not this server's."""
        host = headers.get("host")
        if host is None:  # HTTP/1.0, which no browser speaks
            return
        name = _name(f"//{host}")
        if not self._ours(name):
            raise CrossSite(
                f"Host is {host[:80]!r}; without api_keys only localhost and allowed_hosts are "
                "served"
            )
        origin = headers.get("origin")
        if origin is None or origin.lower().partition("//")[2] == host.lower():
            return
        if _name(origin) not in self.names:
            raise CrossSite(
                f"Origin is {origin[:80]!r}; without api_keys pages of other sites may not send "
                "requests"
            )

    def _ours(self, name: str) -> bool:
        given = name in self.names or name == self.host
        return given or name.endswith(".localhost") or is_loopback(name)


def _name(url: str) -> str:
    """Returns the host name of a URL in lower case, or an empty string."""
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return ""
