"""Quantized checkpoints: packers of the libraries' layouts, decoded values, damaged folders."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.helpers import nmse
from support.paths import GOLDEN, TESTS

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models.files import hub
from jax_q4k.models.files.checkpoints.packed import methods
from jax_q4k.models.files.checkpoints.packed.methods import METHODS, packed_tensors
from jax_q4k.models.files.checkpoints.packed.weights import DecodedWeights
from jax_q4k.models.files.checkpoints.safetensors import Weights
from jax_q4k.models.support.json_fields import JSONFields

from ... import checkpoints

FOLDER = GOLDEN.parent / "checkpoints" / "llama"
E4M3, E5M2, E8M0, BF16 = (
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e5m2,
    ml_dtypes.float8_e8m0fnu,
    ml_dtypes.bfloat16,
)
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
#: bitsandbytes' table of NF4.
NF4 = [
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
]

#: Tensors by their suffixes after the module's name.
Tensors = dict[str, np.ndarray]


@dataclasses.dataclass
class Case:
    """A module's stored tensors, and its weight in float64 before it is rounded to `dtype`."""

    settings: dict[str, Any]
    tensors: Tensors
    want: np.ndarray
    dtype: Any


def seeded(*seeds: int) -> np.random.Generator:
    return np.random.default_rng(seeds)


