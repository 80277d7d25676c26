"""`jax-q4k serve`: serves a model over HTTP, with OpenAI's API."""

from __future__ import annotations

import argparse
import functools
import json
import logging
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from jax_q4k import models

from ..arguments import add_model
from ..options import NamedAdapter, add_running, implementation_of
from ..output import UsageError, load_model, loaded_draft, print_error
from ..prompts import MAX_FILE, read_text

if TYPE_CHECKING:
    from ...engine.encoder_engine import EncoderEngine
    from ...engine.engine import Engine
    from ...server.settings import Settings

#: Conversation that a chat template must be able to render.
_HELLO = [{"role": "user", "content": "Hello"}]

DESCRIPTION = """\
Serve a model over HTTP, with OpenAI's API: /v1/chat/completions, /v1/completions, /v1/models;
an encoder or reranker with /v1/embeddings and /v1/rerank.
Ctrl-C or SIGTERM ends it when the running requests are answered, a second one at once.
Exit codes: 0 ended, 1 the engine failed, 2 wrong options or a taken port, 130 second signal."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=_serve, runs_programs=True)
    add_model(parser)
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address; default: 127.0.0.1")
    group.add_argument("--port", type=_port, default=8080, help="default: 8080; 0 takes a free one")
    group.add_argument("--name", metavar="NAME", help="the model's id; default: the file's name")
    group.add_argument(
        "--any-model", action="store_true", help="serve requests that name another model, too"
    )
    group.add_argument("--api-key", action="append", metavar="KEY", help="key that requests need")
    group.add_argument("--api-key-file", metavar="FILE", help="file with a key in each line")
    group.add_argument(
        "--open", action="store_true", help="serve other machines without a key, too"
    )
    group.add_argument(
        "--allowed-host", action="append", metavar="NAME", help="further name in Host headers"
    )
    group.add_argument(
        "--cors-origin", action="append", metavar="ORIGIN", help="whose web pages may read answers"
    )
    group.add_argument(
        "--queue", type=int, default=64, metavar="N", help="requests that may wait; default: 64"
    )
    group.add_argument(
        "--timeout", type=float, default=600, metavar="S", help="of a request; default: 600"
    )
    group.add_argument(
        "--drain", type=_seconds, default=30, metavar="S", help="time for answers at the end; 30"
    )
    group.add_argument("--no-page", action="store_true", help="serve no chat page at /")
    group.add_argument("--log", choices=("text", "json"), default="text", help="form of the log")
    chat = parser.add_argument_group("chat")
    chat.add_argument(
        "--chat-template-file", metavar="FILE", help="Jinja template instead of the model's"
    )
    chat.add_argument(
        "--chat-template-kwargs",
        type=_object,
        default={},
        metavar="JSON",
        help="variables of the chat template, which requests may override",
    )
    engine = parser.add_argument_group("engine")
    engine.add_argument("--rows", type=int, default=16, metavar="N", help="run at a time; 16")
    engine.add_argument("--pages", type=int, metavar="N", help="pages of 16 tokens")
    engine.add_argument("--context", type=int, metavar="N", help="most tokens of a request")
    engine.add_argument(
        "--deterministic", action="store_true", help="equal bits whatever else runs; slower"
    )
    adapters = parser.add_argument_group("adapters")
    adapters.add_argument(
        "--max-adapters",
        type=int,
        metavar="N",
        help="LoRA adapters that are loaded at a time; default: the number of --lora NAME=FILE",
    )
    adapters.add_argument(
        "--max-adapter-rank",
        type=int,
        metavar="R",
        help="largest rank of an adapter; default: the largest of --lora NAME=FILE, else 16",
    )
    adapters.add_argument(
        "--lora-folder",
        metavar="FOLDER",
        help="let clients load and unload adapters in FOLDER, by /v1/load_lora_adapter",
    )
    add_running(parser.add_argument_group("running"), names_adapters=True)


def _serve(options: argparse.Namespace, notes: Console) -> int:
    try:
        from ...server.application import app
        from ...server.run import Server, described, listen
    except ModuleNotFoundError as error:
        raise UsageError(error) from None

    settings = settings_of(options)
    template = read_template(options.chat_template_file)
    every = options.lora or []
    named = [one for one in every if isinstance(one, NamedAdapter)]
    of_all = [one for one in every if not isinstance(one, NamedAdapter)]
    places = len(named) if options.max_adapters is None else options.max_adapters
    check_adapters(named, places, settings)
    log_to(sys.stderr, options.log)
    listening = listen(options.host, options.port)
    port = listening.getsockname()[1]

    def load() -> Engine | EncoderEngine:
        model = load_model(options.model, notes, options.devices, of_all or None)
        model.program_cache = options.programs
        if model.config.kind.bidirectional:
            check_encoder(options)
            with implementation_of(options):
                return models.EncoderEngine(model, max_context=options.context)
        if template is not None:
            if model.tokenizer is None:
                raise UsageError("the model has no tokenizer, so it cannot have a chat template")
            model.tokenizer = model.tokenizer.with_chat_template(template)
            models.chat.render(model.tokenizer, _HELLO, **options.chat_template_kwargs)
        adapters = [models.read_lora(one.path, model.config) for one in named]
        rank = options.max_adapter_rank
        if rank is None:
            rank = max((one.rank for one in adapters), default=16)
        with implementation_of(options):
            engine = models.Engine(
                model,
                max_rows=options.rows,
                pages=options.pages,
                max_context=options.context,
                deterministic=options.deterministic,
                constraints=True,
                draft=loaded_draft(options, notes),
                cache_dtype=options.cache_dtype,
                max_adapters=places,
                max_adapter_rank=rank,
            )
        for one, adapter in zip(named, adapters, strict=True):
            engine.load_adapter(one.name, adapter, scale=one.scale)
        return engine

    def say(engine: Engine | EncoderEngine) -> None:
        for line in described(engine, settings.name, options.host, port):
            notes.print(escape(line), soft_wrap=True)

    fail = functools.partial(print_error, notes)
    server = Server(app(None, settings), load, drain=options.drain, on_ready=say, on_failure=fail)
    return server.serve_until_end(listening)


def check_adapters(named: list[NamedAdapter], places: int, settings: Settings) -> None:
    """Raises UsageError for adapters that cannot be served."""
    names = [one.name for one in named]
    if len(set(names)) < len(names):
        raise UsageError(f"--lora names an adapter twice: {', '.join(names)}")
    if settings.name in names:
        raise UsageError(f"--lora {settings.name}=: this is the name of the model")
    if len(names) > places:
        raise UsageError(f"--max-adapters {places} is less than the {len(names)} of --lora")
    if settings.lora_folder is not None and not places:
        raise UsageError("--lora-folder needs --max-adapters")
    if settings.lora_folder is not None and not Path(settings.lora_folder).is_dir():
        raise UsageError(f"--lora-folder {settings.lora_folder} is not a folder")


def check_encoder(options: argparse.Namespace) -> None:
    """Raises UsageError for options that an encoder does not have."""
    given = {
        "--chat-template-file": options.chat_template_file,
        "--deterministic": options.deterministic,
        "--lora": options.lora,
        "--max-adapters": options.max_adapters,
        "--pages": options.pages,
    }
    if names := [name for name, value in given.items() if value]:
        raise UsageError(f"{names[0]} is for decoders, but the model is an encoder")


def read_template(file: str | None) -> str | None:
    """Returns a template's text; raises UsageError if it is no text, or too long."""
    return None if file is None else read_text(file, MAX_FILE)


