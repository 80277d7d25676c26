"""Runs an engine's programs on its device state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np

from ..runner.engine_state import EngineState
from ..runner.engine_steps import BeginPieces, ForwardRows, PrefillPieces, SampleRows
from ..runner.model import Model
from ..runner.program_cache import CachedPrograms
from ..runner.programs import Program
from ..runner.prompt_programs import PromptProgram

#: Arguments of programs on the host; scalars are of type `np.int32`.
Array = np.ndarray | np.int32


class Peers(Protocol):
    """Other processes that hold a part of the state, and must repeat what is done to it."""

    def send_call(self, program: Program, arrays: tuple[Array | None, ...]) -> None:
        """Makes them run a program, as `Executor.run` does."""

    def send_drop(self) -> None:
        """Makes them drop the state, as `Executor.drop` does."""


class Executor:
    """Device state of an engine, and the compiled programs that change it.

    Programs are called with NumPy arrays, so that other processes can repeat the calls.

    Attributes:
      programs: the compiled programs.
      state: the arrays on the device; None means that the next call creates empty ones.
      peers: processes that repeat all calls; None means that there are none.
    """

    def __init__(
        self, model: Model, programs: CachedPrograms, create: Callable[[], EngineState]
    ) -> None:
        """Prepares calls of programs. create: returns a state without sequences."""
        self.programs = programs
        self.state: EngineState | None = None
        self.peers: Peers | None = None
        self._model, self._create = model, create
        self._logits: jax.Array | None = None  # of ForwardRows, for SampleRows
        self._vectors: jax.Array | None = None  # of PrefillPieces, for programs of prompts
        self._ready: dict[Program, Any] = {}
        self._open_masks: dict[tuple[int, int], jax.Array] = {}  # all tokens are allowed

    def run(self, program: Program, *arrays: Array | None) -> Any:
        """Runs a program on the state, without waiting for it.

        arrays: its arguments besides weights, state, logits and hidden states. A mask of tokens,
        the last one, may be None: all tokens are allowed.

        Returns what the program returns besides the state, or None. A PromptProgram takes the
        hidden states of the pieces that ran last.
        """
        if self.peers is not None:
            self.peers.send_call(program, arrays)
        with self.programs.context():
            arguments = self._arguments(program, arrays, self._logits)
            run = self._compiled(program, arguments)
            if program.takes_weights:
                arguments = program.part_of(self.programs.weights), *arguments
            found = run(*arguments)
            if isinstance(program, PromptProgram):
                return found
            if isinstance(found, EngineState):
                self.state = found
                return None
            self.state, result = found
        if isinstance(program, PrefillPieces):
            self._vectors = result.vectors
        if isinstance(program, ForwardRows):
            self._logits = result
        elif isinstance(program, SampleRows):
            self._logits = None
        return result

    def compile(self, program: Program, *arrays: Array | None) -> None:
        """Compiles a program that is to be run with such arrays; needs a state.

        May be called from several threads.
        """
        with self.programs.context():
            logits = None
            if isinstance(program, SampleRows):
                shape = program.rows, self._model.config.vocab_size
                logits = self._model.put(np.zeros(shape, np.float32))
            self._compiled(program, self._arguments(program, arrays, logits))

    def with_state(self) -> EngineState:
        """Returns the state; creates it if there is none."""
        if self.state is None:
            self.state = self._create()
        return self.state

    def drop(self) -> None:
        """Drops the state."""
        if self.peers is not None and self.state is not None:
            self.peers.send_drop()
        self.state = self._logits = self._vectors = None

    def resize(self, create: Callable[[], EngineState]) -> None:
        """Continues with another kind of state, which needs other programs.

        create: returns a state without sequences.
        """
        self._create = create
        self._ready.clear()

    def _arguments(
        self, program: Program, arrays: tuple[Any, ...], logits: jax.Array | None
    ) -> tuple[Any, ...]:
        """Returns all arguments behind the weights."""
        if isinstance(program, PrefillPieces | SampleRows):
            *others, mask = arrays
            arrays = *others, self._mask(program, mask)
        if isinstance(program, SampleRows):
            return self.with_state(), logits, *arrays
        if isinstance(program, PromptProgram):
            return self._vectors, *arrays
        return arrays if isinstance(program, BeginPieces) else (self.with_state(), *arrays)

    def _mask(self, program: PrefillPieces | SampleRows, mask: Array | None) -> Any:
        """Returns the argument for a mask; on several devices its type must not change."""
        if mask is not None:
            return mask if self._model.placement is None else self._model.put(mask)
        shape = program.rows, program.mask_columns
        if shape not in self._open_masks:
            self._open_masks[shape] = self._model.put(np.full(shape, -1, np.int32))
        return self._open_masks[shape]

    def _compiled(self, program: Program, arguments: tuple[Any, ...]) -> Any:
        if program not in self._ready:
            self._ready[program] = self.programs.ready(program, *arguments)
        return self._ready[program]
