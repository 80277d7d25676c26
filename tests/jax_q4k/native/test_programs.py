"""Operations with the CPU kernels, the CPU's default, inside JAX's transformations and programs."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import oracles
from support.helpers import nmse
from support.implementations import needs_native

import jax_q4k as jq

pytestmark = [needs_native, pytest.mark.cpu_kernels]


def normal(*shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(shape).standard_normal(shape), dtype)


def packed(format, n, k):
    planes = oracles.random_planes(np.random.default_rng(0), format, n, k // 256)
    return jq.QuantizedArray(format, (n, k), tuple(map(jnp.asarray, planes)))


def lowered(function, *arrays):
    return jax.jit(function).lower(*arrays).as_text()


def test_operations_with_kernels_take_them_by_default():
    x, w, ids = normal(2, 256), packed("Q4_K", 8, 256), jnp.array([1, 2])
    q, pages, tables = normal(1, 2, 32), jnp.zeros((2, 2, 16, 32)), jnp.zeros((1, 2), jnp.int32)
    state, states, taps = (
        jnp.zeros((1, 2, 32, 32)),
        jnp.zeros((2, 1, 32, 32)),
        jnp.zeros((2, 4, 96)),
    )
    weights = {"conv_weight": normal(96, 4), "dt_bias": normal(1), "decay": -abs(normal(1))}
    step = functools.partial(jq.gated_delta_step, **weights, norm_weight=normal(32), eps=1e-6)
    for function, arrays, handler in (
        (jq.matmul, (x, w), "linear"),
        (jq.matmul, (x, w.dequantize(jnp.bfloat16)), "linear"),
        (lambda x, w: jq.mlp(x, w, w, w.dequantize()[:, :8]), (x, w), "linear"),
        (jq.embedding, (ids, w), "embedding"),
        (functools.partial(jq.top_k, k=3), (x,), "top_k"),
        (jq.argmax, (x,), "argmax"),
        (jq.paged_attention, (q, pages, pages, tables, tables[:, 0]), "paged_attention"),
        (jq.causal_attention, (q[None], q[None], q[None], ids[:1]), "causal_attention"),
        (jq.append_kv, (pages, pages, q, q, ids[:1]), "rope_append"),
        (jq.gated_delta_rule, (*[q[None]] * 3, *[q[None, :, :, 0]] * 2, state), "gated_delta_rule"),
        (step, (x[:, :96], x[:, :32], *[x[:, :1]] * 2, taps, states, ids), "gated_delta_step"),
    ):
        assert f"@jax_q4k_{handler}(" in lowered(function, *arrays)
        with jq.implementation("xla"):
            assert "@jax_q4k_" not in lowered(function, *arrays)


def test_elsewhere_they_are_not_taken():
    x, w = normal(2, 256), packed("Q4_K", 8, 256)
    text = jax.jit(jq.matmul).trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
    assert "jax_q4k_" not in text and "__gpu$xla.gpu.ptx" in text
    text = jax.jit(jq.matmul).trace(x, w).lower(lowering_platforms=("tpu",)).as_text()
    assert "jax_q4k_" not in text and "__gpu$xla.gpu.ptx" not in text


def test_pages_that_are_donated_are_updated_in_place():
    pages = [jnp.full((4, 2, 16, 32), value) for value in (1.0, 2.0)]
    before = [page.unsafe_buffer_pointer() for page in pages]
    new = normal(3, 2, 32)
    program = (
        jax.jit(jq.append_kv, donate_argnums=(0, 1))
        .lower(*pages, new, new, jnp.arange(3))
        .compile()
    )
    after = program(*pages, new, new, jnp.arange(3))
    assert [page.unsafe_buffer_pointer() for page in after] == before and pages[0].is_deleted()
    np.testing.assert_array_equal(after[0][0, :, :3], jnp.swapaxes(new, 0, 1))
    assert program.memory_analysis().temp_size_in_bytes < pages[0].nbytes


@pytest.mark.slow("compiles two derivatives of a layer")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gradients_of_a_layer_that_is_recomputed(dtype):
    gate, down, norm = packed("Q4_K", 256, 256), packed("Q6_K", 256, 256), jnp.ones(256)
    gate, down = (jq.quantize(np.asarray(w.dequantize()) / 64, w.format) for w in (gate, down))
    x = normal(3, 256, dtype=dtype)

    def loss(x, implementation=None):
        def layer(x, _):
            y = jq.implementation(implementation)(jq.mlp)(
                x,
                gate,
                gate,
                down,
                norm_weight=norm,
                eps=1e-5,
                residual=x,
            )
            return jnp.tanh(y), None

        return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, length=3)[0].astype(jnp.float32) ** 2)

    got, want = jax.jit(jax.grad(loss))(x), jax.grad(lambda x: loss(x, "xla"))(x)
    assert got.dtype == dtype and nmse(got, want) <= 1e-3  # int8 activations


def test_exported_programs():
    x, w = normal(2, 256), packed("Q4_K", 8, 256)
    program = jax.jit(lambda x, plane: jq.matmul(x, jq.QuantizedArray("Q4_K", (8, 256), (plane,))))
    with pytest.raises(ValueError, match="jax_q4k_linear"):
        jax.export.export(program)(x, *w.planes)
    exported = jax.export.export(
        program, platforms=("cpu", "cuda"), disabled_checks=jq.EXPORT_CHECKS
    )(x, *w.planes)
    np.testing.assert_array_equal(exported.call(x, *w.planes), jq.matmul(x, w))


def test_handlers_are_there_when_the_package_is_imported():
    """Handlers must be registered for programs that another process exported."""
    run("""
