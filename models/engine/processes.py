"""Makes all processes that share a model's devices run the same programs.

Process 0 sends each call of a program, with its arguments, before it makes the call itself; the
other processes wait for these messages. A message is broadcast by a computation on all devices, so
that it is ordered like the programs' own communication.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import time
import zlib
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from ..runner.engine_steps import (
    CopyStates,
    DecodeRows,
    FillHistory,
    ForwardRows,
    PrefillPieces,
    SampleRows,
)
from ..runner.model import Model
from ..runner.programs import Program
from ..runner.prompt_programs import PoolTokens, ReadTokens, ScoreTokens
from ..runner.speculative.drafts import Draft, DraftModel, NextTokens
from ..sampling.stages import SamplingStages
from ..support.buckets import bucket
from .executor import Array, Executor

#: Seconds without a call after which process 0 sends an empty message, so that no process waits
#: longer than communication may take, and a process that has ended is noticed.
HEARTBEAT = 5.0

#: Words of the first broadcast of a message; longer messages have a second one.
WORDS = 2048

_KINDS: dict[str, type[Program]] = {
    kind.__name__: kind
    for kind in (
        *(PrefillPieces, DecodeRows, ForwardRows, SampleRows, CopyStates, FillHistory),
        *(ScoreTokens, PoolTokens, ReadTokens),
    )
}


class Call(NamedTuple):
    """A call of a program, for `Executor.run`."""

    program: Program
    arrays: tuple[Array | None, ...]


class Drop(NamedTuple):
    """The state is lost, see `Executor.drop`."""


class Beat(NamedTuple):
    """Nothing has to be done."""


class End(NamedTuple):
    """Process 0 has closed its engine.

    Attributes:
      error: why it has failed; empty if it has not.
    """

    error: str


Message = Call | Drop | Beat | End


class Codec:
    """Writes messages as bytes, and reads them.

    A program is described in the first message that calls it, and numbered from then on.
    """

    def __init__(self, common: dict[str, Any]) -> None:
        """Prepares messages between engines of equal programs.

        common: fields of programs that never differ within an engine, such as the network.
        """
        self._common = common
        self._numbers: dict[Program, int] = {}
        self._programs: list[Program] = []

    def encoded(self, message: Message) -> bytes:
        """Returns the message as bytes; they must be decoded in the order of encoding."""
        head: dict[str, Any] = {"kind": type(message).__name__}
        data = b""
        if isinstance(message, End):
            head["error"] = message.error
        elif isinstance(message, Call):
            if message.program not in self._numbers:
                self._numbers[message.program] = len(self._numbers)
                head["program"] = self._described(message.program)
            head["number"] = self._numbers[message.program]
            arrays = [None if x is None else np.asarray(x) for x in message.arrays]
            assert all(x is None or x.dtype in (np.int32, np.float32) for x in arrays)
            head["arrays"] = [None if x is None else (x.dtype.str, x.shape) for x in arrays]
            data = b"".join(x.tobytes() for x in arrays if x is not None)
        # Most sampling parameters are zeros.
        return zlib.compress(json.dumps(head).encode() + b"\0" + data, 1)

    def decoded(self, message: bytes) -> Message:
        """Returns the message of bytes from `encoded`."""
        head, _, data = zlib.decompress(message).partition(b"\0")
        fields = json.loads(head)
        if fields["kind"] == "End":
            return End(fields["error"])
        if fields["kind"] != "Call":
            return Drop() if fields["kind"] == "Drop" else Beat()
        if "program" in fields:
            self._programs.append(self._program(*fields["program"]))
        at = 0
        arrays: list[Array | None] = []
        for described in fields["arrays"]:
            if described is None:
                arrays.append(None)
                continue
            dtype, shape = described
            array = np.frombuffer(data, dtype, math.prod(shape), at)
            arrays.append(array.reshape(shape))
            at += array.nbytes
        return Call(self._programs[fields["number"]], tuple(arrays))

    def _described(self, program: Program) -> tuple[str, dict[str, Any]]:
        names = [field.name for field in dataclasses.fields(program)]
        fields = {name: getattr(program, name) for name in names if name not in self._common}
        if "stages" in fields:
            fields["stages"] = fields["stages"]._asdict()
        return type(program).__name__, fields

    def _program(self, name: str, fields: dict[str, Any]) -> Program:
        kind = _KINDS[name]
        if "stages" in fields:
            fields["stages"] = SamplingStages(**fields["stages"] | {"processors": ()})
        names = {field.name for field in dataclasses.fields(kind)}
        common = {name: value for name, value in self._common.items() if name in names}
        return kind(**common, **fields)


class Leader:
    """Sends what process 0 does to the other processes.

    All methods must be called from one thread, that which runs the programs.

    Attributes:
      waiting_since: `time.monotonic()` when a message was sent that the others have not received
        yet; None without one.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self.waiting_since: float | None = None

    def send_call(self, program: Program, arrays: tuple[Array | None, ...]) -> None:
        """Makes the others run a program, as `Executor.run` does."""
        self._send(Call(program, arrays))

    def send_drop(self) -> None:
        """Makes the others drop the state, as `Executor.drop` does."""
        self._send(Drop())

    def send_beat(self) -> None:
        """Makes the others wait longer."""
        self._send(Beat())

    def send_end(self, error: str = "") -> None:
        """Ends the others' engines. error: why this one has failed."""
        self._send(End(error))

    def _send(self, message: Message) -> None:
        self.waiting_since = time.monotonic()
        broadcast(self._codec.encoded(message))
        self.waiting_since = None


