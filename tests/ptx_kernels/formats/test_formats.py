"""Block formats: planes are lossless, and decoding equals ggml's values bit for bit."""

from __future__ import annotations

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

import jax_q4k as jq
from ptx_kernels import formats

ALL = ["IQ4_NL", "MXFP4", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "NVFP4"]
ALL += ["IQ1_M", "IQ1_S", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ3_S", "IQ3_XXS", "IQ4_XS"]
ALL += ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0"]
# zeros, the smallest subnormals and normals, the largest
EXTREME_HALVES = np.array([0.0, -0.0, 6e-8, -6e-8, 6.1e-5, 65504, -65504, 1.0, 3.14], np.float16)


def random_blocks(format: formats.BlockFormat, count: int, seed: int = 0) -> np.ndarray:
    """uint8 (count, block_bytes) with random quants and finite random and extreme scales."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (count, format.block_bytes), dtype=np.uint8)
    raw[0], raw[1] = 0, 255
    for field in format.scale_fields:
        values = rng.normal(size=count).astype(np.float16)
        values[: 2 * len(EXTREME_HALVES)] = rng.permutation(np.tile(EXTREME_HALVES, 2))
        format.store_scale(raw, field, values)
    return raw


def ggml_values(format: formats.BlockFormat, raw: np.ndarray) -> np.ndarray:
    return gguf.quants.dequantize(raw, GGMLQuantizationType[format.name])


def test_names():
    assert sorted(formats.names()) == sorted(ALL)


@pytest.mark.parametrize("name", ALL)
def test_sizes_are_ggmls(name):
    format = formats.get(name)
    assert (format.block_size, format.block_bytes) == GGML_QUANT_SIZES[GGMLQuantizationType[name]]


def test_plane_order_and_alignment():
    found = {
        name: [(p.name, p.bytes_per_block, p.alignment) for p in formats.get(name).planes]
        for name in ALL
    }
    assert found == {
        "IQ4_NL": [("codes", 16, 16), ("d", 2, 2)],
        "MXFP4": [("codes", 16, 16), ("e", 1, 1)],
        "Q4_0": [("qs", 16, 16), ("d", 2, 2)],
        "Q4_1": [("qs", 16, 16), ("dm", 4, 4)],
        "Q5_0": [("qs", 16, 16), ("qh", 4, 4), ("d", 2, 2)],
        "Q5_1": [("qs", 16, 16), ("qh", 4, 4), ("dm", 4, 4)],
        "Q8_0": [("qs", 32, 16), ("d", 2, 2)],
        "NVFP4": [("codes", 32, 16), ("scales", 4, 4)],
        "IQ1_M": [("qs", 32, 16), ("qh", 16, 16), ("scales", 8, 8)],
        "IQ1_S": [("qs", 32, 16), ("qh", 16, 16), ("d", 2, 2)],
        "IQ2_S": [("qs", 64, 16), ("qh", 8, 8), ("scales", 8, 8), ("d", 2, 2)],
        "IQ2_XS": [("qs", 64, 16), ("scales", 8, 8), ("d", 2, 2)],
        "IQ2_XXS": [("qs", 64, 16), ("d", 2, 2)],
        "IQ3_S": [("qs", 64, 16), ("signs", 32, 16), ("heads", 12, 4), ("d", 2, 2)],
        "IQ3_XXS": [("qs", 64, 16), ("signs", 32, 16), ("d", 2, 2)],
        "IQ4_XS": [("codes", 128, 16), ("head", 8, 8)],
        "Q2_K": [("qs", 64, 16), ("scales", 16, 16), ("dm", 4, 4)],
        "Q3_K": [("qs", 64, 16), ("hmask", 32, 16), ("scales", 12, 4), ("d", 2, 2)],
        "Q4_K": [("block", 144, 16)],
        "Q5_K": [("block", 176, 16)],
        "Q6_K": [("ql", 128, 16), ("qh", 64, 16), ("scales", 16, 16), ("d", 2, 2)],
        "TQ1_0": [("qs", 52, 4), ("d", 2, 2)],
        "TQ2_0": [("pairs", 64, 16), ("d", 2, 2)],
    }


def test_scale_fields_are_all_scales_and_minimums():
    """Lists the fields that are checked for NaN; some formats have a scale and a minimum."""
    two = {"Q4_1": ("d", "m"), "Q5_1": ("d", "m")}
    two |= dict.fromkeys(("Q2_K", "Q4_K", "Q5_K"), ("d", "dmin"))
    # NVFP4's bytes are all finite; IQ1_M's d is part of its scales
    others = two | {"MXFP4": ("e",), "NVFP4": (), "IQ1_M": ("scales",)}
    assert {name: formats.get(name).scale_fields for name in ALL} == {
        name: others.get(name, ("d",)) for name in ALL
    }


@pytest.mark.parametrize("size, alignment", [(1, 1), (12, 4), (24, 8), (48, 16)])
def test_alignment_is_what_every_multiple_of_the_size_has(size, alignment):
    assert formats.Plane("x", size, ((0, size),)).alignment == alignment


@pytest.mark.parametrize("name", ALL)
def test_planes_cover_the_block_once(name):
    format = formats.get(name)
    runs = sorted(run for plane in format.planes for run in plane.offset_runs)
    covered = [at for offset, size in runs for at in range(offset, offset + size)]
    assert covered == list(range(format.block_bytes))


@pytest.mark.parametrize("name", ALL)
def test_split_and_join_are_inverse(name):
    format = formats.get(name)
    raw = random_blocks(format, 24).reshape(2, 3, 4, -1)
    planes = format.split(raw)
    assert [p.shape for p in planes] == [(2, 3, 4, p.bytes_per_block) for p in format.planes]
    np.testing.assert_array_equal(format.join(planes), raw)


@pytest.mark.parametrize("name", ALL)
def test_decode_equals_ggml_bit_for_bit(name):
    format = formats.get(name)
    raw = random_blocks(format, 500)
    got = format.decode(format.split(raw))
    assert got.dtype == np.float32
    want = ggml_values(format, raw).reshape(-1)
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))
    assert np.any(got != 0)


@pytest.mark.grid
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("jit", [False, True])
def test_jax_decodes_the_same_bits(name, jit):
    format = formats.get(name)
    raw = random_blocks(format, 120, seed=1).reshape(2, 5, 12, -1)
    planes = [np.ascontiguousarray(p) for p in format.split(raw)]

    def decode(planes):
        return format.decode(planes, jnp)

    got = np.asarray((jax.jit(decode) if jit else decode)([jnp.asarray(p) for p in planes]))
    assert got.shape == (2, 5, 12 * format.block_size)
    want = format.decode(planes)
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_subnormal_weights(dtype):
    """Decodes MXFP4's smallest weights like gguf-py; bfloat16 represents them, too."""
    format = formats.get("MXFP4")
    raw = random_blocks(format, 200, seed=2)
    raw[:, 0] = np.arange(200) % 4
    want = ggml_values(format, raw).reshape(10, -1)
    tiny = np.finfo(np.float32).tiny
    assert set(np.unique(np.abs(want[np.abs(want) < tiny]))) == {0, tiny / 4, tiny / 2, tiny * 0.75}
    w = jq.QuantizedArray.from_gguf_bytes(raw.reshape(-1), "MXFP4", want.shape)
    bits = np.uint32 if dtype == np.float32 else np.uint16
    for got in (w.dequantize(dtype), jq.dequantize(w, dtype)):
        np.testing.assert_array_equal(np.asarray(got).view(bits), want.astype(dtype).view(bits))


@pytest.mark.grid
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_finite_finds_the_bad_block(name, value):
    format = formats.get(name)
    raw = random_blocks(format, 40).reshape(4, 10, -1)
    assert format.finite(format.split(raw)).all()
    for field in format.scale_fields:
        bad = raw.copy()
        format.store_scale(bad[2, 7], field, value)
        assert np.argwhere(~format.finite(format.split(bad))).tolist() == [[2, 7]]


def test_unknown_format_lists_the_known_ones():
    with pytest.raises(ValueError, match=f"format='Q9_X' must be one of {', '.join(ALL)}$"):
        formats.get("Q9_X")
