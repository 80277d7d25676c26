"""`explain`: a program's kernels and the reasons for them, without running it."""

from __future__ import annotations

import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_q4k as jq
from ptx_kernels import formats
from ptx_kernels.kernels.gemm import GemmConfig
from ptx_kernels.kernels.matvec import MatvecConfig
from ptx_kernels.tuning import tables


def floats(*shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def packed(format: str, n: int, k: int) -> jq.QuantizedArray:
    block = formats.get(format)
    planes = (
        floats(n, k // block.block_size, p.bytes_per_block, dtype=jnp.uint8) for p in block.planes
    )
    return jq.QuantizedArray(format, (n, k), tuple(planes))


def test_a_matmul_on_a_gpu_that_is_not_there():
    found = jq.explain(jq.matmul, floats(1, 512), packed("Q4_K", 64, 512), platform="cuda")
    (call,) = found.calls
    assert (call.name, call.count, call.implementation, call.runnable) == (
        "packed_matmul",
        1,
        "ptx",
        True,
    )
    assert [kernel.family for kernel in call.kernels] == ["matvec"]
    (chosen,) = (choice for choice in call.chosen if choice.rule == "fused_matvec")
    assert chosen.config == call.kernels[0].arguments["config"]
    text = str(found)
    assert text.startswith(
        "on cuda (H200: 132 multiprocessors): 1 kinds of calls, 1 calls, 1 launches of PTX"
    )
    for part in (
        "packed_matmul x1: f32[1,512], Q4_K[64,512] -> f32[1,64]",
        "ptx: the default on cuda",
        "launch matvec_q4_k_m1: 8 blocks of 256 threads",
        "chosen fused_matvec(('Q4_K',), (64,), ",
        "otherwise xla: needs jax_q4k.implementation('xla')\n",
        "otherwise sim: needs jax_q4k.implementation('sim') and a cpu device",
    ):
        assert part in text


def test_prompts_are_float16_where_that_is_fastest():
    x, w = floats(256, 4096), packed("Q4_K", 4096, 4096)
    of = {
        (device, activations): jq.explain(
            jq.matmul, x, w, platform="cuda", device=device, activations=activations
        )
        for device in ("NVIDIA H200", "NVIDIA A100")
        for activations in (None, "q8_1")
    }
    families = {
        key: [kernel.name for kernel in found.calls[0].kernels] for key, found in of.items()
    }
    assert families.pop(("NVIDIA H200", None)) == ["quantize_f16", "gemm_q4_k_f16_m64"]
    assert set(map(tuple, families.values())) == {("quantize_q8_1", "gemm_q4_k_m64")}
    told = str(of["NVIDIA H200", None])
    assert "chosen f16_products(" in told and "chosen fused_gemm(" in told


def test_a_table_decides_for_its_device_alone(monkeypatch):
    row = tables.Row("matvec", ("Q4_K", 64, 14336, 2), MatvecConfig(warps=2), 3e-6)
    monkeypatch.setattr(
        tables, "packaged", lambda: (tables.Table("a/l4.json", "NVIDIA L40", "measured", (row,)),)
    )

    def reason(device: str) -> str:
        found = jq.explain(
            jq.matmul, floats(2, 14336), packed("Q4_K", 64, 14336), platform="cuda", device=device
        )
        return next(choice.why for choice in found.calls[0].chosen if choice.rule == "matvec")

    assert reason("NVIDIA L40") == "measured for NVIDIA L40 (l4.json), this shape: 3.00 us"
    assert (
        reason("NVIDIA H200")
        == "rule matvec for 132 multiprocessors, no table for NVIDIA H200 has the shape"
    )


def test_the_device_decides_and_choices_for_another_leave_no_trace():
    def found(device: str | None) -> tuple[int, str]:
        x, w = floats(65, 4096), packed("Q4_K", 12544, 4096)
        asked = {"platform": "cuda", "device": device, "activations": "q8_1"}
        (call,) = jq.explain(jq.matmul, x, w, **asked).calls
        (chosen,) = (choice for choice in call.chosen if choice.rule == "gemm")
        assert call.kernels[-1].arguments["config"] == chosen.config
        return chosen.config.rows, chosen.why

    rows = {
        name: found(name)
        for name in ("NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 5090", "NVIDIA L40", None)
    }
    assert rows["NVIDIA A100-SXM4-80GB"][0] > rows["NVIDIA GeForce RTX 5090"][0]
    assert rows["NVIDIA L40"][0] == rows[None][0]
    assert rows["NVIDIA GeForce RTX 5090"][1].startswith(
        "rule gemm for 170 multiprocessors, no table"
    )
    assert "132 multiprocessors of an H200, NVIDIA L40 being unknown" in rows["NVIDIA L40"][1]
    for name, before in rows.items():
        assert found(name) == before


def test_calls_are_counted_through_control_flow():
    w, square = packed("Q4_K", 64, 256), packed("Q6_K", 256, 256)

    @jax.jit
    def program(x, w, square):
        def twice(x, _):
            return jq.matmul(jq.matmul(x, square), square), None

        x, _ = jax.lax.scan(twice, x, None, length=5)
        x = jax.lax.while_loop(lambda x: x.sum() < 0, lambda x: jq.matmul(x, square), x)
        x = jax.lax.cond(
            x.sum() > 1, lambda x: x, lambda x: jq.implementation("xla")(jq.matmul)(x, square), x
        )
        return jq.matmul(x, w)

    found = jq.explain(program, floats(1, 256), w, square, platform="cuda")
    assert [(call.operands[1], call.implementation, call.count) for call in found.calls] == [
        ("Q6_K[256,256]", "ptx", 11),
        ("Q6_K[256,256]", "xla", 1),
        ("Q4_K[64,256]", "ptx", 1),
    ]
    assert found.launches == 12
    assert found.calls[1].why == "selected by name" and found.calls[1].kernels == ()
    assert found.calls[1].xla["dot_general"] == 1


@pytest.mark.parametrize(
    "call, launches",
    [
        (lambda x, w, norm: jq.matmul(x, w), ["matvec"]),
        (lambda x, w, norm: jq.rms_norm_matmul(x, norm, w, eps=1e-5, residual=x), ["matvec"]),
        (lambda x, w, norm: jq.qkv_matmul(x, [w, w]), ["qkv_matvec"]),
        (lambda x, w, norm: jq.gated_matmul(x, w, w), ["gated_matvec"]),
        (lambda x, w, norm: jq.mlp(x, w, w, w, residual=x), ["gated_matvec", "matvec"]),
    ],
)
@pytest.mark.parametrize("rows", [1, 8])
def test_f32_activations_of_few_rows_are_multiplied_by_packed_weights(call, launches, rows):
    x, w, norm = floats(rows, 512), packed("Q4_K", 512, 512), floats(512)
    found = jq.explain(
        lambda *args: jq.implementation(activations="f32")(call)(*args), x, w, norm, platform="cuda"
    )
    (of,) = found.calls
    assert [kernel.family for kernel in of.kernels] == launches and "dot_general" not in of.xla
    configs = [kernel.arguments["config"] for kernel in of.kernels]
    assert {config.activations for config in configs} == {"f32"}
    assert "chosen float_matvec(('Q4_K'" in str(found)


def test_xla_operations_around_kernels_are_shown():
    x, w = floats(9, 256), packed("Q5_1", 8, 256)
    (call,) = jq.explain(jq.matmul, x, w, activations="f32", platform="cuda").calls
    assert [kernel.family for kernel in call.kernels] == ["decode"]
    assert call.xla["dot_general"] == 1


def test_calls_that_cannot_run_are_reported():
    with jq.implementation("ptx"):
        found = jq.explain(jq.matmul, floats(1, 256), packed("Q4_K", 8, 256))
    (call,) = found.calls
    assert (found.platform, call.runnable) == ("cpu", False)
    assert (
        call.why == "selected by name, but it runs on cuda only: lowering raises UnavailableError"
    )
    assert re.match(r"on cpu \(.*\): 1 kinds of calls, 1 calls, 1 launches", str(found))


def test_other_operations():
    pages, table = floats(8, 2, 16, 64, dtype=jnp.bfloat16), floats(3, 4, dtype=jnp.int32)
    found = jq.explain(
        jq.paged_attention,
        floats(3, 8, 64),
        pages,
        pages,
        table,
        floats(3, dtype=jnp.int32),
        platform="cuda",
    )
    assert [choice.rule for choice in found.calls[0].chosen] == ["paged_attention"]
    assert jq.explain(lambda x: x + 1, floats(3)).calls == ()


def attention_and_product(rows: int):
    pages, table = floats(8, 2, 16, 64, dtype=jnp.bfloat16), floats(rows, 4, dtype=jnp.int32)
    given = floats(rows, 8, 64), pages, pages, table, floats(rows, dtype=jnp.int32)
    return jq.explain(jq.paged_attention_matmul, *given, packed("Q4_K", 4096, 512), platform="cuda")


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize(
    "found",
    [
        lambda rows: jq.explain(
            jq.matmul, floats(rows, 4096), packed("Q4_K", 4096, 4096), platform="cuda"
        ),
        attention_and_product,
    ],
    ids=["matmul", "paged_attention_matmul"],
)
def test_chosen_configs_are_launched(found, rows):
    (call,) = found(rows).calls
    launched = [kernel.arguments.get("config") for kernel in call.kernels]
    chosen = [c.config for c in call.chosen if isinstance(c.config, MatvecConfig | GemmConfig)]
    assert chosen and all(config in launched for config in chosen)


def test_times_are_predicted_if_asked_for():
    found = jq.explain(
        jq.matmul, floats(2, 14336), packed("Q4_K", 64, 14336), platform="cuda", predict=True
    )
    quantize, product = found.calls[0].figures
    assert (product.family, product.device) == ("matvec", "H200") and 2e-6 < product.seconds < 1e-5
    us = quantize.seconds * 1e6
    assert (
        "threads, 64 KB of shared memory per multiprocessor;"
        f" predicted {us:.1f} us ({0.6 * us:.1f} to {1.9 * us:.1f}), {quantize.bound} bound (H200)"
    ) in " ".join(str(found).split())
    assert quantize.shared_split == product.shared_split == 64 << 10
    with pytest.raises(ValueError, match="device='NVIDIA L40' must be one of H200"):
        jq.explain(
            jq.matmul, floats(1, 512), packed("Q4_K", 64, 512), device="NVIDIA L40", predict=True
        )


@pytest.mark.slow("assembles many kernels")
def test_machine_code_is_read_only_where_it_is_asked_for():
    program = (
        "import sys, jax, jax.numpy as jnp, jax_q4k as jq\n"
        "x = jax.ShapeDtypeStruct((2, 64), jnp.float32)\n"
        "assert jq.explain(jq.argmax, x, platform='cuda').launches == 1\n"
        "print([name for name in sys.modules if name.startswith('ptx_kernels.machine_code')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_an_unknown_platform():
    with pytest.raises(ValueError, match="platform='tpu' must be cuda, cpu or None"):
        jq.explain(jq.matmul, floats(1, 256), packed("Q4_K", 8, 256), platform="tpu")


def test_a_device_that_is_no_name():
    with pytest.raises(TypeError, match="device=5 must be a name as the driver reports it"):
        jq.explain(jq.matmul, floats(1, 256), packed("Q4_K", 8, 256), device=5)


def lying(kind: AxisType, operand, *spec):
    """Shards an operand over two data-parallel groups of four devices."""
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(kind, kind))
    return jax.device_put(operand, NamedSharding(mesh, P(*spec)))


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_operands_gathered_from_several_devices_are_reported(kind):
    x = jnp.ones((8, 1024))
    w = jq.quantize(jnp.ones((64, 1024)), "Q4_K")
    stays = jq.explain(jq.matmul, lying(kind, x, "dp"), lying(kind, w, "tp"))
    assert not stays.gathers and "gathered" not in str(stays)
    moves = jq.explain(jq.matmul, lying(kind, x, "dp"), lying(kind, w, None, None, "tp"))
    assert str(moves).endswith(
        "gathered from several devices:\n  packed_matmul: u8[64,4,144] over 'tp', x1"
    )
    q = lying(kind, jnp.ones((1, 16, 8, 64)), None, "dp", "tp")
    ((gather, count),) = jq.explain(jq.causal_attention, q, q, q, jnp.array([16])).gathers
    assert (gather.axes, gather.operand, count) == (("dp",), "f32[1,16,8,64]", 3)


def test_a_loop_gathers_as_often_as_it_runs():
    w = lying(AxisType.Explicit, jq.quantize(jnp.ones((64, 1024)), "Q4_K"), None, None, "tp")

    def program(x):
        return jax.lax.scan(lambda total, _: (total + jq.matmul(x, w).sum(), None), 0.0, length=5)

    ((_, count),) = jq.explain(program, jnp.ones((8, 1024))).gathers
    assert count == 5