def scales(r: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return r.uniform(0.5, 2, shape).astype(dtype) / np.asarray(64, dtype)


def words(values: np.ndarray, bits: int, positions: list[int] | None = None) -> np.ndarray:
    """Packs values (rows, m) into int32: 32 // bits a word, value i at `positions[i]`."""
    each = 32 // bits
    rows, m = values.shape
    packed = np.zeros((rows, -(-m // each)), np.uint32)
    for column in range(m):
        at = column % each if positions is None else positions[column % each]
        packed[:, column // each] |= values[:, column].astype(np.uint32) << np.uint32(bits * at)
    return packed.view(np.int32)


def three_bits(values: np.ndarray) -> np.ndarray:
    """Packs values (rows, m) as AutoGPTQ does: 32 of 3 bits in three int32."""
    packed = np.zeros((len(values), values.shape[1] * 3 // 32), np.uint32)
    v = values.astype(np.uint32)
    for start in range(0, values.shape[1], 32):
        w = start // 32 * 3
        for j in range(10):
            packed[:, w] |= v[:, start + j] << np.uint32(3 * j)
        packed[:, w] |= v[:, start + 10] << np.uint32(30)
        packed[:, w + 1] |= (v[:, start + 10] >> np.uint32(2)) & np.uint32(1)
        for j in range(10):
            packed[:, w + 1] |= v[:, start + 11 + j] << np.uint32(3 * j + 1)
        packed[:, w + 1] |= v[:, start + 21] << np.uint32(31)
        packed[:, w + 2] |= (v[:, start + 21] >> np.uint32(1)) & np.uint32(3)
        for j in range(10):
            packed[:, w + 2] |= v[:, start + 22 + j] << np.uint32(3 * j + 2)
    return packed.view(np.int32)


def awq(n: int, k: int, group: int = 32) -> Case:
    r = seeded(1, n, k)
    values, zeros = r.integers(0, 16, (n, k)), r.integers(0, 16, (n, k // group))
    scale = scales(r, (n, k // group), np.float16)
    want = (values - zeros.repeat(group, 1)) * scale.astype(np.float64).repeat(group, 1)
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # column of each position
    positions = [order.index(i) for i in range(8)]
    tensors = {
        "qweight": words(values.T, 4, positions),
        "qzeros": words(zeros.T, 4, positions),
        "scales": scale.T.copy(),
    }
    settings = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"}
    return Case(settings | {"zero_point": True}, tensors, want, np.float16)


def gptq(
    n: int, k: int, bits: int = 4, layout: str = "gptq", ordered: bool = True, group: int = 32
) -> Case:
    r = seeded(2, n, k, bits)
    added = 1 if layout == "gptq" else 0
    values = r.integers(0, 1 << bits, (n, k))
    stored = r.integers(0, 1 << bits, (n, k // group))
    scale = scales(r, (n, k // group), np.float16)
    index = np.arange(k) // group if ordered else r.permutation(np.arange(k) // group)
    want = (values - (stored + added)[:, index]) * scale.astype(np.float64)[:, index]
    pack = three_bits if bits == 3 else lambda v: words(v, bits)
    tensors = {
        "qweight": pack(values).T.copy(),  # packed along columns
        "qzeros": pack(stored.T),  # packed along rows
        "scales": scale.T.copy(),
        "g_idx": index.astype(np.int32),
    }
    settings = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": not ordered}
    return Case(settings | {"checkpoint_format": layout}, tensors, want, np.float16)


def without_order(case: Case) -> Case:
    return dataclasses.replace(case, tensors={**case.tensors, "g_idx": None})


def fp8(
    n: int,
    k: int,
    grid: tuple[int, ...],
    block: tuple[int, int] | None = None,
    *,
    method: str = "fp8",
    suffix: str = "weight_scale_inv",
    of_weights: Any = E4M3,
    of_scales: Any = np.float32,
) -> Case:
    r = seeded(3, n, k, *grid)
    weight = r.standard_normal((n, k)).astype(of_weights)
    scale = scales(r, grid, np.float32)
    if of_scales is np.uint8:  # exponents
        scale = r.integers(120, 130, grid).astype(np.uint8)
        factor = 2.0 ** (scale.astype(np.float64) - 127)
    else:
        scale = scale.astype(of_scales)
        factor = scale.astype(np.float64)
    rows, columns = (factor.reshape(-1, 1) if factor.ndim < 2 else factor).shape
    bn, bk = block or (n // rows, k // columns)
    factor = factor.reshape(rows, columns).repeat(bn, 0)[:n].repeat(bk, 1)[:, :k]
    settings = {"quant_method": method}
    if method == "fp8":
        settings["weight_block_size"] = None if block is None else list(block)
    elif method == "compressed-tensors":
        described = {"num_bits": 8, "type": "float", "block_structure": block and list(block)}
        settings |= {"format": "float-quantized", "config_groups": {"g": {"weights": described}}}
    elif method == "modelopt":
        settings["quant_algo"] = "FP8"
    dtype = BF16 if of_scales in (np.uint8, E8M0) else of_scales
    tensors = {"weight": weight, suffix: scale, "input_scale": np.ones((), np.float32)}
    return Case(settings, tensors, weight.astype(np.float64) * factor, dtype)


def int8(n: int, k: int, zeros: bool) -> Case:
    r = seeded(4, n, k)
    weight, scale = r.integers(-128, 128, (n, k)), scales(r, (n, 1), BF16)
    zero = r.integers(-8, 8, (n, 1)) * zeros
    tensors = {"weight": weight.astype(np.int8), "weight_scale": scale}
    if zeros:
        tensors["weight_zero_point"] = zero.astype(np.int8)
    group = {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}
    settings = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    want = (weight - zero) * scale.astype(np.float64)
    return Case(settings | {"config_groups": {"group_0": group}}, tensors, want, BF16)


def dense(values: np.ndarray, bits: int) -> np.ndarray:
    """Packs values (rows, m) into int32 without gaps, the lowest bits first."""
    each = values[..., None].astype(np.uint32) >> np.arange(bits, dtype=np.uint32) & 1
    each = each.reshape(len(values), -1)
    padded = np.pad(each, ((0, 0), (0, -each.shape[1] % 32))).astype(np.uint8)
    return np.packbits(padded, axis=-1, bitorder="little").view(np.int32)


def packed_integers(
    n: int,
    k: int,
    bits: int,
    group: int,
    zeros: bool = False,
    ordered: bool = True,
    version: str = "0.17.0",
) -> Case:
    r = seeded(5, n, k, bits)
    half, groups = 1 << bits - 1, k // group
    values, scale = r.integers(-half, half, (n, k)), scales(r, (n, groups), BF16)
    zero = r.integers(-half, half, (n, groups)) * zeros
    index = np.arange(k) // group if ordered else r.permutation(np.arange(k) // group)
    pack = words if version < "0.18" else dense
    tensors = {
        "weight_packed": pack(values + half, bits),
        "weight_scale": scale,
        "weight_shape": np.array([n, k]),
    }
    if zeros:
        tensors["weight_zero_point"] = pack(zero.T + half, bits).T.copy()  # along rows
    if not ordered:
        tensors["weight_g_idx"] = index.astype(np.int32)
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": group}
    settings = {"quant_method": CT, "format": "pack-quantized", "version": version}
    settings["config_groups"] = {"group_0": {"weights": weights}}
    want = (values - zero[:, index]) * scale.astype(np.float64)[:, index]
    return Case(settings, tensors, want, BF16)


def nvfp4(n: int, k: int, method: str = "modelopt") -> Case:
    r = seeded(6, n, k)
    codes = r.integers(0, 16, (n, k))
    scale = r.uniform(0.1, 448, (n, k // 16)).astype(E4M3)
    factor = np.float32(0.0011)
    tensors = {"weight_scale": scale, "input_scale": np.ones((), np.float32)}
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
    if method == "modelopt":
        tensors |= {"weight": packed, "weight_scale_2": np.array(factor)}
        settings = {"quant_method": method, "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    else:
        reciprocal = np.float32(1) / factor
        tensors |= {"weight_packed": packed, "weight_global_scale": reciprocal.reshape(1)}
        settings = {"quant_method": method, "format": "nvfp4-pack-quantized"}
        factor = np.float32(1) / reciprocal
    each = (scale.astype(np.float32) * factor).astype(np.float64)
    return Case(settings, tensors, np.array(E2M1)[codes] * each.repeat(16, 1), np.float32)


def mxfp4(n: int, k: int) -> Case:
    r = seeded(7, n, k)
    codes, scale = r.integers(0, 16, (n, k)), r.integers(110, 140, (n, k // 32)).astype(np.uint8)
    tensors = {
        "weight_packed": (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8),
        "weight_scale": scale,
    }
    settings = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
    factor = 2.0 ** (scale.astype(np.float64) - 127)
    return Case(settings, tensors, np.array(E2M1)[codes] * factor.repeat(32, 1), BF16)


def four_bits(
    n: int, k: int, kind: str = "nf4", nested: bool = False, storage: Any = np.uint8
) -> Case:
    r, blocksize = seeded(8, n, k), 64
    table = np.array(NF4 if kind == "nf4" else E2M1, np.float32)
    indices = r.integers(0, 16, n * k)
    blocks = -(-n * k // blocksize)
    absmax = r.uniform(0.5, 2, blocks).astype(np.float32)
    state = {"quant_type": kind, "blocksize": blocksize, "dtype": "bfloat16", "shape": [n, k]}
    tensors: Tensors = {
        "weight": (indices[::2] << 4 | indices[1::2]).astype(np.uint8).view(storage)[:, None],
        "weight.quant_map": table,
    }
    if nested:
        codes = r.integers(0, 256, blocks).astype(np.uint8)
        nested_table = np.sort(r.uniform(-1, 1, 256)).astype(np.float32)
        of_each = r.uniform(1, 2, -(-blocks // 2)).astype(np.float32)
        state |= {"nested_blocksize": 2, "nested_dtype": "float32", "nested_offset": 0.375}
        absmax = nested_table[codes] * of_each.repeat(2)[:blocks] + np.float32(0.375)
        tensors |= {"weight.absmax": codes, "weight.nested_absmax": of_each}
        tensors["weight.nested_quant_map"] = nested_table
    else:
        tensors["weight.absmax"] = absmax
    data = np.frombuffer(json.dumps(state).encode(), np.uint8)
    tensors[f"weight.quant_state.bitsandbytes__{kind}"] = data
    each = absmax.repeat(blocksize)[: n * k]
    want = (table[indices] * each).astype(np.float64).reshape(n, k)
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    return Case(settings, tensors, want, BF16)


def eight_bits(n: int, k: int) -> Case:
    r = seeded(9, n, k)
    weight, largest = r.integers(-127, 128, (n, k)), r.uniform(0.5, 2, n).astype(np.float32)
    tensors = {"weight": weight.astype(np.int8), "SCB": largest}
    tensors["weight_format"] = np.zeros((), np.uint8)
    settings = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    want = weight.astype(np.float32) * largest[:, None] * np.float32(7.874015718698502e-3)
    return Case(settings, tensors, want.astype(np.float64), np.float32)


CT = "compressed-tensors"
CASES: dict[str, Callable[[int, int], Case]] = {
    "awq": awq,
    "awq-one-group": lambda n, k: awq(n, k, k),
    **{f"gptq-{bits}": lambda n, k, bits=bits: gptq(n, k, bits) for bits in (2, 3, 4, 8)},
    "gptq-v2": lambda n, k: gptq(n, k, layout="gptq_v2"),
    "gptq-act-order": lambda n, k: gptq(n, k, ordered=False),
    "gptq-without-g_idx": lambda n, k: without_order(gptq(n, k)),
    "fp8-block": lambda n, k: fp8(n, k, (-(-n // 24), -(-k // 40)), (24, 40)),
    "fp8-tensor": lambda n, k: fp8(n, k, (), suffix="weight_scale"),
    "fp8-e5m2": lambda n, k: fp8(n, k, (1,), of_weights=E5M2),
    "fp8-e8m0": lambda n, k: fp8(n, k, (2, 2), (n // 2, k // 2), of_scales=E8M0),
    "fbgemm": lambda n, k: fp8(n, k, (n, 1), method="fbgemm_fp8", suffix="weight_scale"),
    "ct-fp8-tensor": lambda n, k: fp8(n, k, (1,), method=CT, suffix="weight_scale", of_scales=BF16),
    "ct-fp8-channel": lambda n, k: fp8(
        n, k, (n, 1), method=CT, suffix="weight_scale", of_scales=BF16
    ),
    "ct-fp8-block": lambda n, k: fp8(
        n, k, (-(-n // 24), -(-k // 40)), (24, 40), method=CT, suffix="weight_scale"
    ),
    "ct-mxfp8": lambda n, k: fp8(
        n, k, (n, k // 32), method=CT, suffix="weight_scale", of_scales=np.uint8
    ),
    "ct-int8": lambda n, k: int8(n, k, False),
    "ct-int8-zeros": lambda n, k: int8(n, k, True),
    "ct-int4": lambda n, k: packed_integers(n, k, 4, 32),
    "ct-int4-zeros": lambda n, k: packed_integers(n, k, 4, 32, zeros=True),
    "ct-int4-act-order": lambda n, k: packed_integers(n, k, 4, 32, ordered=False),
    "ct-int3": lambda n, k: packed_integers(n, k, 3, 32, zeros=True),
    "ct-int3-dense": lambda n, k: packed_integers(n, k, 3, 32, zeros=True, version="0.18.0"),
    "ct-int5-dense": lambda n, k: packed_integers(n, k, 5, k, version="0.19.0"),
    "ct-int8-packed": lambda n, k: packed_integers(n, k, 8, k),
    "ct-nvfp4": lambda n, k: nvfp4(n, k, CT),
    "ct-mxfp4": mxfp4,
    "modelopt-nvfp4": nvfp4,
    "modelopt-fp8": lambda n, k: fp8(n, k, (), method="modelopt", suffix="weight_scale"),
    "bnb-nf4": four_bits,
    "bnb-fp4": lambda n, k: four_bits(n, k, "fp4"),
    "bnb-nested": lambda n, k: four_bits(n, k, nested=True),
    "bnb-stored-as-bf16": lambda n, k: four_bits(n, k, storage=BF16),
    "bnb-int8": eight_bits,
}


def opened(folder: Path, case: Case, **changes: np.ndarray | None) -> DecodedWeights:
    """Writes a file with a case's module `m` and opens it."""
    tensors = {name: value for name, value in (case.tensors | changes).items() if value is not None}
    file = folder / "model.safetensors"
    save_file({f"m.{name}": np.asarray(t, order="C") for name, t in tensors.items()}, file)
    weights = Weights(file)
    settings = JSONFields(case.settings, "config.json", "quantization_config.")
    return DecodedWeights(weights, packed_tensors(weights, settings))


@pytest.mark.parametrize("name", CASES)
def test_decoded_weights(name, tmp_path):
    case = CASES[name](64, 96)
    weights = opened(tmp_path, case)
    assert list(weights.stored) == ["m.weight"] and weights.stored["m.weight"].shape == (64, 96)
    got = weights.read("m.weight")
    want = case.want.astype(np.float32).astype(case.dtype)
    assert got.dtype == weights.stored["m.weight"].numpy_dtype == np.dtype(case.dtype)
    np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))
    assert nmse(got.astype(np.float64), case.want) <= (1e-12 if case.dtype == np.float32 else 1e-4)
    for rows in (slice(5, 23), slice(63, 64), slice(0, 8)):
        np.testing.assert_array_equal(weights.read("m.weight", rows), got[rows])
    stored = case.tensors.values()
    assert weights.nbytes("m.weight") == sum(t.nbytes for t in stored if t is not None)


LIBRARIES = json.loads((FOLDER.parent / "packed.json").read_text())


@pytest.mark.parametrize("name", LIBRARIES)
def test_weights_that_libraries_packed_and_decoded(name, tmp_path):
    stored = Weights(FOLDER.parent / "packed.safetensors")
    of_case = [key for key in stored.stored if key.startswith(f"{name}/")]
    tensors = {key.removeprefix(f"{name}/"): stored.raw(key) for key in of_case}
    stored.close()
    want = tensors.pop("decoded")
    case = Case(LIBRARIES[name]["quantization_config"], tensors, want, want.dtype)
    got = opened(tmp_path, case).read("m.weight")
    assert got.dtype == want.dtype and got.shape == (16, 64)
    # compressed-tensors divides scales by NVFP4's factor; here they are multiplied.
    bar = 1e-13 if name == "ct-NVFP4A16" else 0
    assert nmse(got.astype(np.float64), want.astype(np.float64)) <= bar


@pytest.mark.parametrize("version", ["0.17.1", "0.18.0", "0.100", "1", "unknown"])
def test_the_version_decides_where_shapes_do_not(version, tmp_path):
    """20 integers of 3 bits need two words, with or without gaps."""
    is_dense = version in ("0.18.0", "0.100", "1")
    case = packed_integers(4, 20, 3, 20, version="0.18" if is_dense else "0")
    case.settings["version"] = version
    got = opened(tmp_path, case).read("m.weight")
    np.testing.assert_array_equal(got, case.want.astype(BF16))


def test_a_case_of_every_method():
    assert {CASES[name](64, 96).settings["quant_method"] for name in CASES} | {"mxfp4"} == {
        *METHODS
    }


def test_the_page_of_models_names_every_method():
    page = (TESTS.parent / "docs/models.md").read_text().partition("### Quantized checkpoints")[2]
    rows = [line for line in page.partition("## ")[0].splitlines() if line.startswith("| `")]
    assert {name for row in rows[1:] for name in re.findall("`([^`]+)`", row.split("|")[1])} == {
        *METHODS
    }


@pytest.mark.parametrize("name", ["awq", "gptq-4", "ct-int4-zeros", "fp8-block", "bnb-nf4"])
def test_weights_are_decoded_in_pieces(name, tmp_path, monkeypatch):
    from jax_q4k.models.files.checkpoints.packed import base

    weights = opened(tmp_path, CASES[name](64, 96))
    want = weights.read("m.weight")
    monkeypatch.setattr(base, "_WEIGHTS", 3 * 96)
    np.testing.assert_array_equal(weights.read("m.weight"), want)
    np.testing.assert_array_equal(weights.read("m.weight", slice(3, 50)), want[3:50])


def test_known_words(tmp_path):
    """Words as the libraries write them: AWQ's order of columns, GPTQ's zero point of 8."""
    awq_word = np.full((32, 1), 0x75316420, np.int32)  # columns 0 to 7 hold 0 to 7
    case = awq(8, 32)
    zeros = np.zeros((1, 1), np.int32)
    ones = np.ones((1, 8), np.float16)
    got = opened(tmp_path, case, qweight=awq_word, qzeros=zeros, scales=ones).read("m.weight")
    np.testing.assert_array_equal(got, np.arange(8)[:, None].repeat(32, 1))
    case = gptq(8, 32)
    words_ = np.full((4, 8), 0x76543210, np.int32)
    zeros = np.full((1, 1), 0x77777777, np.int32)
    got = opened(tmp_path, case, qweight=words_, qzeros=zeros, scales=ones).read("m.weight")
    np.testing.assert_array_equal(got, np.tile(np.arange(8) - 8, (8, 4)))


@pytest.mark.parametrize("name", ["ct-nvfp4", "modelopt-nvfp4", "ct-mxfp4"])
def test_blocks_hold_the_same_values(name, tmp_path):
    weights = opened(tmp_path, CASES[name](8, 128))
    packed = weights.packed["m.weight"]
    blocks = weights.blocks("m.weight", slice(2, 7))
    got = jq.QuantizedArray.from_gguf_bytes(blocks.reshape(-1), packed.format, (5, 128))
    floats = np.asarray(got.dequantize()) * weights.factor("m.weight")
    want = weights.read("m.weight", slice(2, 7)).astype(np.float32)
    assert nmse(floats, want) <= (0 if name == "ct-mxfp4" else 1e-14)


NAN, INF = np.float16(np.nan), np.float16(np.inf)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("awq", {"scales": None}, "m.scales': is missing"),
        ("awq", {"qzeros": None}, "m.qzeros': is missing, expected with shape"),
        ("awq", {"qweight": np.zeros((96, 8), np.int64)}, "m.qweight': has dtype I64"),
        ("awq", {"qweight": np.zeros(96, np.int32)}, "m.qweight': has shape .*a matrix"),
        ("awq", {"scales": np.ones((3, 63), np.float16)}, "m.scales': has shape .*groups, 64"),
        ("awq", {"scales": np.ones((5, 64), np.float16)}, "m.scales': has 5 groups, which do not"),
        ("awq", {"scales": np.ones((0, 64), np.float16)}, "m.scales': has 0 groups"),
        ("awq", {"scales": np.full((3, 64), NAN)}, "m.weight': element 0 is NaN or infinite"),
        ("awq", {"weight": np.ones((64, 96), np.float16)}, "m.weight': is present in addition"),
        ("gptq-4", {"g_idx": np.full(96, 3, np.int32)}, "element 0 is 3, but there are 3 groups"),
        ("gptq-4", {"g_idx": np.full(96, -1, np.int32)}, "g_idx': element 0 is -1"),
        ("gptq-4", {"g_idx": np.zeros(95, np.int32)}, "g_idx': has shape .*expected .96,"),
        ("gptq-4", {"g_idx": np.zeros(64, np.int32)}, "qweight': has weights of 6 bits; supported"),
        ("gptq-4", {"qzeros": np.zeros((3, 7), np.int32)}, "qzeros': has shape"),
        ("gptq-4", {"scales": np.full((3, 64), INF)}, "m.weight': element 0 is NaN or infinite"),
        ("gptq-without-g_idx", {"scales": np.ones((2, 64), np.float16)}, "has 2 groups, expected"),
        ("fp8-block", {"weight_scale_inv": None}, "weight_scale_inv': is missing"),
        ("fp8-block", {"weight_scale_inv": np.ones((2, 2), np.float32)}, "which does not fit"),
        ("fp8-block", {"weight_scale_inv": np.ones((3, 3), np.int32)}, "has dtype I32"),
        ("fp8-tensor", {"weight_scale": np.array(np.nan, np.float32)}, "element 0 is NaN"),
        ("fp8-tensor", {"weight": np.full((64, 96), np.nan, E4M3)}, "element 0 is NaN"),
        ("fp8-tensor", {"weight": np.ones(96, E4M3)}, "expected a matrix"),
        ("fp8-tensor", {"weight": np.ones((64, 0), E4M3)}, r"no weights: their shape is \(64, 0\)"),
        ("ct-int8-zeros", {"weight_zero_point": np.zeros(3, np.int8)}, "zero_point': has shape"),
        ("ct-int4", {"weight_shape": None}, "weight_shape': is missing"),
        ("ct-int4", {"weight_shape": np.array([64, 104])}, "weight_packed': has shape"),
        ("ct-int4", {"weight_packed": np.zeros((2, 64, 12), "i4")}, "experts of a layer in one"),
        ("ct-mxfp4", {"weight_packed": np.zeros((2, 64, 48), "u1")}, "experts of a layer in one"),
        ("ct-int4", {"weight_shape": np.array([-64, 96])}, "weight_packed': has shape"),
        ("ct-int4", {"weight_scale": np.ones((64, 5), BF16)}, "has 5 groups"),
        ("ct-int4", {"weight_scale": np.ones((63, 3), BF16)}, "weight_scale': has shape"),
        ("ct-int4-act-order", {"weight_g_idx": np.full(96, 7, np.int32)}, "groups beyond the 3"),
        ("ct-nvfp4", {"weight_global_scale": np.zeros(1, np.float32)}, "is 0.0, expected a pos"),
        ("ct-nvfp4", {"weight_global_scale": np.ones(2, np.float32)}, "expected one number"),
        ("ct-nvfp4", {"weight_scale": np.full((64, 6), -1, E4M3)}, "holds negative scales"),
        ("ct-nvfp4", {"weight_scale": np.full((64, 6), np.nan, E4M3)}, "a scale that is NaN"),
        ("ct-nvfp4", {"weight_scale": np.ones((64, 5), E4M3)}, "weight_scale': has shape"),
        ("modelopt-nvfp4", {"weight_scale_2": None}, "weight_scale_2': is missing"),
        ("modelopt-nvfp4", {"pre_quant_scale": np.ones(96, BF16)}, "pre_quant_scale': scales act"),
        ("ct-mxfp4", {"weight_scale": np.full((64, 3), 255, np.uint8)}, "a scale that is NaN"),
        (
            "bnb-nf4",
            {"weight": np.zeros((9, 1), np.uint8)},
            "m.weight': has 9 bytes, expected 3072",
        ),
        ("bnb-nf4", {"weight.absmax": np.ones(95, np.float32)}, "absmax': has shape"),
        ("bnb-nf4", {"weight.quant_map": np.ones(15, np.float32)}, "quant_map': has shape"),
        ("bnb-nf4", {"weight.absmax": np.full(96, np.inf, np.float32)}, "is NaN or infinite"),
        ("bnb-nested", {"weight.nested_quant_map": None}, "nested_quant_map': is missing"),
        (
            "bnb-nf4",
            {"weight.quant_state.bitsandbytes__nf4": np.frombuffer(b"{", np.uint8)},
            "bitsandbytes__nf4': is no JSON",
        ),
        (
            "bnb-nf4",
            {"weight.quant_state.bitsandbytes__nf4": np.frombuffer(b'{"shape": 3}', np.uint8)},
            "bitsandbytes__nf4': shape: must be an array",
        ),
        ("bnb-int8", {"SCB": np.ones(3, np.float32)}, "m.SCB': has shape"),
        ("bnb-int8", {"weight_format": np.array(1, np.uint8)}, "weight_format': is 1, expected 0"),
    ],
)
def test_damaged_tensors(name, changes, message, tmp_path):
    with pytest.raises(jq.CheckpointError, match=message) as caught:
        opened(tmp_path, CASES[name](64, 96), **changes).read("m.weight")
    assert caught.value.file.endswith("model.safetensors")
    assert caught.value.field.startswith("tensor 'm.")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "hqq"}, "is 'hqq', which is not supported; supported: awq, bitsandbytes"),
        ({}, "quantization_config: is an object without quant_method, which is not supported"),
        ({"quant_method": "awq", "version": "gemv"}, "version: is 'gemv'"),
        ({"quant_method": "awq", "bits": 3}, "bits: is 3"),
        ({"quant_method": "awq", "backend": "llm-awq"}, "backend: is 'llm-awq'"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "is 'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "is 'marlin'"),
        ({"quant_method": "gptq"}, "bits: is missing"),
        ({"quant_method": "fp8", "weight_block_size": [0, 4]}, "expected two positive integers"),
        ({"quant_method": CT, "format": "marlin-24"}, "format: is 'marlin-24'"),
        ({"quant_method": CT, "transform_config": {"config_groups": {}}}, "rotates weights"),
        (
            {"quant_method": CT, "sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config.format: is 'sparse-24-bitmask'",
        ),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo: is 'W4A8_AWQ'"),
    ],
)
def test_settings_that_are_refused(settings, message, tmp_path):
    case = Case(settings, {"weight": np.ones((8, 32), np.float32)}, np.ones(1), np.float32)
    with pytest.raises(jq.CheckpointError, match=message) as caught:
        opened(tmp_path, case)
    assert caught.value.file == "config.json"


# Whole folders.

N, K = 32, 32


def matrices(tensors: Tensors) -> list[str]:
    return [name for name in tensors if "_proj.weight" in name]


def folder_of(
    make: Callable[[int, int], Case], folder: Path, *, beside: bool = False
) -> tuple[Path, Path]:
    """Returns a checkpoint with packed projections, and one with the same weights in float32."""
    folder.mkdir()
    config = json.loads((FOLDER / "config.json").read_text())
    tensors = load_file(FOLDER / "model.safetensors")
    packed, floats = dict(tensors), dict(tensors)
    settings: dict[str, Any] = {}
    for name in matrices(tensors):
        case, module = make(*tensors[name].shape), name.removesuffix(".weight")
        del packed[name]
        packed |= {
            f"{module}.{suffix}": np.asarray(value, order="C")
            for suffix, value in case.tensors.items()
            if value is not None
        }
        rounded = case.want.astype(np.float32).astype(case.dtype)
        floats[name], settings = rounded.astype(np.float32), case.settings
    for kind, held in (("packed", packed), ("floats", floats)):
        (folder / kind).mkdir()
        save_file(held, folder / kind / "model.safetensors")
        described = dict(config)
        if kind == "packed" and beside:
            content = {"producer": {"name": "modelopt"}, "quantization": settings}
            (folder / kind / "hf_quant_config.json").write_text(json.dumps(content))
        elif kind == "packed":
            described["quantization_config"] = settings
        (folder / kind / "config.json").write_text(json.dumps(described))
    return folder / "packed", folder / "floats"


FOLDERS = ["awq", "gptq-act-order", "fp8-tensor", "ct-int4-zeros", "bnb-nested", "bnb-int8"]
TOKENS = np.arange(1, 9)[None]


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("name", FOLDERS)
def test_logits_of_folders(name, tmp_path):
    packed, floats = folder_of(CASES[name], tmp_path / "model")
    got, want = models.load(packed), models.load(floats)
    assert nmse(got.logits(TOKENS), want.logits(TOKENS)) <= 1e-11
    assert not np.array_equal(want.logits(TOKENS), models.load(FOLDER).logits(TOKENS))


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("name", ["modelopt-nvfp4", "ct-nvfp4", "ct-mxfp4"])
def test_folders_in_4_bit_floats_keep_their_blocks(name, tmp_path):
    """NVFP4 does if rows are multiples of 64, which only attn_output has; the others are floats."""
    beside = name.startswith("modelopt")  # its settings may be in hf_quant_config.json
    packed, floats = folder_of(CASES[name], tmp_path / "model", beside=beside)
    got, want = models.load(packed), models.load(floats)
    tensors = models.named_tensors(got)
    kept = {n: t.format for n, t in tensors.items() if isinstance(t, jq.QuantizedArray)}
    if name == "ct-mxfp4":
        assert set(kept.values()) == {"MXFP4"} and len(kept) == 7
    else:
        assert kept == {"blk.0.attn_output.weight": "NVFP4"}
        factor = np.asarray(tensors["blk.0.attn_output.scale"])
        assert factor.shape == (1,) and factor.dtype == np.float32 and 0 < factor[0] < 1
    assert nmse(got.logits(TOKENS), want.logits(TOKENS)) <= 1e-9
    split = models.named_tensors(models.load(packed, mesh=jax.make_mesh((2,), ("tp",))))
    for key, tensor in tensors.items():
        jax.tree.map(np.testing.assert_array_equal, split[key], tensor)
    assert not split["blk.0.attn_output.weight"].planes[0].sharding.is_fully_replicated
    models.save_gguf(got, tmp_path / "kept.gguf")
    again = models.load(tmp_path / "kept.gguf")
    np.testing.assert_array_equal(again.logits(TOKENS), got.logits(TOKENS))


def same(packed: Path, floats: Path) -> dict[str, str]:
    """Checks that two folders have the same tensors; returns the formats of those in blocks."""
    with models.CheckpointSource(packed) as got, models.CheckpointSource(floats) as want:
        assert got.tensors.keys() - {f"{name[:-6]}scale" for name in got.formats} == {*want.tensors}
        for name in want.tensors:
            values, expected = got.read(name), np.asarray(want.read(name), np.float32)
            if name in got.formats:
                assert values.format == got.formats[name]
                factor = got.read(f"{name[:-6]}scale") if values.format == "NVFP4" else np.ones(1)
                shaped = factor.reshape(-1, *[1] * (expected.ndim - 1))
                values = np.asarray(values.dequantize()) * shaped
            assert values.shape == expected.shape == got.tensors[name]
            assert nmse(np.asarray(values, np.float32), expected) <= 1e-13, name
        return dict(got.formats)


@pytest.mark.slow("reads folders of many tensors", quick=["*modelopt-nvfp4*"])
@pytest.mark.filterwarnings("ignore:.*skipped, which text generation does not use")
@pytest.mark.parametrize("method", ["modelopt-nvfp4", "fp8-tensor", "awq"])
@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("qwen3moe", {"attn_q", "attn_output", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"}),
        ("mixtral", {"attn_q", "attn_output", "ffn_gate_exps", "ffn_up_exps"}),  # rows of 96
        ("phi3", {"attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up", "ffn_down"}),  # fused
        ("deepseek2", {"attn_q_b", "attn_kv_a_mqa", "attn_output", "ffn_down"}),
        ("qwen35", {"attn_qkv", "attn_gate", "ffn_up"}),  # heads in another order
        ("qwen3vl", {"attn_q", "ffn_down"}),
    ],
)
def test_layouts_of_families(name, kept, method, tmp_path):
    """Fused rows, experts, reordered rows and columns, prefixes of multimodal classes."""
    folder = GOLDEN.parent / "checkpoints"
    cases = {
        key: case
        for file in ("transformers.json", "transformers_hybrids.json")
        for key, case in json.loads((folder / file).read_text()).items()
    }
    case, r = cases[name], seeded(10)
    packed, floats, settings = {}, {}, {}
    for tensor, shape in case["tensors"].items():
        module = tensor.removesuffix(".weight")
        matrix = re.search(r"(_proj\w*|in_proj_\w+|\.w[123])\.weight$", tensor)
        if matrix and "visual" not in tensor and shape[0] % 8 == shape[1] % 32 == 0:
            made = CASES[method](*shape)
            stored = {f"{module}.{key}": value for key, value in made.tensors.items()}
            packed |= {key: np.asarray(value, order="C") for key, value in stored.items()}
            rounded = made.want.astype(np.float32).astype(made.dtype)
            floats[tensor], settings = rounded.astype(np.float32), made.settings
        else:
            packed[tensor] = floats[tensor] = r.standard_normal(shape).astype(np.float32)
    config = case["config"]
    theirs = checkpoints.write(tmp_path / "floats", config, floats)
    config = config | {"quantization_config": settings}
    formats = same(checkpoints.write(tmp_path / "packed", config, packed), theirs)
    if method == "modelopt-nvfp4":
        assert {key.split(".")[2] for key in formats} >= kept
    else:
        assert not formats


@pytest.mark.filterwarnings("ignore:.*rows that are not a multiple")
@pytest.mark.parametrize("name", ["awq", "modelopt-nvfp4", "fp8-tensor"])
def test_folders_are_quantized_as_their_floats(name, tmp_path, recwarn):
    packed, floats = folder_of(CASES[name], tmp_path / "model")
    for kind, source in (("packed", packed), ("floats", floats)):
        models.quantize_file(source, tmp_path / f"{kind}.gguf", "Q8_0")
    got, want = (jq.gguf.read(tmp_path / f"{n}.gguf").tensors for n in ("packed", "floats"))
    scaled = {n.removesuffix("weight") + "scale" for n in want if f"{n[:-6]}scale" in got}
    assert got.keys() == want.keys() | scaled and len(scaled) == (name == "modelopt-nvfp4")
    for tensor, expected in want.items():
        one, other = (
            np.asarray(t.dequantize() if isinstance(t, jq.QuantizedArray) else t, np.float32)
            for t in (got[tensor], expected)
        )
        factor = got.get(f"{tensor[:-6]}scale", np.ones(1))
        assert nmse(one * np.asarray(factor), other) <= 1e-4
    again = [str(w.message) for w in recwarn if "already quantized" in str(w.message)]
    assert len(again) == (name != "fp8-tensor")  # the type in which models are released


def test_files_of_settings_are_downloaded():
    assert {*methods.FILES} <= {*hub.CHECKPOINT}


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("gptq-4", "quantize_config.json"),
        ("awq", "quant_config.json"),
        ("ct-int8", "config.json"),
    ],
)
def test_early_places_of_settings(name, file, tmp_path):
    packed, floats = folder_of(CASES[name], tmp_path / "model")
    config = json.loads((packed / "config.json").read_text())
    settings = config.pop("quantization_config")
    del settings["quant_method"]
    if name == "awq":
        settings = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    if file == "config.json":
        config["compression_config"] = settings
    else:
        (packed / file).write_text(json.dumps(settings))
    (packed / "config.json").write_text(json.dumps(config))
    assert same(packed, floats) == {}


def test_biases_of_zeros_that_gptq_added_are_skipped(tmp_path):
    packed, _ = folder_of(CASES["gptq-4"], tmp_path / "model")
    config = json.loads((packed / "config.json").read_text()) | {"mlp_bias": False}
    (packed / "config.json").write_text(json.dumps(config))
    tensors = load_file(packed / "model.safetensors")
    for part in ("gate", "up", "down"):
        name = f"model.layers.0.mlp.{part}_proj.bias"
        tensors[name] = np.zeros_like(tensors[name])
    save_file(tensors, packed / "model.safetensors")
    assert not [n for n in models.CheckpointSource(packed).tensors if n.endswith("down.bias")]
    tensors[name][3] = 1
    save_file(tensors, packed / "model.safetensors")
    with pytest.raises(jq.CheckpointError, match="down_proj.bias': is not part of a llama model"):
        models.CheckpointSource(packed)


def test_a_file_in_fp8_that_changes_while_it_is_read(tmp_path):
    case = CASES["fp8-tensor"](64, 96)
    weights, file = opened(tmp_path, case), tmp_path / "model.safetensors"
    weights.read("m.weight", slice(0, 8))  # the file stays open
    os.truncate(file, file.stat().st_size - 1000)
    with pytest.raises(jq.CheckpointError, match="tensor 'm.weight.*changed while|safetensors rej"):
        weights.read("m.weight")
    weights = opened(tmp_path, case)
    opened(tmp_path, case, weight=np.ones((64, 90), E4M3))
    with pytest.raises(jq.CheckpointError, match="tensor 'm.weight': changed while"):
        weights.read("m.weight")


def test_experts_in_fp8(tmp_path):
    """A stack of matrices has a grid of scales each."""
    r = seeded(0)
    weight = r.standard_normal((3, 8, 12)).astype(E4M3)
    scale = scales(r, (3, 2, 3), np.float32)
    case = Case({"quant_method": "fp8", "weight_block_size": [4, 4]}, {}, np.ones(1), np.float32)
    weights = opened(tmp_path, case, experts=weight, experts_scale_inv=scale)
    want = weight.astype(np.float32) * scale.repeat(4, 1).repeat(4, 2)
    np.testing.assert_array_equal(weights.read("m.experts"), want)
    np.testing.assert_array_equal(weights.read("m.experts", slice(1, 2)), want[1:2])
    one = scale[:, :1, :1].reshape(3)
    weights = opened(tmp_path, case, experts=weight, experts_scale_inv=one)
    want = weight.astype(np.float32) * one[:, None, None]
    np.testing.assert_array_equal(weights.read("m.experts"), want)
