"""Defines Service, what the routes of one server share."""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..chat import ChatTemplateError
from ..chat.output import AnswerFormat
from ..engine.encoder_engine import EncoderEngine
from ..engine.engine import Engine
from ..sampling.file_defaults import USUAL, default_sampling
from ..tokenizer import Tokenizer
from .errors import ApiError, unavailable
from .metrics import Metrics
from .places import Places
from .settings import Settings

#: Conversations that are rendered and tokenized at a time; the templates' processes are fewer.
_RENDERING = 4
#: Constraints that are compiled at a time; a large one takes a second.
_COMPILING = 2

logger = logging.getLogger("jax_q4k.server")


class Service:
    """An engine and its settings.

    Attributes:
      engine: None while the model is loading.
      is_draining: whether new requests are refused, because the server ends.
      places: places of running and waiting requests.
      created: time of the start, in seconds since 1970.
      defaults: fields of `Sampling` that requests may override.
      format: form of the answers to the model's chat template.
      most_bytes: bytes of a text that may fit into the context.
      metrics: counts and times of requests.
      rendering: threads that render chat templates; slow ones hold up nothing else.
      compiling: threads that compile constraints.
      loading: held while a LoRA adapter is loaded.
      probe: generates a token for those that ask whether the engine does; None before the first.
    """

    def __init__(self, settings: Settings, engine: Engine | EncoderEngine | None = None) -> None:
        self.settings, self.created = settings, int(time.time())
        self.is_draining = False
        self.loading = asyncio.Lock()
        self.rendering = ThreadPoolExecutor(_RENDERING, "jax-q4k-template")
        self.compiling = ThreadPoolExecutor(_COMPILING, "jax-q4k-grammar")
        self.probe: asyncio.Future[None] | None = None
        self.engine: Engine | EncoderEngine | None = None
        self.places, self.metrics = Places(settings.queue), Metrics()
        self.defaults: dict[str, Any] = dict(USUAL)
        self.format, self.most_bytes = AnswerFormat(), 0
        if engine is not None:
            self.start(engine)

    def start(self, engine: Engine | EncoderEngine) -> None:
        """Begins to serve an engine."""
        self.places.count = self.settings.queue + engine.stats().max_rows
        try:
            self.defaults = default_sampling(engine.model.metadata) or dict(USUAL)
        except ValueError as error:
            logger.warning("The file's default sampling parameters are ignored: %s", error)
        if (tokenizer := engine.model.tokenizer) is not None:
            try:
                if isinstance(engine, Engine):
                    self.format = AnswerFormat.of(tokenizer)
            except ChatTemplateError as error:
                logger.warning("Tool calls and thoughts are not read: %s", error)
            self.most_bytes = engine.stats().max_context * tokenizer.longest_token
        self.metrics.watch(engine)
        self.engine = engine

    @property
    def problem(self) -> str | None:
        """Why no request can be served; None if they can."""
        if self.engine is None:
            return "Loading model"
        if self.is_draining:
            return "the server is shutting down"
        return None if self.engine.is_open else "the engine has failed"

    def ready(self) -> Engine | EncoderEngine:
        """Returns the engine; raises ApiError 503 if requests cannot be served."""
        if self.problem is not None:
            raise unavailable(self.problem)
        assert self.engine is not None
        return self.engine

    def generator(self) -> Engine:
        """Like `ready`, but raises ApiError 400 for an encoder, which generates no text."""
        engine = self.ready()
        if isinstance(engine, EncoderEngine):
            message = (
                "the model is an encoder: it serves /v1/embeddings and /v1/rerank, and no text"
            )
            raise ApiError(400, message)
        return engine

    def tokenizer(self) -> Tokenizer:
        """Returns the model's tokenizer; raises ApiError if it has none."""
        tokenizer = self.ready().model.tokenizer
        if tokenizer is None:
            raise ApiError(400, "the model has no tokenizer: send token ids")
        return tokenizer

    def check_model(self, name: str | None) -> None:
        """Raises ApiError 404 for the name of another model."""
        self.adapter_of(name)

    def adapter_of(self, name: str | None) -> str | None:
        """Returns the LoRA adapter that a request names as its model; None without one.

        Raises ApiError 404 for the name of another model.
        """
        if not name or name == self.settings.name:
            return None
        if name in self.adapters:
            return name
        if not self.settings.any_model:
            known = ", ".join([self.settings.name, *self.adapters])
            message = f"the model {name!r:.200} does not exist; available: {known}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return None

    def name_of(self, name: str | None) -> str:
        """Returns the id in answers to a request that names this model."""
        return name if name and name in self.adapters else self.settings.name

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the loaded LoRA adapters, without one that is called like the model."""
        loaded = () if self.engine is None else self.engine.adapters
        return tuple(name for name in loaded if name != self.settings.name)
