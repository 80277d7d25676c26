"""Reads request bodies: JSON within limits, converted to a type."""

from __future__ import annotations

import asyncio
import re
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from .errors import ApiError
from .settings import Settings

T = TypeVar("T", bound=msgspec.Struct)

#: Bytes of a body that takes more than some milliseconds to decode.
_LARGE = 1 << 18


async def read(request: Request, kind: type[T], settings: Settings) -> tuple[T, list[str]]:
    """Returns the body as `kind`, and the names in it that `kind` does not have.

    Raises:
      ApiError: the body is not JSON of this type, exceeds a limit, or comes too slowly.
      ClientDisconnect: the client left.
    """
    kind_of_body = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind_of_body != "application/json":
        raise ApiError(415, "the content type must be application/json")
    try:
        async with asyncio.timeout(settings.body_seconds):
            body = await _body(request, settings.body_bytes)
    except TimeoutError:
        raise ApiError(408, f"the body took longer than {settings.body_seconds:g} s") from None
    if len(body) > _LARGE:  # the event loop has others to serve
        return await asyncio.to_thread(decoded, body, kind, settings.depth)
    return decoded(body, kind, settings.depth)


def decoded(body: bytes, kind: type[T], depth: int) -> tuple[T, list[str]]:
    """Returns JSON as `kind`, and the names in it that `kind` does not have.

    depth: most nested arrays and objects. Raises ApiError.
    """
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ApiError(400, "the body must be a JSON object")
    if _is_deeper(found, depth):
        raise ApiError(400, f"the body has more than {depth} nested arrays and objects")
    try:
        converted = msgspec.convert(found, kind)
    except msgspec.ValidationError as error:
        place = re.search(r"`\$\.([^`.\[]+)", str(error))
        raise ApiError(400, str(error), param=place and place[1]) from None
    return converted, sorted(found.keys() - set(kind.__struct_encode_fields__))


def listed(ignored: list[str]) -> dict[str, str]:
    """Returns the header that lists names; its value may neither begin nor end with a space."""
    shown = [name if name and name == name.strip() else repr(name) for name in ignored]
    value = ", ".join(shown).encode("unicode_escape").decode()[:1000].strip()
    return {"jax-q4k-ignored": value} if ignored else {}


async def _body(request: Request, most: int) -> bytes:
    too_large = ApiError(413, f"the body is larger than {most} bytes")
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > most:
        raise too_large
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > most:
            raise too_large
    return bytes(body)


def _is_deeper(found: Any, depth: int) -> bool:
    """Returns whether JSON data has more than `depth` levels."""
    level = [found]
    for _ in range(depth):
        level = [
            inner
            for one in level
            for inner in (one.values() if isinstance(one, dict) else one)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True
