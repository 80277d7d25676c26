"""Kernels that run one by one on a device, compared with plain JAX."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_q4k as jq
from jax_q4k.gpu_checks.interpreter import evaluated
from jax_q4k.gpu_checks.kernels import compare_kernels
from ptx_kernels import tuning
from ptx_kernels.driver import DriverError, ModuleLoadError
from ptx_kernels.simulated_cuda import SimulatedDevice


@functools.cache
def operands() -> tuple[jax.Array, jq.QuantizedArray]:
    rng = np.random.default_rng(0)
    with jax.ensure_compile_time_eval():  # the first call may be inside a trace
        w = jq.quantize(rng.standard_normal((32, 256), np.float32), "Q8_0")
        return jnp.asarray(rng.standard_normal((1, 256), np.float32)), w


def program() -> jax.Array:
    """Two products, one inside `jit`, and a maximum."""
    x, w = operands()
    y = jax.jit(lambda x: jq.matmul(x, w, activations="q8_1"))(x)
    z = jq.matmul(x + 1, w, activations="f32")
    return jq.argmax(jax.nn.silu(y) + z)


def compared(device: SimulatedDevice) -> dict[str, list]:
    found: dict[str, list] = {}
    for one in compare_kernels(program, device, tuning.target("H200")):
        found.setdefault(one.operation, []).append(one)
    return found


def test_right_kernels():
    lines: list[str] = []
    found = compare_kernels(program, SimulatedDevice(), tuning.target("H200"), lines.append)
    assert [one.operation for one in found] == ["packed_matmul", "packed_matmul", "q4k_argmax"]
    assert all(one.right and one.error is None for one in found)
    assert lines[2] == "q4k_argmax: argmax"
    assert len({text for one in found for text in one.texts}) == 3


def test_equal_kernels_run_once():
    x, w = operands()
    twice = lambda: jq.matmul(jq.matmul(x, w)[:, :1] * x, w)  # noqa: E731
    assert len(compare_kernels(twice, SimulatedDevice(), tuning.target("H200"))) == 1


class Wrong(SimulatedDevice):
    """A device on which one kernel adds 0.01 to a result."""

    def run(self, kernel, *operands, graph=False):
        results = super().run(kernel, *operands, graph=graph)
        if "matvec" in kernel.name:
            results[0].flat[3] += 0.01 * np.abs(results[0]).max()
        return results


def test_a_wrong_kernel_does_not_affect_the_others():
    found = compared(Wrong())
    assert not any(one.right for one in found["packed_matmul"])
    assert all(1e-5 < one.nmse < 1e-3 for one in found["packed_matmul"])
    assert [one.right for one in found["q4k_argmax"]] == [True]


def test_results_that_are_not_numbers():
    found = compared(SimulatedDevice(executes=False))  # memory stays NaN
    assert not any(one.right for one in found["packed_matmul"])


def test_a_kernel_that_does_not_load():
    def refuse(text: str) -> str | None:
        return "ptxas: no such instruction" if "matvec" in text else None

    found = compared(SimulatedDevice(refuse=refuse))
    for one in found["packed_matmul"]:
        assert isinstance(one.error, ModuleLoadError) and not one.fatal and not one.right
        assert "no such instruction" in str(one.error)
    assert [one.right for one in found["q4k_argmax"]] == [True]


def test_nothing_runs_after_a_fault_of_the_device():
    """The device can be closed nevertheless, and memory outside its scopes is forgotten."""
    with SimulatedDevice(faulty=lambda name: "matvec" in name) as device:
        kept = device.empty(16)
        found = compare_kernels(program, device, tuning.target("H200"))
        with pytest.raises(DriverError, match="cuMemAlloc failed: CUDA_ERROR_ILLEGAL_ADDRESS"):
            device.empty(16)
    one = found[-1]
    assert one.fatal and not one.right and "matvec" in one.kernels[-1]
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in str(one.error)
    assert kept in device.cuda.memory  # nothing was freed: the driver refuses that


def test_a_fault_that_closing_finds_is_raised_once():
    device = SimulatedDevice(faulty=lambda name: True)
    device.cuda.fault = device.cuda.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(DriverError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        device.close()
    device.close()


def test_other_errors_leave_the_device_usable():
    with SimulatedDevice() as device:
        with pytest.raises(DriverError, match="OUT_OF_MEMORY"):
            device.empty(2 << 30)
        device.empty(16)
    assert not device.cuda.memory


def test_kernels_are_those_of_the_device():
    texts = []
    for name in ("H200", "Tesla T4"):
        found = compare_kernels(program, SimulatedDevice(), tuning.target(name))
        calls = jq.explain(program, platform="cuda", device=name).calls
        texts.append([one.texts for one in found])
        assert texts[-1] == [tuple(kernel.text for kernel in call.kernels) for call in calls]
    assert texts[0] != texts[1]


def test_decoded_products_are_compared_with_unrounded_activations():
    _, w = operands()
    x = jnp.asarray(np.random.default_rng(1).standard_normal((72, 256), np.float32))
    (one,) = compare_kernels(lambda: jq.matmul(x, w), SimulatedDevice(), tuning.target("Tesla T4"))
    assert one.kernels == ("f16_rows", "decode_q8_0") and one.right
    assert 1e-9 <= one.nmse <= 1e-6


def test_operations_inside_loops_are_an_error():
    x, w = operands()

    def loop():
        return jax.lax.fori_loop(0, 2, lambda _, x: x + jq.matmul(x, w).sum(), x)

    with pytest.raises(NotImplementedError, match="contains operations"):
        compare_kernels(loop, SimulatedDevice(), tuning.target("H200"))


def test_programs_without_rules_are_evaluated_as_jax_does():
    def function(x):
        y = jax.jit(lambda x: jax.nn.gelu(x) * 2)(x)
        values, indices = jax.lax.top_k(y, 2)
        return jax.lax.scan(lambda c, row: (c + row, c), jnp.zeros(2), values * indices)

    x = np.random.default_rng(0).standard_normal((3, 3), np.float32)
    got = evaluated(jax.make_jaxpr(function)(x), [x], {})
    for one, other in zip(got, jax.tree.leaves(function(x)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
