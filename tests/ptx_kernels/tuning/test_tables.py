"""Tuning tables: valid files, the row that serves a shape, and precedence."""

from __future__ import annotations

import inspect
import json
import os
import typing
from pathlib import Path

import pytest

from ptx_kernels import tuning
from ptx_kernels.kernels import FAMILIES
from ptx_kernels.kernels.family import Rule
from ptx_kernels.kernels.gemm import gemm_rule
from ptx_kernels.kernels.matvec import MatvecConfig, fused_matvec_rule, matvec_rule
from ptx_kernels.tuning import Choice, choose, decide, on_device, tables, target
from ptx_kernels.tuning.tables import Table, TuningTableError


def row(n: int = 4096, columns: int = 4096, m: int = 1, warps: int = 2, **changes) -> dict:
    values = dict(
        kernel="matvec",
        format="Q4_K",
        n=n,
        columns=columns,
        m=m,
        config={"warps": warps},
        seconds=1e-5,
    )
    return values | changes


def fused(**changes) -> dict:
    """Gate and up, where each block quantizes its activations to q8_1."""
    values = dict(
        kernel="fused_matvec",
        formats=["Q4_K", "Q6_K"],
        rows=[64, 32],
        columns=4096,
        m=1,
        floats=True,
    )
    config = {"activations": "inline_q8", "warps": 8, "rows_per_warp": 2, "resident_blocks": 2}
    return values | dict(output="f32", config=config, seconds=1e-5) | changes


def file(*rows: dict, **changes) -> str:
    return json.dumps({"device": "NVIDIA H200", "source": "measured", "rows": rows} | changes)


def table(*rows: dict, **changes) -> Table:
    return tables.parse(file(*rows, **changes), "t.json")


def test_a_row_holds_some_fields_of_a_config():
    (found,) = table(row(why="latency"), driver="13.0", commit="abc").rows
    assert found.config == MatvecConfig(warps=2)
    assert (found.seconds, found.why) == (1e-5, "latency")


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "t.json: not JSON"),
        ("[" * 100_000, "t.json: not JSON"),
        ("[]", r"t.json: \[\] must be of type dict"),
        ("{}", "t.json: source is missing"),
        (file(source="guessed"), "source: 'guessed' must be one of measured, model"),
        (file(device=3), "device: 3 must be of type str"),
        (file(rows={}), "rows: {} must be of type list"),
        (file(row(), 7), "row 1: 7 must be of type dict"),
        (file(row(kernel="matmul")), "row 0: kernel: 'matmul' must be one of matvec"),
        (file(row(n="1")), "row 0: n: '1' must be of type int"),
        (file(row(m=True)), "row 0: m: True must be of type int"),
        (file(row(columns=0)), "row 0: columns=0 must be positive"),
        (file(row(seconds=float("nan"))), "row 0: seconds=nan must be positive and below 1.79"),
        (file(row(seconds=10**400)), "row 0: seconds=1000.* must be positive and below 1.79"),
        (file(row(config={"warp": 2})), "row 0: config: 'warp' must be one of "),
        (file(row(config={"warps": 2.5})), "row 0: config: warps: 2.5 must be of type int"),
        (file(row(config={"activations": "f32"})), "row 0: activations='f32' must be 'q8_1'"),
        (file(row(config={"lanes": 5})), r"row 0: config.py:\d+: lanes=5 must be one of"),
        (file(row(config={"persistent": -1})), "persistent=-1 must be a number of blocks"),
        (file(row(format="Q9_K")), "row 0: format='Q9_K' must be one of"),
        (file(row(n=10**400)), "row 0: n=1000.* must be positive and below"),
        (file(row(why=1)), "row 0: why: 1 must be of type str"),
        (file({"kernel": "matvec"}), "row 0: format is missing"),
        (file(row(rows=[1])), "row 0: 'rows' must be one of columns, config, format"),
        (file(multiprocessors=0), "t.json: multiprocessors=0 must be positive"),
        (
            file(row(kernel="gemm", m=64, config={"warps": 2})),
            "row 0: config: 'warps' must be one of column_warps",
        ),
        (
            file(row(kernel="gemm", m=64, config={"m_tile": 24})),
            r"row 0: config.py:\d+: m_tile=24 must be 8 or a multiple",
        ),
        (
            file(row(kernel="gemm", m=64, config={"products": "f16"})),
            r"row 0: .*products='f16' must be 'int8'",
        ),
        (
            file(row(kernel="gemm", columns=288, config={})),
            r"row 0: config.py:\d+: columns=288 must be a multiple",
        ),
        (file(fused(formats=[])), "row 0: formats is empty"),
        (file(fused(formats="Q4_K")), "row 0: formats: 'Q4_K' must be of type list"),
        (file(fused(formats=[4])), r"row 0: formats\[0\]: 4 must be of type str"),
        (file(fused(rows=[64, 0])), r"row 0: rows\[1\]=0 must be positive"),
        (file(fused(rows=[64, 64, 64])), r"row 0: rows=\(64, 64, 64\) must be those of each of"),
        (file(fused(floats=1)), "row 0: floats: 1 must be of type bool"),
        (file(fused(floats=False)), "row 0: activations='inline_q8' must be q8_1, or with floats"),
        (file(fused(output="f16")), "row 0: output='f16' must be f32 or q8_1"),
        (file(fused(output="q8_1")), "row 0: q8_1: .* and a block's 16 must be multiples of 32"),
        (
            file(fused(m=8, columns=16384)),
            "row 0: inline_q8: m=8 rows of columns=16384 take more than 98304 bytes",
        ),
    ],
    ids=lambda text: text[:24],
)
def test_bad_tables(text, message):
    with pytest.raises(TuningTableError, match=message):
        tables.parse(text, "t.json")


