"""Defines Settings, the limits and names of a server."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

#: Names of this machine, which the Host header may have by default.
LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")

#: Arguments of rendering that are not variables of a chat template.
RESERVED = frozenset(
    ("source", "tokenizer", "messages", "tools", "now", "template", "limits")
    + ("continue_final_message",)
)


def is_local(host: str) -> bool:
    """Returns whether a server at this address is reached from this machine alone."""
    return host in ("127.0.0.1", "localhost", "::1")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Limits and names of a server.

    Attributes:
      name: the model's id in answers.
      api_keys: keys of which requests must have one, as `Authorization: Bearer KEY`; none means
        that no key is needed.
      allowed_hosts: values of the Host header, without port, that are served; "*" allows all. It
        protects a server on this machine from web pages whose names resolve to it.
      cors_origins: origins whose web pages may read answers; "*" allows all.
      queue: requests that may wait beyond those that run; further ones get status 429.
      requests: requests of all routes at a time, those included whose bodies are still coming;
        further ones get status 429.
      any_model: whether requests may name any model; else only `name`.
      seconds: time limit of a request; None means none.
      body_bytes, body_seconds: limits of a request's body, and of the time that it may take.
      depth: most nested arrays and objects in a body.
      ping_seconds: silence after which a stream sends a comment, so that no proxy closes it.
      event_seconds: least time between two events of a stream; tokens in between are merged.
      stalled_seconds: time after which a client that reads nothing is dropped.
      template_seconds: time limit of rendering a chat template.
      template_variables: variables of the chat template, which requests may override.
      page: whether GET / returns the chat page.
      lora_folder: folder whose LoRA adapters clients may load and unload; None means none.
    """

    name: str = "default"
    api_keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = LOCAL_HOSTS
    cors_origins: tuple[str, ...] = ()
    queue: int = 64
    requests: int = 256
    any_model: bool = False
    seconds: float | None = 600.0
    body_bytes: int = 8 << 20
    body_seconds: float = 30.0
    depth: int = 64
    ping_seconds: float = 15.0
    event_seconds: float = 0.02
    stalled_seconds: float = 60.0
    template_seconds: float = 2.0
    template_variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    page: bool = True
    lora_folder: str | None = None

    def __post_init__(self) -> None:
        """Raises TypeError for a text instead of several, ValueError for a number out of range."""
        for name in ("api_keys", "allowed_hosts", "cors_origins"):
            if isinstance(getattr(self, name), str):
                raise TypeError(f"{name} is a text; it must be a tuple of texts")
        if any(not key or not key.isascii() for key in self.api_keys):
            raise ValueError("a key must have ASCII characters, and at least one")
        for name in ("queue", "requests", "event_seconds"):
            if not 0 <= getattr(self, name) < math.inf:  # written so that NaN fails
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0, and finite")
        positive = "body_bytes", "body_seconds", "depth", "ping_seconds", "stalled_seconds"
        for name in (*positive, "template_seconds", *(() if self.seconds is None else ["seconds"])):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0, and finite")
        if reserved := RESERVED & self.template_variables.keys():
            raise ValueError(f"template_variables may not have {', '.join(sorted(reserved))}")

    def serving_at(self, host: str, *, open: bool = False) -> Settings:
        """Returns the settings of a server that listens at `host`.

        With keys, every Host header is allowed: a web page cannot know a key. Without keys
        (`open`), only `allowed_hosts` and `host` are. Raises ValueError if other machines reach the
        server, and it has neither keys nor `open`.
        """
        if is_local(host):
            return self
        if not self.api_keys and not open:
            problem = f"other machines reach {host}: it needs a key (api_keys), or open"
            raise ValueError(problem)
        hosts = ("*",) if self.api_keys else self.allowed_hosts
        name = f"[{host}]" if ":" in host else host  # as Host headers have it
        return dataclasses.replace(self, allowed_hosts=(*hosts, name))
