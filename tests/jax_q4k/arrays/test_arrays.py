"""QuantizedArray: lossless, sliceable, and a pytree whose shape JAX's transformations preserve."""

from __future__ import annotations

import os
import subprocess
import sys

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gguf.constants import GGMLQuantizationType
from support.format_lists import FEW_ARE_QUICK

import jax_q4k as jq
from ptx_kernels import formats

ALL = formats.names()


def random_bytes(name: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """uint8 (..., n, bytes of a row), with finite scales."""
    block = formats.get(name)
    rng = np.random.default_rng(seed)
    raw = rng.integers(
        0, 256, (*shape[:-1], shape[-1] // block.block_size, block.block_bytes), np.uint8
    )
    for field in block.scale_fields:
        block.store_scale(raw, field, rng.normal(size=raw.shape[:-1]))
    return raw.reshape(*shape[:-1], -1)


def make(name: str, shape: tuple[int, ...]) -> jq.QuantizedArray:
    return jq.QuantizedArray.from_gguf_bytes(random_bytes(name, shape), name, shape)


@FEW_ARE_QUICK
@pytest.mark.grid
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("shape", [(512,), (6, 256), (3, 4, 512)])
def test_bytes_come_back_and_weights_are_ggmls(name, shape):
    raw = random_bytes(name, shape)
    w = jq.QuantizedArray.from_gguf_bytes(raw.tobytes(), name, shape)
    assert w.to_gguf_bytes() == raw.tobytes()
    assert (w.format, w.shape, w.ndim, w.nbytes) == (name, shape, len(shape), raw.size)
    assert w.size == np.prod(shape)
    want = gguf.quants.dequantize(raw, GGMLQuantizationType[name])
    got = w.dequantize()
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(got).view(np.uint32), want.view(np.uint32))
    np.testing.assert_array_equal(w.dequantize(jnp.bfloat16), got.astype(jnp.bfloat16))


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, np.asarray])
def test_raw_may_be_any_buffer(kind):
    raw = random_bytes("Q8_0", (4, 64))
    source = kind(raw) if kind is np.asarray else kind(raw.tobytes())
    assert (
        jq.QuantizedArray.from_gguf_bytes(source, "Q8_0", (4, 64)).to_gguf_bytes() == raw.tobytes()
    )


def test_raw_is_copied():
    """Q4_K's single plane is the raw bytes.

    JAX would alias them without a copy if they are aligned to 64 bytes.
    """
    raw = random_bytes("Q4_K", (4, 256))
    room = np.zeros(raw.size + 64, np.uint8)
    source = room[-room.ctypes.data % 64 :][: raw.size]
    source[:] = raw.reshape(-1)
    w = jq.QuantizedArray.from_gguf_bytes(source, "Q4_K", (4, 256))
    source[:] = 0
    assert w.to_gguf_bytes() == raw.tobytes()


@pytest.mark.grid
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K"])  # one plane and four
@pytest.mark.parametrize(
    "index",
    [
        1,
        -1,
        -3,
        slice(1, 3),
        (0, slice(2, 4)),
        (slice(None), 1),
        (2, 3),
        np.int64(2),
        np.array([2, 0, 2]),
        ...,
        None,
        (None, 1),
        (slice(1, 3), None),
        (1, ...),
        (..., 2, slice(None)),
        (None, ..., slice(None)),
        (slice(None), slice(None), slice(None)),
        (np.array([[1], [2]]), None, np.array([0, 3])),
    ],
    ids=str,
)
def test_indexing_leading_axes(name, index):
    w = make(name, (3, 4, 512))
    part = w[index]
    want = np.asarray(w.dequantize())[index]
    assert part.shape == want.shape
    np.testing.assert_array_equal(part.dequantize(), want)


def test_rows_are_gathered_by_traced_ids():
    w, ids = make("Q4_K", (10, 512)), jnp.array([[3, 0], [9, 3]])
    rows = jax.jit(lambda w, ids: w[ids])(w, ids)
    assert rows.shape == (2, 2, 512)
    np.testing.assert_array_equal(rows.dequantize(), w.dequantize()[ids])


def test_iterating_gives_the_parts_of_the_first_axis():
    w = make("Q6_K", (3, 2, 256))
    parts = list(w)
    assert len(w) == len(parts) == 3
    np.testing.assert_array_equal(parts[2].dequantize(), w.dequantize()[2])


