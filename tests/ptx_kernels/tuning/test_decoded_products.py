"""Lengths from which weights are decoded for XLA's product, and overrides by tables."""

from __future__ import annotations

import json
import os

import pytest

from ptx_kernels.devices import DEVICES, REFERENCE, target
from ptx_kernels.kernels.gemm import decoded_products_rule, dot_seconds
from ptx_kernels.limits import MAX_F16_ROW
from ptx_kernels.tuning import VARIABLE, choose, decide, on_device, tables
from ptx_kernels.tuning.tables import TuningTableError

#: formats, rows, columns of the layers of an 8B model, and the length at which they are decoded
SHAPES = [
    (("Q4_K", "Q4_K", "Q4_K"), (4096, 1024, 1024), 4096, 1024),
    (("Q4_K",), (4096,), 4096, 384),
    (("Q4_K", "Q4_K"), (14336,), 4096, 256),
    (("Q4_K",), (4096,), 14336, 384),
    (("Q6_K",), (4096,), 14336, 384),
]


def decoded(*shape: object) -> bool:
    return choose(decoded_products_rule, *shape).decoded


@pytest.mark.parametrize(("formats", "rows", "columns", "length"), SHAPES, ids=str)
def test_from_a_length_on(formats, rows, columns, length):
    assert not any(decoded(formats, rows, columns, m) for m in (1, 8, 64, 128, length // 2))
    longer = [m for m in (384, 512, 576, 640, 1024, 2048, 8192, 32768) if m > length]
    assert all(decoded(formats, rows, columns, m) for m in (length, *longer))


def test_formats_without_halves():
    """Kernels multiply them by int8 activations with scales per 32 columns. Not measured."""
    assert not decoded(("Q8_0",), (4096,), 4096, 192)
    assert all(decoded(("Q8_0",), (4096,), 4096, m) for m in (256, 640, 1024, 4096))


@pytest.mark.parametrize("name", [*DEVICES, "Unheard Of"])
def test_devices_with_a_known_rate_of_products(name):
    known = DEVICES.get(name) is not None and DEVICES[name].dot_float_ops is not None
    assert known == (name in ("H100", "H200", "GH200"))
    device = target(f"NVIDIA {name}")
    with on_device(device):
        assert all(decoded(*shape, 8192) == (known or device.turing) for *shape, _ in SHAPES)


def test_turing_decodes_all_but_few_rows():
    with on_device(target("Unheard Of", capability=75)):
        for *shape, _ in SHAPES:
            assert [decoded(*shape, m) for m in (8, 64, 65, 8192)] == [False, False, True, True]
        assert not decoded(("Q4_K",), (4092,), 4096, 8192)


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        ((4096,), 2 * MAX_F16_ROW),  # no block holds a row
        ((2 * MAX_F16_ROW,), 4096),  # no block holds a row of the gated result
        ((4092,), 4096),  # rows of results may start anywhere
    ],
)
def test_shapes_without_kernels_are_not_decoded(rows, columns):
    assert not decoded(("Q4_K",), rows, columns, 8192)


@pytest.mark.parametrize("formats", [("IQ2_XXS",), ("IQ2_XXS", "Q4_K")], ids=str)
def test_formats_without_tensor_cores_are_decoded_early(formats):
    """Otherwise it would be decoded to float32."""
    assert not decoded(formats, (4096,), 4096, 64)
    assert all(decoded(formats, (4096,), 4096, m) for m in (256, 512, 4096))


def _table(tmp_path, monkeypatch, **changes):
    row = dict(kernel="decoded_products", formats=["Q4_K"], rows=[4096], columns=4096, m=1024)
    row |= dict(config={"decoded": True}, seconds=7e-5) | changes
    path = tmp_path / "table.json"
    file = {"device": REFERENCE.name, "source": "measured", "rows": [row]}
    path.write_text(json.dumps(file))
    monkeypatch.setenv(VARIABLE, str(path))


@pytest.mark.parametrize("says", [True, False])
def test_a_table_overrules_the_model(says, tmp_path, monkeypatch):
    """A row decides within an octave of its length."""
    _table(tmp_path, monkeypatch, config={"decoded": says}, m=160 if says else 4096)
    shape = ("Q4_K",), (4096,), 4096
    for m in (100, 160, 300) if says else (2100, 4096, 8000):
        choice = decide(decoded_products_rule, *shape, m)
        assert choice.config.decoded == says and choice.why.startswith("measured for H200")
    assert decide(decoded_products_rule, *shape, 1000).why.startswith("rule decoded_products")


def test_a_table_that_changes_is_read_again(tmp_path, monkeypatch):
    """The process rereads a changed file with the same name."""
    for says in (True, False, True):
        _table(tmp_path, monkeypatch, config={"decoded": says})
        os.utime(tmp_path / "table.json", ns=(0, 1000 + says))
        assert decide(decoded_products_rule, ("Q4_K",), (4096,), 4096, 1024).config.decoded == says


def test_a_table_cannot_ask_for_what_there_is_not(tmp_path, monkeypatch):
    _table(tmp_path, monkeypatch, rows=[4092])
    with pytest.raises(TuningTableError, match=r"rows=\(4092,\) and columns=4096 must be"):
        decide(decoded_products_rule, ("Q4_K",), (4096,), 4096, 1024)
    assert "decoded_products" in tables.OVERRULED


def test_seconds_of_a_product():
    """Full rounds of tiles run at the rate; a last round that is half empty takes as long."""
    whole = dot_seconds(REFERENCE, 128 * 12, 4096, 128 * 11)
    assert whole == pytest.approx(2 * 128 * 12 * 128 * 11 * 4096 / 700e12)
    assert dot_seconds(REFERENCE, 128 * 12, 4096, 128 * 11 + 1) == pytest.approx(2 * whole)
    with pytest.raises(ValueError, match="A100: dot_float_ops is not known"):
        dot_seconds(DEVICES["A100"], 128, 128, 128)
