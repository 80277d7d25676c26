"""Selection of kernels by $JAX_Q4K_KERNELS."""

import ctypes
import re
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import pytest
from support.implementations import needs_native

import jax_q4k as jq
from jax_q4k import native
from jax_q4k.models import cli
from jax_q4k.native import build

X = jnp.zeros((2, 256))
WEIGHTS = jq.QuantizedArray("Q4_K", (8, 256), [jnp.zeros((8, 1, 144), jnp.uint8)])


def product(x):
    return jq.matmul(x, WEIGHTS)


@pytest.fixture
def environment(monkeypatch):
    """Returns a function that reloads the library with $JAX_Q4K_KERNELS; restores it afterwards."""
    before = native.kernels()

    def load(name):
        monkeypatch.setenv(native.VARIABLE, name)
        loaded = native._load.__wrapped__()
        monkeypatch.setattr(native, "_load", lambda: loaded)

    yield load
    monkeypatch.undo()
    if before:
        native.select(before)


@needs_native
@pytest.mark.parametrize("name", build.kernels())
def test_kernels_that_the_environment_names(environment, capsys, name):
    try:
        native.select(name)
    except ValueError as error:
        pytest.skip(str(error))
    native.select("portable")
    environment(name)
    assert native.kernels() == name and native.problem() == ""
    report = str(jq.explain(product, X))
    assert report.startswith(f"on cpu (kernels for {name}, set by $JAX_Q4K_KERNELS): ")
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert re.search(rf"\$JAX_Q4K_KERNELS +{name} *\n", out)
    assert re.search(rf" {name} +in use *\n", out)
    assert "not in use: $JAX_Q4K_KERNELS is" in out


@needs_native
def test_an_empty_name_in_the_environment_is_none(environment):
    native.select("portable")
    environment("")
    assert native.named() is None and native.problem() == "" and native.kernels() == "portable"


@needs_native
@pytest.mark.parametrize(
    "name, in_library, why",
    [
        ("sse9", "avx2 portable ", f"must be one of {', '.join(build.kernels())}"),
        ("portable", "avx2 ", "not in the library: its compiler does not support them"),
        ("portable", "avx2 portable ", "this processor does not support them"),
    ],
    ids=["unknown", "not compiled", "not run"],
)
def test_kernels_of_the_environment_that_cannot_be_used(
    environment, monkeypatch, capsys, name, in_library, why
):
    library = ctypes.CDLL(str(native.library_path()))
    library.jax_q4k_fingerprint.restype = ctypes.c_char_p
    monkeypatch.setattr(library, "jax_q4k_select", Mock(return_value=False))
    monkeypatch.setattr(library, "jax_q4k_compiled", Mock(return_value=in_library.encode()))
    with monkeypatch.context() as patched:
        patched.setattr(ctypes, "CDLL", lambda path: library)
        environment(name)
    message = f"$JAX_Q4K_KERNELS={name!r}: {why}"
    assert not native.available() and native.problem() == message
    for implementation in (None, "native"):
        with (
            jq.implementation(implementation),
            pytest.raises(jq.UnavailableError, match=re.escape(message)),
        ):
            jax.jit(product).lower(X)
    with jq.implementation("xla"):
        jax.jit(product).lower(X)
    report = jq.explain(product, X)
    (call,) = report.calls
    assert not call.runnable and call.why == f"the default on cpu, but {message}"
    assert str(report).startswith(f"on cpu ({message}): ")
    assert cli.main(["doctor"]) == 1
    out, err = capsys.readouterr()
    assert re.search(rf"\$JAX_Q4K_KERNELS +{name} *\n", out) and err == f"broken: {message}\n"
