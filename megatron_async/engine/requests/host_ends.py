"""Ends that only the host knows, found between taking tokens and committing them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Watcher(Protocol):
    """Sees the tokens of one request in order, each once, and says when it is over. It must not
    raise: no other request may suffer."""

    def take(self, token: int, /) -> bool:
        """True: this token is the last."""


class HostEnds:
    """The watchers of requests that have any; most have none.

    Attributes:
        watchers: by scheduler key.
    """

    def __init__(self) -> None:
        self.watchers: dict[int, list[Watcher]] = {}

    def watch(self, key: int, watcher: Watcher) -> None:
        """Ask ``watcher`` too about each token of a request. From any thread, before its first."""
        self.watchers.setdefault(key, []).append(watcher)

    def watches(self, key: int) -> bool:
        """The request has a watcher, so :meth:`keep` must be asked about its tokens."""
        return key in self.watchers

    def keep(self, key: int, tokens: Sequence[int]) -> int | None:
        """Show the watchers tokens that will be committed, before they are.

        Args:
            tokens: what a row brought, not beyond the request's length. A token that ends the
                request by its id may be among them or left out.

        Returns:
            None when the request takes all of them and goes on; k when it ends with the k-th, and
            what is behind it is to be discarded.
        """
        watchers = self.watchers.get(key, ())
        if len(watchers) == 1:
            take = watchers[0].take
            for count, token in enumerate(tokens, 1):
                if take(token):
                    return count
            return None
        for count, token in enumerate(tokens, 1):
            # A list: one that says it is over does not hide the token from the others.
            if any([watcher.take(token) for watcher in watchers]):
                return count
        return None

    def forget(self, key: int) -> None:
        """The request is gone."""
        self.watchers.pop(key, None)
