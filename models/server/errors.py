"""Errors as OpenAI's API reports them."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

#: Status -> type of the error.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "unavailable_error",
}
#: Types that Anthropic's API calls otherwise.
_ANTHROPIC_TYPES = {413: "request_too_large", 500: "api_error", 503: "overloaded_error"}


class ApiError(Exception):
    """An error that a client gets as `{"error": {message, type, param, code}}`.

    Attributes:
      status: HTTP status.
      param: name of the parameter that is wrong.
      code: identifier of the error, for programs.
      headers: further headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": str(self),
                "type": _TYPES.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def anthropic_body(self) -> dict[str, Any]:
        """The error in Anthropic's form."""
        kind = _ANTHROPIC_TYPES.get(self.status, self.body["error"]["type"])
        return {"type": "error", "error": {"type": kind, "message": str(self)}}

    def response(self, scope: Any) -> Response:
        """Returns the error in the form of the API that the path of an ASGI scope belongs to."""
        is_anthropics = own_path(scope).startswith("/v1/messages")
        body = self.anthropic_body if is_anthropics else self.body
        return json_response(body, self.status, self.headers)


def own_path(scope: Any) -> str:
    """Returns a request's path without the prefix under which the application is mounted."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path.removeprefix(root) if path.startswith(f"{root}/") else path


def unavailable(message: str, seconds: int = 1) -> ApiError:
    """Returns an error of status 503, with the seconds after which to try again."""
    return ApiError(503, message, headers={"retry-after": str(seconds)})


def late(seconds: float | None) -> ApiError:
    """Returns the error of a request that has exceeded its time limit."""
    return ApiError(408, f"the request took longer than {seconds:g} s")


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Returns a response with `body` as JSON."""
    encoded = msgspec.json.encode(body)
    return Response(encoded, status, headers=headers, media_type="application/json")