def follow(executor: Executor, codec: Codec) -> str:
    """Does what process 0 does until its engine ends; returns why it has failed, if it has."""
    while True:
        message = codec.decoded(broadcast())
        if isinstance(message, Call):
            executor.run(message.program, *message.arrays)
        elif isinstance(message, Drop):
            executor.drop()
        elif isinstance(message, End):
            return message.error


def broadcast(message: bytes = b"") -> bytes:
    """Returns the message of process 0 in all processes, all of which must call this."""
    first = np.zeros(WORDS, np.int32)
    room = 4 * (WORDS - 1)
    first[0] = len(message)
    _fill(first[1:], message[:room])
    received = np.asarray(multihost_utils.broadcast_one_to_all(first))
    size = int(received[0])
    found = received[1:].tobytes()
    if size > room:
        rest = np.zeros(bucket(-(-(size - room) // 4)), np.int32)
        _fill(rest, message[room:])
        found += np.asarray(multihost_utils.broadcast_one_to_all(rest)).tobytes()
    return found[:size]


def _fill(words: np.ndarray, data: bytes) -> None:
    """Writes bytes to the beginning of an int32 array."""
    words.view(np.uint8)[: len(data)] = np.frombuffer(data, np.uint8)


def check_processes(model: Model) -> None:
    """Raises ValueError unless the model's mesh has devices of every process."""
    assert model.placement is not None
    found = {device.process_index for device in model.placement.mesh.devices.flat}
    if missing := set(range(jax.process_count())) - found:
        raise ValueError(
            f"the model's mesh has no device of process {min(missing)}; an engine needs devices of "
            f"all {jax.process_count()} processes"
        )


def described(draft: Draft | None) -> str:
    """Returns a text that determines a kind of drafts.

    Raises ValueError for one that cannot be used over several processes.
    """
    if isinstance(draft, NextTokens):
        raise ValueError("draft: a multi-token-prediction layer cannot run over several processes")
    if isinstance(draft, DraftModel):
        model: Any = draft.model
        if not model.spans_processes:
            raise ValueError("draft: the draft model must be on the mesh of the model")
        return f"{model.network.fingerprint()} {draft.tokens}"
    return repr(draft)


def check_agreement(about: str) -> None:
    """Raises ValueError in all processes unless they call this with the same text."""
    digest = np.frombuffer(hashlib.sha256(about.encode()).digest(), np.int32)
    found = multihost_utils.process_allgather(digest)
    different = [i for i, other in enumerate(found) if (other != found[0]).any()]
    if different:
        raise ValueError(
            f"process {different[0]} makes its engine of another model, or with other arguments, "
            "than process 0"
        )
