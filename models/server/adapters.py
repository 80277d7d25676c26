"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as in vLLM."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from ..files.lora.adapters import files_of, read_lora
from . import bodies
from .answers import failures
from .errors import ApiError
from .service import Service


class LoadAdapter(msgspec.Struct, kw_only=True):
    """Body of /v1/load_lora_adapter.

    Attributes:
      lora_name: the `model` of requests that use it.
      lora_path: file or folder inside the server's folder, absolute or relative to it.
    """

    lora_name: str
    lora_path: str


class UnloadAdapter(msgspec.Struct, kw_only=True):
    """Body of /v1/unload_lora_adapter."""

    lora_name: str


async def load(request: Request) -> Response:
    """Loads an adapter from the server's folder."""
    service: Service = request.app.state.service
    folder, engine = _folder(service), service.generator()
    body, ignored = await bodies.read(request, LoadAdapter, service.settings)
    if body.lora_name == service.settings.name:
        raise ApiError(400, "lora_name is the name of the model", param="lora_name")

    def read_and_load() -> None:
        adapter = read_lora(_inside(folder, body.lora_path), engine.model.config)
        engine.load_adapter(body.lora_name, adapter)

    async with service.loading:
        try:
            with failures():
                await asyncio.to_thread(read_and_load)
        except (ValueError, OSError, RuntimeError) as error:
            raise ApiError(400, f"the adapter cannot be loaded: {error}") from None
    return _done(f"Success: LoRA adapter '{body.lora_name}' added successfully.", ignored)


async def unload(request: Request) -> Response:
    """Makes an adapter's name unknown; running requests keep it."""
    service: Service = request.app.state.service
    _folder(service)
    engine = service.generator()
    body, ignored = await bodies.read(request, UnloadAdapter, service.settings)
    try:
        with failures():
            engine.unload_adapter(body.lora_name)
    except ValueError as error:
        code = "adapter_not_found"
        raise ApiError(404, str(error), param="lora_name", code=code) from None
    return _done(f"Success: LoRA adapter '{body.lora_name}' removed successfully.", ignored)


def _folder(service: Service) -> Path:
    """Returns the folder of adapters; raises ApiError if there is none."""
    folder = service.settings.lora_folder
    if folder is None:
        raise ApiError(403, "adapters cannot be loaded: the server runs without --lora-folder")
    return Path(folder)


def _inside(folder: Path, name: str) -> Path:
    """Returns a path inside the folder; raises ValueError if it or a file beside it leads out.

    Links are followed first. RuntimeError: links that never end.
    """
    root, path = folder.resolve(), folder / name
    for file in files_of(path):
        if not file.resolve().is_relative_to(root):
            raise ValueError(f"lora_path={name!r:.200} is outside of the server's folder")
    return path.resolve()


def _done(message: str, ignored: list[str]) -> Response:
    return PlainTextResponse(message, headers=bodies.listed(ignored))
