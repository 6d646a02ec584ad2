"""Keeps web pages of other sites away from a server, whether it has API keys or not.

A page that the user of this machine visits can make the browser send requests to a loopback
address. By DNS rebinding (a name that first leads to the page's server, then to 127.0.0.1) it could
read the answers too. Such a request carries the page's own name in `Host`.

A server with keys is in reach of a page too. The browser remembers a key of Basic authentication
and adds it to every request to the server, whichever page sends the request.
"""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from recserve.config import is_loopback
from recserve.server.errors import CrossSite

READS = ("GET", "HEAD")  # these change nothing, and a link of another site may lead here
OWN_PAGES = "with a Basic key, only pages of this server and of allowed_hosts may send requests"


class OriginCheck:
    """Checks the headers that a browser sets and a page cannot change.

    Attributes:
        host: Address on which the server listens.
        names: Host names that are accepted beside it and those of the loopback interface.
        keyless: True if requests need no key. `Host` and `Origin` then count for every request.
    """

    def __init__(self, host: str, names: Collection[str], keyless: bool) -> None:
        self.host = host
        self.names = frozenset(name.lower().rstrip(".") for name in names)
        self.keyless = keyless

    def check(self, method: str, headers: Headers) -> None:
        """Raises CrossSite if a page of another site sent the request."""
        site = headers.get("sec-fetch-site")
        if site == "cross-site" and method not in READS:
            raise CrossSite("a page of another site may not send this request")
        if _scheme(headers) == "basic":
            self._check_remembered_key(method, headers, site)
        if self.keyless:
            self._check_names(headers)

    def _check_remembered_key(self, method: str, headers: Headers, site: str | None) -> None:
        """Raises CrossSite unless the page is this server's own, or no page sent the request.

        `Sec-Fetch-Site` compares the page with the address in the browser, so it is right behind a
        proxy that replaces `Host`. Browsers send it over https and to loopback addresses only.
        """
        if site == "same-origin":
            return
        origin = headers.get("origin")
        if origin is None and site not in (None, "none") and method not in READS:
            raise CrossSite(f"Sec-Fetch-Site is {site[:80]!r}; {OWN_PAGES}")
        if origin is not None and not self._fits(origin, headers.get("host", "")):
            raise CrossSite(f"Origin is {origin[:80]!r}, which is not Host; {OWN_PAGES}")

    def _check_names(self, headers: Headers) -> None:
        """Raises CrossSite if `Host` or `Origin` is not this server's."""
        host = headers.get("host")
        if host is None:  # HTTP/1.0, which no browser speaks
            return
        if not self._ours(_name(f"//{host}")):
            raise CrossSite(
                f"Host is {host[:80]!r}; without api_keys only localhost and allowed_hosts are "
                "served"
            )
        origin = headers.get("origin")
        if origin is not None and not self._fits(origin, host):
            raise CrossSite(
                f"Origin is {origin[:80]!r}; without api_keys pages of other sites may not send "
                "requests"
            )

    def _fits(self, origin: str, host: str) -> bool:
        """Whether a page may send requests to a host: it comes from there or is allowed."""
        place = origin.lower().partition("//")[2]
        return (place != "" and place == host.lower()) or _name(origin) in self.names

    def _ours(self, name: str) -> bool:
        given = name in self.names or name == self.host
        return given or name.endswith(".localhost") or is_loopback(name)


def _scheme(headers: Headers) -> str:
    """Returns the scheme of the credentials in lower case, or an empty string."""
    return headers.get("authorization", "").partition(" ")[0].lower()


def _name(url: str) -> str:
    """Returns the host name of a URL in lower case, or an empty string."""
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return ""