@pytest.mark.parametrize(
    "index, error, message",
    [
        (3, IndexError, "index 3 is out of range for axis 0 of size 3"),
        ((0, -5), IndexError, "index -5 is out of range for axis 1 of size 4"),
        ((0, 0, 0), IndexError, r"index 0 for shape \(3, 4, 512\): the last axis, 2, is packed"),
        ((..., 0), IndexError, "index 0 for shape .* the last axis, 2, is packed"),
        ((..., None), IndexError, "index None for shape .* the last axis, 2, is packed"),
        ((..., slice(0, 256)), IndexError, "the last axis, 2, is packed"),
        ((0, 0, slice(None), None), IndexError, "index None for shape"),
        ((0, 0, 0, 0), IndexError, r"4 indices for shape \(3, 4, 512\), which has 3 axes"),
        ((..., ...), IndexError, "an index can have one Ellipsis, not 2"),
        (True, TypeError, "index True of axis 0 must be an integer, a slice or an integer array"),
        (1.0, TypeError, "index 1.0 of axis 0"),
        (np.ones(3, bool), TypeError, "index of dtype bool of axis 0"),
        (np.array([0, 3]), IndexError, "index of axis 0 is out of range for size 3: 0 to 3"),
        (
            (0, np.array([[-5], [1]])),
            IndexError,
            "index of axis 1 is out of range for size 4: -5 to 1",
        ),
    ],
)
def test_bad_indices(index, error, message):
    with pytest.raises(error, match=message):
        make("Q5_0", (3, 4, 512))[index]


def test_a_single_row_has_no_length():
    with pytest.raises(TypeError, match=r"a packed row of shape \(256,\) has no length"):
        len(make("Q4_K", (256,)))


@pytest.mark.parametrize("name", ALL)
def test_pytree_round_trip(name):
    w = make(name, (2, 256))
    leaves, tree = jax.tree.flatten(w)
    planes = formats.get(name).planes
    assert [leaf.shape[-1] for leaf in leaves] == [plane.bytes_per_block for plane in planes]
    back = jax.tree.unflatten(tree, leaves)
    assert back.format == name and back.to_gguf_bytes() == w.to_gguf_bytes()
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(w)]
    assert paths == [f".{plane.name}" for plane in planes]
    assert tree != jax.tree.structure(make("Q4_K" if name != "Q4_K" else "Q5_K", (2, 256)))


def test_leaves_need_not_be_arrays():
    w = make("Q6_K", (2, 256))
    repr(jax.tree.map(lambda _: None, w))
    repr(jax.tree.unflatten(jax.tree.structure(w), [object()] * 4))
    abstract = jax.eval_shape(lambda w: w[:1], w)
    assert isinstance(abstract.planes[0], jax.ShapeDtypeStruct) and abstract.shape == (1, 256)
    specs = [jax.ShapeDtypeStruct(plane.shape, plane.dtype) for plane in w.planes]
    spec = jq.QuantizedArray("Q6_K", (2, 256), specs)
    assert jax.eval_shape(jq.QuantizedArray.dequantize, spec).shape == (2, 256)
    assert jax.jit(jq.QuantizedArray.dequantize).lower(spec).out_info.dtype == jnp.float32


def test_scan_and_vmap_hand_on_parts_of_the_right_shape():
    w = make("Q4_K", (3, 4, 512))

    def step(carry, layer):
        assert layer.shape == (4, 512)
        return carry + layer.dequantize().sum(), layer[1:3]

    total, rows = jax.lax.scan(step, 0.0, w)
    assert rows.shape == (3, 2, 512)
    np.testing.assert_array_equal(rows.dequantize(), w.dequantize()[:, 1:3])
    np.testing.assert_allclose(total, w.dequantize().sum(), rtol=1e-4)
    np.testing.assert_array_equal(jax.vmap(jq.QuantizedArray.dequantize)(w), w.dequantize())


def test_stacking_layers():
    layers = [make("Q6_K", (4, 256)) for _ in range(3)]
    assert jax.tree.map(lambda *planes: jnp.stack(planes), *layers).shape == (3, 4, 256)


class Linear(nnx.Module):
    def __init__(self, weight: jq.QuantizedArray) -> None:
        self.weight = nnx.Param(weight)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.weight.get_value().dequantize().T


def test_a_value_of_an_nnx_variable():
    w = make("Q8_0", (6, 64))
    module, x = Linear(w), jnp.ones((2, 64))
    want = x @ w.dequantize().T
    np.testing.assert_allclose(nnx.jit(lambda module, x: module(x))(module, x), want, rtol=1e-5)
    definition, state = nnx.split(module)
    assert len(jax.tree.leaves(state)) == 2
    again = nnx.merge(definition, jax.tree.map(lambda leaf: leaf, state))
    assert again.weight.get_value().format == "Q8_0"
    np.testing.assert_allclose(again(x), want, rtol=1e-5)