def test_a_file_that_cannot_be_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(TuningTableError, match=r"pipe\.json: is not a regular file"):
        tables.load(tmp_path / "pipe.json")
    with pytest.raises(TuningTableError, match=r"zero: is not a regular file"):
        tables.load(Path("/dev/zero"))
    with pytest.raises(TuningTableError, match=r"none\.json: No such file"):
        tables.load(tmp_path / "none.json")


@pytest.mark.parametrize(
    "n, columns, m, warps",
    [
        (4096, 4096, 1, 1),
        (5000, 4096, 1, 1),
        (14336, 4096, 1, 2),
        (8192, 4096, 1, 2),  # 0.8 octaves below 14336, 1 above 4096
        (2047, 4096, 1, None),  # farther than an octave
        (4096, 256, 1, None),
        (4096, 4096, 2, 4),  # rows for four serve two and three
        (4096, 4096, 4, 4),
        (4096, 4096, 5, None),
    ],
)
def test_the_nearest_row_serves(n, columns, m, warps):
    t = table(row(warps=1), row(n=14336, warps=2), row(m=4, warps=4), row(format="Q6_K", warps=8))
    found = t.nearest(matvec_rule, "Q4_K", n, columns, m)
    assert (found and found.config.warps) == warps


def test_keys_of_joined_matrices():
    """Formats, their number, and the dtypes of activations and results must match.

    The total rows must be within an octave.
    """
    t = table(
        fused(),
        fused(rows=[64, 128], seconds=2e-5),
        fused(m=4, seconds=3e-5),
        fused(formats=["Q4_K"], rows=[64]),
    )

    def found(
        formats=("Q4_K", "Q6_K"), rows=(64, 32), columns=4096, m=1, floats=True, output="f32"
    ):
        row = t.nearest(fused_matvec_rule, formats, rows, columns, m, floats, output)
        return row and row.seconds

    assert found() == 1e-5 and found(rows=(64, 128)) == 2e-5 and found(m=3) == 3e-5
    assert found(rows=(70, 40), columns=3584) == 1e-5
    assert found(rows=(90, 46), columns=3584) is found(columns=2000) is found(m=5) is None
    assert (
        found(("Q6_K", "Q4_K"))
        is found(floats=False)
        is found(output="q8_1")
        is found(rows=(64,))
        is None
    )


@pytest.mark.parametrize("config", [{"activations": "inline_q8"}, {"persistent": 3}, {}], ids=str)
def test_configs_that_divide_rows_evenly_serve_no_other_rows(config):
    """Serves no other row counts if its Config divides rows evenly; columns and m may differ."""
    (found,) = table(fused(config=config)).rows
    known = tables.OVERRULED["fused_matvec"]
    for rows, columns, served in (
        ((64, 32), 4096, True),
        ((64, 32), 3584, True),
        ((65, 32), 4096, not config),
    ):
        shape = ("Q4_K", "Q6_K"), rows, columns, 1, True, "f32"
        assert tables.serves(known, found, shape) is served


def test_keys_of_prompts():
    """Serves up to twice as many rows of activations, with a tile that holds them."""
    gemm = dict(kernel="gemm", config={})
    t = table(
        row(m=16, seconds=1e-5, **gemm),
        row(m=64, seconds=2e-5, **gemm),
        row(n=8192, m=64, seconds=3e-5, **gemm),
    )
    seconds = {
        m: (r := t.nearest(gemm_rule, "Q4_K", 4096, 4096, m)) and r.seconds
        for m in (8, 9, 16, 17, 32, 64, 65)
    }
    assert seconds == {8: 1e-5, 9: 1e-5, 16: 1e-5, 17: None, 32: 2e-5, 64: 2e-5, 65: None}
    assert t.nearest(gemm_rule, "Q4_K", 6000, 4096, 64).seconds == 3e-5


def test_tables_know_their_device():
    h200 = table(device="NVIDIA H200")
    assert h200.is_for("NVIDIA H200", 132) and h200.is_for("H200", 132)
    assert not h200.is_for("NVIDIA H100 80GB HBM3", 132)
    assert not h200.is_for("NVIDIA H200 MIG 1g.18gb", 16)
    unknown = table(device="NVIDIA L40S")
    assert unknown.is_for("NVIDIA L40S", 142) and not unknown.is_for("NVIDIA L4", 142)
    part = table(device="NVIDIA H100 PCIe", multiprocessors=114)
    assert part.is_for("NVIDIA H100 PCIe", 114) and not part.is_for("NVIDIA H100 80GB HBM3", 132)


