"""Messages between the processes of an engine, and engines over two processes without a server."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest
from support.helpers import free_port
from support.paths import ROOT

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models.engine import processes
from jax_q4k.models.engine.processes import Beat, Call, Codec, Drop, End, broadcast
from jax_q4k.models.engine.stages import standard_stages
from jax_q4k.models.runner.engine_state import Sizes
from jax_q4k.models.runner.engine_steps import CopyStates, DecodeRows, FillHistory, PrefillPieces

from ..golden_files import model, path

SIZES = Sizes(4, (None, 32), (8, 4), 8, 2, 128, penalizes=True, history=True)


def codec() -> Codec:
    """Returns one of a process; each has its own."""
    common = {"network": model("llama-gqa").network, "draft": None, "sizes": SIZES, "skips": True}
    return Codec(common | {"deterministic": False, "adapters": 0})


def test_calls_arrive_as_they_are_sent() -> None:
    """Programs are equal, with the receiver's own network; arrays have their shapes and values."""
    draw = np.random.default_rng(0)
    network, stages = model("llama-gqa").network, standard_stages((1, 2))
    fields: Any = {"sizes": SIZES, "skips": True, "stages": stages}
    prefill = PrefillPieces(network, rows=2, time=16, fresh=True, **fields)
    decode = DecodeRows(network, rows=4, **fields)
    step = draw.integers(-(2**31), 2**31, (4, 700)).astype(np.int32)
    calls = [
        Call(prefill, (np.int32(2), step[:2], None)),
        Call(decode, (np.int32(0), np.zeros_like(step))),
        Call(CopyStates(network, saves=True), (step[0, :8], step[1, :8])),
        Call(prefill, (np.int32(1), step[2:], step[:2, :9])),
        Call(FillHistory(network), (np.int32(-3), step[3], np.int32(5), np.int32(0))),
        Call(decode, (np.int32(2), step)),
    ]
    sender, receiver = codec(), codec()
    for call in calls:
        got = receiver.decoded(sender.encoded(call))
        assert isinstance(got, Call) and got.program == call.program
        assert got.program.network is network
        for a, b in zip(got.arrays, call.arrays, strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                assert a.shape == b.shape and a.dtype == np.int32 and (a == b).all()
    for message in (Drop(), Beat(), End(""), End("no más")):
        assert receiver.decoded(sender.encoded(message)) == message


def test_messages_are_short() -> None:
    """A step of 16 rows fits into the first broadcast."""
    program = DecodeRows(
        model("llama-gqa").network, sizes=SIZES, rows=16, skips=True, stages=standard_stages(())
    )
    step = np.zeros((16, sum(program.columns)), np.int32)
    step[:, :40] = np.random.default_rng(0).integers(0, 10000, (16, 40))
    message = codec().encoded(Call(program, (np.int32(0), step)))
    assert step.nbytes > 40000 and len(message) < 4 * (processes.WORDS - 1)


@pytest.mark.parametrize("size", [0, 1, 8187, 8188, 8189, 100_003])
def test_messages_of_any_length(size: int) -> None:
    """The last ones need a second broadcast; a single process gets what it sends."""
    message = np.random.default_rng(0).bytes(size)
    assert broadcast(message) == message


def test_a_process_without_devices_of_the_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = jax.make_mesh((2,), ("tp",), devices=jax.devices()[:2])
    several = models.load(path("llama-gqa"), mesh=mesh)
    processes.check_processes(several)
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    with pytest.raises(ValueError, match="no device of process 1; .* all 3 processes"):
        processes.check_processes(several)


#: Runs in each of two processes: what is refused, idle time, an error of process 0.
CODE = """
import sys, time
import jax
jax.distributed.initialize(sys.argv[2], 2, int(sys.argv[3]))
import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models.engine import engine as of_engine, memory
from jax_q4k.models.engine.scheduler import Scheduler

leads = jax.process_index() == 0
model = models.load(sys.argv[1], mesh=jax.make_mesh((2,), ("tp",)))
options = {"max_rows": 2, "max_context": 64, "pages": 8, "warm_up": False}
memory.free_bytes_of = lambda _: 2**40 if leads else 2**36 + 5
print("free:", memory.free_bytes(model))
try:
    models.Engine(model, **options | {"max_rows": 2 + jax.process_index()})
except ValueError as error:
    print("refused:", error)
of_engine.HEARTBEAT = 0.3
with jq.implementation(activations="f32"), models.Engine(model, **options) as engine:
    assert engine.leads == leads
    if leads:
        time.sleep(1)
        tokens = engine.generate([1, 5, 9], max_new_tokens=8, ignore_end=True).tokens
        print("tokens:", *tokens)
    try:
        engine.submit([1], max_new_tokens=4, processors=[lambda logits, history: logits])
    except (ValueError, RuntimeError) as error:
        print("refused:", error)
assert not engine.is_open and engine.failure is None
with jq.implementation(activations="f32"):
    drafting = models.Engine(model, draft="lookup", **options)
with drafting as engine:
    if leads:
        biases = {7: 100.0}
        output = engine.generate([1, 5, 9], max_new_tokens=48, ignore_end=True, logit_bias=biases)
        print("drafted:", output.timings.accepted_tokens > 0, *output.tokens)
engine = models.Engine(model, **options)
if leads:
    Scheduler.plan = lambda *_: 1 / 0
    time.sleep(1)
try:
    if leads:
        engine.generate([1, 5], max_new_tokens=2)
    engine.close()
except models.EngineClosedError as error:
    print("failed:", error)
"""


@pytest.mark.slow("starts two processes")
def test_engines_of_two_processes() -> None:
    address = f"127.0.0.1:{free_port()}"
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-c", CODE, str(path("llama-gqa")), address]
    started = [
        subprocess.Popen(
            [*command, str(i)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for i in range(2)
    ]
    try:
        printed = [process.communicate(timeout=120)[0].decode() for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    with jq.implementation(activations="f32"):
        options: dict[str, Any] = {"max_new_tokens": 8, "ignore_end": True}
        want = models.generate(model("llama-gqa"), [1, 5, 9], **options).tokens
        options |= {"max_new_tokens": 48, "logit_bias": {7: 100.0}}
        longer = models.generate(model("llama-gqa"), [1, 5, 9], **options).tokens
    other = "process 1 makes its engine of another model, or with other arguments, than process 0"
    lines = [[line for line in text.splitlines() if ": " in line] for text in printed]
    assert [process.returncode for process in started] == [0, 0], printed
    assert lines[0][-6:] == [
        f"free: {2**36 + 5}",
        f"refused: {other}",
        f"tokens: {' '.join(map(str, want))}",
        "refused: processors cannot run in an engine over several processes",
        f"drafted: True {' '.join(map(str, longer))}",
        "failed: the engine has failed: division by zero",
    ]
    assert lines[1][-4:] == [
        f"free: {2**36 + 5}",
        f"refused: {other}",
        "refused: this is process 1; process 0 takes the requests",
        "failed: the engine has failed: process 0: ZeroDivisionError('division by zero')",
    ]
