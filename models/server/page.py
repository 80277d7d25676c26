"""GET /: the chat page."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

_FILE = Path(__file__).with_name("page.html")


async def page(request: Request) -> Response:
    """Returns the chat page, or status 304 to a browser that has it."""
    body, headers = _body_and_headers()
    known = re.findall(r'"[^"]*"|\*', request.headers.get("if-none-match", ""))
    if headers["etag"] in known or "*" in known:
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type="text/html")


@functools.cache
def _body_and_headers() -> tuple[bytes, dict[str, str]]:
    """Reads the page; its headers allow its own script and style, and no others."""
    body = _FILE.read_bytes()
    policy = {
        "default-src": "'none'",
        "script-src": _source(body, b"script"),
        "style-src": _source(body, b"style"),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return body, {
        "content-security-policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
        "etag": f'"{hashlib.sha256(body).hexdigest()[:32]}"',
    }


def _source(body: bytes, tag: bytes) -> str:
    """Returns the policy's source of the page's only element with this tag: a hash of its text."""
    (text,) = re.findall(b"<%b>(.*?)</%b>" % (tag, tag), body, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"