import jax, jax.numpy as jnp, numpy as np, jax_q4k
call = jax.ffi.ffi_call("jax_q4k_embedding", jax.ShapeDtypeStruct((1, 3), jnp.float32))
row = call(jnp.array([1]), jnp.arange(6.0).reshape(2, 3), format="F32")
np.testing.assert_array_equal(row, [[3, 4, 5]])
""")


@pytest.mark.slow("many or large calls")
def test_sharded_over_devices():
    """Each device multiplies its shard, with shard_map.

    XLA gathers the operands of a bare call first.
    """
    run("""
import jax, jax.numpy as jnp, numpy as np, jax_q4k as jq
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((4,), ("model",))
rng = np.random.default_rng(0)
w = jq.quantize(rng.standard_normal((64, 256), np.float32), "Q4_K")
x = rng.standard_normal((3, 256), np.float32)
for w in (w, w.dequantize(jnp.bfloat16)):
    want = jq.matmul(x, w)
    split = jax.device_put(w, NamedSharding(mesh, P("model")))
    specs = {"in_specs": (P(), P("model")), "out_specs": P(None, "model")}
    mapped = jax.jit(jax.shard_map(jq.matmul, mesh=mesh, **specs))
    np.testing.assert_allclose(mapped(x, split), want, rtol=1e-6, atol=1e-5)
    assert "all-gather" not in mapped.lower(x, split).compile().as_text()
    np.testing.assert_allclose(jax.jit(jq.matmul)(x, split), want, rtol=1e-6, atol=1e-5)
    rows = jax.device_put(jnp.tile(x, (4, 1)), NamedSharding(mesh, P("model")))
    got = jax.jit(jq.matmul)(rows, w)
    np.testing.assert_allclose(got, np.tile(want, (4, 1)), rtol=1e-6, atol=1e-5)