def _of_16_warps(format: str, n: int, columns: int, m: int) -> MatvecConfig:
    return MatvecConfig(warps=16)


#: A rule that rows of mat-vecs override.
RULE = Rule("matvec", _of_16_warps, matvec_rule.rows)


def matvec(format: str, n: int, columns: int, m: int) -> MatvecConfig:
    return choose(RULE, format, n, columns, m)


def test_measured_before_model_before_rule(monkeypatch):
    model = table(row(warps=1), row(n=512, warps=2, why="latency"), source="model", device="H200")
    measured = table(row(warps=3))
    monkeypatch.setattr(tables, "packaged", lambda: (measured, model))
    for n, warps, why in [
        (4096, 3, "measured for NVIDIA H200 (t.json), this shape: 10.00 us"),
        (
            600,
            2,
            "model for H200 (t.json), the nearest shape, n=512 columns=4096 m=1: 10.00 us, latency",
        ),
        (64, 16, "rule matvec, no table for H200 has the shape"),
    ]:
        expected = Choice("matvec", ("Q4_K", n, 4096, 1), MatvecConfig(warps=warps), why)
        assert decide(RULE, "Q4_K", n, 4096, m=1) == expected
    assert matvec("Q4_K", 64, 4096, 1) == MatvecConfig(warps=16)
    with on_device(target("NVIDIA L40S")):
        assert matvec("Q4_K", 4096, 4096, 1) == MatvecConfig(warps=16)
    assert matvec("Q4_K", 4096, 4096, 1) == MatvecConfig(warps=3)


def test_a_config_that_does_not_go_with_the_shape_is_left_out(monkeypatch):
    monkeypatch.setattr(tables, "packaged", lambda: (table(row(n=2, config={"rows_per_warp": 2})),))
    assert matvec("Q4_K", 2, 4096, 1).rows_per_warp == 2
    assert matvec("Q4_K", 1, 4096, 1) == MatvecConfig(warps=16)


def test_the_users_table_comes_first(monkeypatch, tmp_path):
    monkeypatch.setattr(tables, "packaged", lambda: (table(row(warps=3)),))
    path = tmp_path / "mine.json"
    path.write_text(file(row(warps=5)))
    monkeypatch.setenv(tuning.VARIABLE, str(path))
    assert matvec("Q4_K", 4096, 4096, 1) == MatvecConfig(warps=5)
    with on_device(target("NVIDIA A100-SXM4-80GB")):
        assert matvec("Q4_K", 4096, 4096, 1) == MatvecConfig(warps=16)
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    monkeypatch.setenv(tuning.VARIABLE, str(bad))
    with pytest.raises(TuningTableError, match=r"bad\.json: source is missing"):
        matvec("Q4_K", 4096, 4096, 1)


def test_packaged_tables_are_sound():
    found = tables.packaged()
    assert [t.source for t in found] == sorted((t.source for t in found), key=tables.SOURCES.index)
    for t in found:
        shapes = [(r.kernel, *r.shape) for r in t.rows]
        assert len(set(shapes)) == len(shapes)


def test_rules_of_no_family_may_have_rows(monkeypatch):
    """Tables have no rows for them."""
    monkeypatch.setattr(tables, "packaged", lambda: (table(row()),))
    mine = Rule("mine", _of_16_warps, matvec_rule.rows)
    assert decide(mine, "Q4_K", 4096, 4096, 1).config == MatvecConfig(warps=16)


def test_a_rule_without_rows_accepts_none_and_has_no_keys():
    shape = "Q4_K", 4096, 4096, 1
    assert matvec_rule.accepts(MatvecConfig(), shape)
    assert not matvec_rule.accepts(MatvecConfig(lanes=5), shape)
    mine = Rule("mine", _of_16_warps)
    assert not mine.accepts(MatvecConfig(), shape) and not mine.keys
    assert table(row()).nearest(mine, *shape) is None


def test_choices_are_recorded():
    splits = Rule("splits", lambda columns, most=8: min(columns // 2, most))
    with tuning.recorded() as made:
        assert choose(splits, 6) == 3
        assert decide(splits, 100).config == 8  # not recorded
    assert made == [Choice("splits", (6, 8), 3, "rule splits")]
    assert str(made[0]) == "splits(6, 8) -> 3: rule splits"
    assert choose(splits, 6) == 3 and len(made) == 1
    assert (
        str(Choice("matvec", (1,), MatvecConfig(warps=2), "so"))
        == "matvec(1) -> MatvecConfig(warps=2): so"
    )


def test_rows_are_keyed_by_their_rules_arguments():
    for rule in (rule for family in FAMILIES.values() for rule in family.rules if rule.rows):
        parameters = [name for name in inspect.signature(rule.function).parameters]
        assert [name for name in parameters if name != "device"] == list(rule.rows.keys)
        assert typing.get_type_hints(rule.function)["return"] is rule.rows.config
