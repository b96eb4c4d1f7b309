"""Which web pages may make a browser call what changes the engine.

A browser sends a simple request, which has no header and no content type of its own, wherever a
page wants it: only the answer is kept from the page. It says in ``Origin`` and ``Sec-Fetch-Site``
where the page is from; other clients send neither.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from megatron_async.errors import ConfigError
from megatron_async.serving.http.errors import ApiError

ANY = "*"
_DEFAULT_PORTS = {"http": 80, "https": 443}


class Place(NamedTuple):
    """A host, and a port or the default one."""

    host: str
    port: int | None


def check_origins(allowed: Iterable[str]) -> None:
    """Raises ConfigError for what no browser sends as an origin, so that it would allow nothing, or
    more than was meant."""
    for origin in allowed:
        if not origin.strip() or origin.endswith("/") or origin != "".join(origin.split()):
            raise ConfigError(
                f"allow_origin={origin[:200]!r} must be as in https://example.com, without a path "
                "or a slash at the end, or *"
            )


class Pages:
    """What a request says of the page that makes it.

    Args:
        allowed: origins that may call the server; ``*`` for all.
    """

    def __init__(self, allowed: Iterable[str]) -> None:
        self._allowed = frozenset(allowed)

    def refusal(self, headers: Headers, *, has_key: bool) -> ApiError | None:
        """Why a page may not make this request; None if it may, and for other clients.

        Args:
            has_key: the request has a known key, which a page has from its user alone. Without one
                a page must be allowed by name, and its own host must be no name that somebody else
                can turn to this server's address (DNS rebinding). Browsers name the page in what
                changes something; a page that only reads from its own host they do not name.
        """
        origins = headers.getlist("origin")
        sites = headers.getlist("sec-fetch-site")
        if not origins and not set(sites) & {"cross-site", "same-site"}:
            return None
        if len(origins) == 1 and (self._allows(origins[0], has_key) or _is_own(headers, has_key)):
            return None
        shown = origins[0][:200] if origins else "elsewhere"
        said = f"a page of {shown!r} may not do this; allow it by --allow-origin ORIGIN"
        return ApiError(403, said, code="foreign_origin")

    def _allows(self, origin: str, has_key: bool) -> bool:
        return origin in self._allowed or (has_key and ANY in self._allowed)


def _is_own(headers: Headers, has_key: bool) -> bool:
    """The page is from where the request goes to."""
    origin, hosts = headers["origin"], headers.getlist("host")
    if len(hosts) != 1:
        return False
    scheme = origin.partition("://")[0]
    page, server = _place(origin), _place(f"{scheme}://{hosts[0]}")
    if page is None or page != server:
        return False
    return has_key or _is_fixed(page.host)


def _place(url: str) -> Place | None:
    """Return the place of an http URL without a path; None where there is none."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return None
    if parts.scheme not in _DEFAULT_PORTS or not parts.hostname:
        return None
    if parts.path or parts.query or parts.fragment or "@" in parts.netloc:
        return None
    return Place(parts.hostname.rstrip("."), port or _DEFAULT_PORTS[parts.scheme])


def _is_fixed(host: str) -> bool:
    """The host is an address, or a name that browsers resolve to this machine by themselves."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