def test_device_put():
    w = make("Q5_K", (4, 512))
    moved = jax.device_put(w, jax.devices()[0])
    assert isinstance(moved, jq.QuantizedArray) and moved.to_gguf_bytes() == w.to_gguf_bytes()


SHARDED = """
import jax, numpy as np, jax_q4k as jq
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((4,), ("x",))
raw = np.random.default_rng(0).integers(0, 64, (8, 4, 210), np.uint8)
w = jq.QuantizedArray.from_gguf_bytes(raw, "Q6_K", (8, 1024))
for spec, part in ((P("x"), (2, 1024)), (P(None, "x"), (8, 256))):
    sharded = jax.device_put(w, NamedSharding(mesh, spec))
    assert sharded.sharding.spec == spec and sharded.devices() == set(jax.devices())
    assert sharded.block_until_ready() is sharded
    shards = [plane.addressable_shards[0].data for plane in sharded.planes]
    assert jax.tree.unflatten(jax.tree.structure(w), shards).shape == part
    def local(w):
        assert w.shape == part
        return w.dequantize()
    got = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec))(sharded)
    np.testing.assert_array_equal(got, w.dequantize())
"""


@pytest.mark.slow("compiles a program for each case")
def test_sharding_along_rows_or_blocks():
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", SHARDED], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_repr():
    assert repr(make("Q4_K", (4, 512))) == "QuantizedArray(Q4_K, shape=(4, 512), nbytes=1152)"


@pytest.mark.parametrize(
    "size, name, shape, message",
    [
        (
            144,
            "Q9_K",
            (1, 256),
            f"format='Q9_K' must be one of {', '.join(formats.names())}",
        ),
        (144, "F32", (1, 256), "format='F32' must be one of"),
        (
            72,
            "Q4_K",
            (1, 128),
            r"shape=\(1, 128\): k=128 must be a multiple of 256, the block of Q4_K",
        ),
        (34, "Q8_0", (1, 33), "k=33 must be a multiple of 32, the block of Q8_0"),
        (
            0,
            "Q4_K",
            (0, 256),
            r"shape=\(0, 256\) must have at least one axis, and every axis at least 1",
        ),
        (0, "Q4_K", (2, 0), "every axis at least 1"),
        (144, "Q4_K", (), "at least one axis"),
        (144, "Q4_K", (-1, 256), "every axis at least 1"),
        (
            143,
            "Q4_K",
            (1, 256),
            r"raw has 143 bytes; Q4_K of shape \(1, 256\) takes 1 blocks of 144 = 144 bytes",
        ),
        (289, "Q4_K", (2, 256), "raw has 289 bytes; .* 288 bytes"),
    ],
)
def test_bad_bytes(size, name, shape, message):
    with pytest.raises(ValueError, match=message):
        jq.QuantizedArray.from_gguf_bytes(bytes(size), name, shape)


def test_bad_dtype_of_raw():
    with pytest.raises(TypeError, match="raw must hold uint8, not float32"):
        jq.QuantizedArray.from_gguf_bytes(np.zeros(144, np.float32), "Q4_K", (1, 256))


def test_bad_dtype_of_weights():
    with pytest.raises(TypeError, match="dtype=int8 must be a floating type"):
        make("Q8_0", (1, 32)).dequantize(jnp.int8)


def test_bad_planes():
    planes = make("Q8_0", (4, 64)).planes
    with pytest.raises(ValueError, match=r"must be uint8 \(1, 1, 144\), not bytes \(\)"):
        jq.QuantizedArray("Q4_K", (1, 256), [bytes(144)])
    with pytest.raises(ValueError, match="planes has 1 arrays; Q8_0 has 2: qs, d"):
        jq.QuantizedArray("Q8_0", (4, 64), planes[:1])
    with pytest.raises(
        ValueError, match=r"plane qs of Q8_0 \(4, 32\) must be uint8 \(4, 1, 32\), not uint8"
    ):
        jq.QuantizedArray("Q8_0", (4, 32), planes)
    with pytest.raises(
        ValueError, match=r"plane d of .* must be uint8 \(4, 2, 2\), not int8 \(4, 2, 2\)"
    ):
        jq.QuantizedArray("Q8_0", (4, 64), (planes[0], planes[1].astype(jnp.int8)))
