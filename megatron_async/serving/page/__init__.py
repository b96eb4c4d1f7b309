"""The page at ``/``: a live view of the engine, and a box to chat."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from starlette.responses import Response

_HTML = (Path(__file__).parent / "page.html").read_bytes()


def content_security_policy(html: bytes) -> str:
    """Nothing runs but the scripts and styles inside ``html``, nothing is loaded from elsewhere,
    and no script can make text into HTML."""

    def hashes(tag: str) -> str:
        inside = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), html, re.DOTALL)
        digests = (base64.b64encode(hashlib.sha256(each).digest()).decode() for each in inside)
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    return "; ".join(
        (
            "default-src 'none'",
            f"style-src {hashes('style')}",
            f"script-src {hashes('script')}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )


_HEADERS = {
    "Content-Security-Policy": content_security_policy(_HTML),
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def page_response() -> Response:
    """The page, which holds nothing that a key would be needed for."""
    return Response(_HTML, headers=_HEADERS, media_type="text/html")
