"""Keys of clients and of administrators: ``Authorization: Bearer KEY``."""

from __future__ import annotations

import enum
import hmac
from collections.abc import Iterable

from starlette.datastructures import Headers

from megatron_async.errors import ConfigError
from megatron_async.serving.http.errors import ApiError


class Access(enum.Enum):
    """Who may use a route, and what a key makes of its holder."""

    OPEN = "open"
    """Everybody: probes and Prometheus have no key, and the page asks for one."""
    CLIENT = "client"
    """Who has a key; where clients need none, everybody."""
    ADMINISTRATOR = "administrator"
    """Who has an administrator's key; where there is none, who has a client's. Without any key at
    all nobody, unless the server is one for development."""


def check_keys(clients: Iterable[str], administrators: Iterable[str]) -> None:
    """Raises ConfigError, which does not show them, for keys that nobody can send or guess at."""
    clients, administrators = tuple(clients), tuple(administrators)
    for name, keys in (("api_key", clients), ("admin_api_key", administrators)):
        for key in keys:
            if not key.strip():
                raise ConfigError(f"{name} is blank; give a key, or leave it out")
            if not (key.isascii() and key.isprintable() and key == key.strip()):
                raise ConfigError(
                    f"{name} must be of printable ASCII characters, without spaces around them"
                )
    if set(clients) & set(administrators):
        raise ConfigError(
            "a key is in api_key and in admin_api_key, so that clients would be administrators; "
            "give different ones"
        )


class Keys:
    """All keys of a server, and what they let their holders do.

    Args:
        clients: none lets everybody use the API.
        administrators: none lets clients with a key do what administrators may.
        development: without any key everybody is an administrator.
    """

    def __init__(
        self, clients: Iterable[str], administrators: Iterable[str], *, development: bool = False
    ) -> None:
        self._clients = tuple(key.encode() for key in clients)
        self._administrators = tuple(key.encode() for key in administrators)
        self._development = development

    def number(self, headers: Headers) -> int | None:
        """Which of all keys, those of clients first, a request has; None without a known one."""
        found = self._compared(headers, (*self._clients, *self._administrators))
        return found.index(True) if True in found else None

    def holder(self, headers: Headers) -> Access:
        """What the key of a request makes of its sender; OPEN without a known one."""
        is_client = any(self._compared(headers, self._clients))
        is_administrator = any(self._compared(headers, self._administrators))
        if is_administrator or (is_client and not self._administrators):
            return Access.ADMINISTRATOR
        return Access.CLIENT if is_client else Access.OPEN

    def _compared(self, headers: Headers, keys: Iterable[bytes]) -> list[bool]:
        """All keys are compared, each in constant time, so that time says nothing of them."""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        key = given.strip().encode("latin-1") if scheme.lower() == "bearer" else b""
        return [hmac.compare_digest(key, each) for each in keys]

    def refusal(self, access: Access, holder: Access) -> ApiError | None:
        """Why ``holder`` may not use a route of ``access``; None if it may."""
        if access is Access.OPEN or holder is Access.ADMINISTRATOR:
            return None
        if access is Access.CLIENT:
            return None if holder is Access.CLIENT or not self._clients else _unknown()
        if self._clients or self._administrators:
            if holder is Access.CLIENT:
                return ApiError(403, "this needs an administrator's key, not a client's")
            return _unknown()
        if self._development:
            return None
        said = "this needs a key; start the server with --api-key, or with --admin-api-key"
        return ApiError(403, said)


def _unknown() -> ApiError:
    return ApiError(401, "give one of the server's keys, as Authorization: Bearer KEY")