def _port(text: str) -> int:
    """Parses a number of --port."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} must be 0 to 65535")
    return int(text)


def _seconds(text: str) -> float:
    """Parses seconds of --drain."""
    if not 0 <= (value := float(text)) <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} must be 0 to 86400")
    return value


def _object(text: str) -> dict[str, Any]:
    """Parses a JSON object of --chat-template-kwargs."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} must be a JSON object")
    return found


def settings_of(options: argparse.Namespace) -> Settings:
    """Returns the server's settings; raises UsageError for options that do not fit."""
    from ...server.settings import LOCAL_HOSTS, Settings

    keys = tuple(options.api_key or ())
    if options.api_key_file is not None:
        lines = read_text(options.api_key_file, MAX_FILE).split("\n")
        keys += tuple(line.strip() for line in lines if line.strip())
        if not keys:
            raise UsageError(f"{options.api_key_file} has no key")
    try:
        settings = Settings(
            name=options.name or name_of(options.model),
            api_keys=keys,
            allowed_hosts=(*LOCAL_HOSTS, *(options.allowed_host or ())),
            cors_origins=tuple(options.cors_origin or ()),
            queue=options.queue,
            any_model=options.any_model,
            template_variables=options.chat_template_kwargs,
            seconds=options.timeout,
            page=not options.no_page,
            lora_folder=options.lora_folder,
        )
        return settings.serving_at(options.host, open=options.open)
    except ValueError as error:
        raise UsageError(error) from None


def name_of(model: str) -> str:
    """Returns the id of a model that a command line names."""
    path = Path(model)
    return path.stem if path.suffix == ".gguf" else path.name or model


class _JsonLines(logging.Formatter):
    """Formats a record as a line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        known = {name: getattr(record, name) for name in ("request_id",) if hasattr(record, name)}
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created))
        line = {"time": when, "level": record.levelname.lower(), **known}
        line["message"] = record.getMessage()
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_to(stream: Any, form: str) -> None:
    """Writes the server's log to a stream, as text or as lines of JSON."""
    handler = logging.StreamHandler(stream)
    columns = "%(asctime)s %(request_id)s %(message)s"
    text = logging.Formatter(columns, "%H:%M:%S", defaults={"request_id": "-"})
    handler.setFormatter(_JsonLines() if form == "json" else text)
    logger = logging.getLogger("jax_q4k.server")
    logger.handlers[:], logger.propagate = [handler], False
    logger.setLevel(logging.INFO)