""", XLA_FLAGS="--xla_force_host_platform_device_count=4")  # fmt: skip


@pytest.mark.slow("starts a process for each number of threads")
def test_results_do_not_depend_on_the_number_of_threads():
    """The threads belong to XLA's pool; PJRT_NPROC sets its size."""
    digests = [
        run(
            """
import hashlib, pathlib, jax, jax.numpy as jnp, numpy as np, jax_q4k as jq
rng = np.random.default_rng(0)
normal = lambda *shape: rng.standard_normal(shape, np.float32)
blocks = rng.integers(0, 256, (600, 2, 144), np.uint8)
blocks[..., :4] = np.array([0.01, 0.02], np.float16).view(np.uint8)
w = jq.QuantizedArray("Q4_K", (600, 512), (blocks,))
digest = hashlib.sha256()
for x in (normal(1, 512), normal(70, 512)):
    float_weights = jnp.asarray(normal(600, 512))
    digest.update(np.asarray(jq.matmul(x, w)).tobytes())
    digest.update(np.asarray(jq.matmul(x, float_weights)).tobytes())
    digest.update(np.asarray(jq.matmul(x, w, activations="f32")).tobytes())
experts = jax.tree.map(lambda plane: plane.reshape(5, 120, *plane.shape[1:]), w)
down = jq.quantize(normal(5 * 512, 128)[:, :96], "Q8_0")
down = jax.tree.map(lambda plane: plane.reshape(5, 512, *plane.shape[1:]), down)
experts = experts[:, :96]
for m in (1, 70):
    ids, weights = jq.route(normal(m, 5), 2)
    for options in ({}, {"activations": "f32"}):
        y = jq.expert_mlp(normal(m, 512), experts, experts, down, ids, weights, **options)
        digest.update(np.asarray(y).tobytes())
pages, tables = [normal(80, 2, 16, 32) for _ in "kv"], np.arange(80, dtype=np.int32).reshape(1, 80)
attended = jq.paged_attention(normal(1, 4, 32), *pages, tables, np.array([1270], np.int32))
digest.update(np.asarray(attended).tobytes())
for time in (5, 70):
    attended = jq.paged_attention(normal(1, time, 4, 32), *pages, tables, np.array([1270]))
    digest.update(np.asarray(attended).tobytes())
q, k = normal(2, 90, 4, 32), normal(2, 90, 2, 32)
digest.update(np.asarray(jq.causal_attention(q, k, k, np.array([90, 41]))).tobytes())
for time in (1, 70):
    q, v, gate = normal(2, time, 2, 32) / 6, normal(2, time, 4, 48), abs(normal(2, time, 4))
    found = jq.gated_delta_rule(q, q[::-1], v, -gate, gate / 9, normal(2, 4, 32, 48))
    for y in found:
        digest.update(np.asarray(y).tobytes())
weights = {"conv_weight": normal(5120, 4), "dt_bias": normal(24), "decay": -abs(normal(24))}
token = normal(2, 5120), normal(2, 3072), normal(2, 24), normal(2, 24)
cache = normal(2, 4, 5120), normal(2, 24, 128, 128), np.array([9, 2])
for y in jq.gated_delta_step(*token, *cache, **weights, norm_weight=normal(128), eps=1e-6):
    digest.update(np.asarray(y).tobytes())
names = [path.read_text().strip() for path in pathlib.Path("/proc/self/task").glob("*/comm")]
print(names.count("tf_XLAEigen"), digest.hexdigest())
""",
            PJRT_NPROC=str(count),
            XLA_FLAGS="",  # without the tests' eight devices, whose pool is at least as large
        ).split()
        for count in (1, 2, 4, 8)
    ]
    threads, digests = zip(*digests, strict=True)
    assert threads == ("1", "2", "4", "8") and len(set(digests)) == 1


def run(program, **environment):
    """Returns the output of a program."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_results_do_not_depend_on_x64():
    x, w = np.asarray(normal(2, 256)), packed("Q4_K", 8, 256)
    want, rows = jq.matmul(x, w), jq.embedding(np.array([3, 9]), w)
    with jax.enable_x64(True):
        np.testing.assert_array_equal(jq.matmul(x, w), want)
        np.testing.assert_array_equal(jq.embedding(np.array([3, 2**40]), w), rows)


@pytest.mark.slow("waits for threads that share a core")
def test_threads_that_share_a_core_are_awaited():
    """The waiting thread sleeps: the others are late, since only one thread runs at a time."""
    run(
        """
import os, jax, numpy as np
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import jax_q4k as jq
rng = np.random.default_rng(0)
w = jq.quantize(rng.standard_normal((640, 4096), np.float32), "Q4_K")
x = rng.standard_normal((512, 4096), np.float32)
product = jax.jit(jq.matmul)
first = np.asarray(product(x, w))
assert all(np.array_equal(product(x, w), first) for _ in range(20))
""",
        PJRT_NPROC="4",
        XLA_FLAGS="",
    )
