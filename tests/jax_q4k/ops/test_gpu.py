"""The GPU that a program's kernels are for, and plain JAX for one that cannot run them."""

from __future__ import annotations

import dataclasses
import re
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

import jax_q4k as jq
from jax_q4k.jax_internals import compile_only_devices
from jax_q4k.ops import gpu
from tools import aot

needs_plugin = pytest.mark.skipif(aot.unavailable() is not None, reason=str(aot.unavailable()))


@dataclasses.dataclass
class Gpu:
    """A GPU as JAX describes it; None: this JAX does not say."""

    device_kind: str
    compute_capability: str | None = None
    core_count: int | None = None
    platform: str = "gpu"


@pytest.mark.parametrize(
    "reported, multiprocessors, assumed, sm",
    [
        (Gpu("NVIDIA H100 PCIe", "9.0", 114), 114, False, 90),
        (Gpu("NVIDIA H100 PCIe"), 114, False, 90),
        (Gpu("NVIDIA L40", "8.9", 142), 142, False, 89),
        (Gpu("NVIDIA L40"), 132, True, None),
        (Gpu("NVIDIA of tomorrow", "13.1", 200), 200, False, 131),
        (Gpu("Tesla T4", "7.5", 40), 40, False, 75),
        (Gpu("Tesla V100-SXM2-16GB", "7.0", 80), 80, False, 70),
    ],
)
def test_a_gpu_says_what_it_is(monkeypatch, reported, multiprocessors, assumed, sm):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [reported, Gpu("another")])
    found = gpu.device()
    assert (found.name, found.multiprocessors, found.assumed, found.sm) == (
        reported.device_kind,
        multiprocessors,
        assumed,
        sm,
    )


def test_the_oldest_of_several_gpus_counts():
    old, new = Gpu("NVIDIA A10", "8.6", 72), Gpu("NVIDIA H200", "9.0", 132)
    assert gpu.device([new, old]).name == gpu.device([old, new]).name == "NVIDIA A10"
    assert gpu.device([new, new]).name == "NVIDIA H200"
    assert gpu.device(jax.devices("cpu")).name == gpu.device([]).name == "H200"


def described(name, major, minor, cores):
    """Returns a GPU to compile for: an H200's description with another name and capability."""
    text = (aot.TARGETS / "h200.txtpb").read_text()
    capability = f"major: {major} minor: {minor}"
    changes = {
        r"cuda_compute_capability \{[^}]*\}": f"cuda_compute_capability {{ {capability} }}",
        r"core_count: \d+": f"core_count: {cores}",
        r'device_description_str: "[^"]*"': f'device_description_str: "{name}"',
    }
    for pattern, replacement in changes.items():
        text, count = re.subn(pattern, replacement, text)
        assert count == 1, pattern
    return compile_only_devices(text, 1)[0]


def lowered(device, **options):
    """The text of a product lowered for a device."""
    w = jq.QuantizedArray.zeros("Q4_K", (64, 256))
    x = jax.ShapeDtypeStruct((1, 256), jnp.float32, sharding=SingleDeviceSharding(device))
    call = jq.implementation(**options)(jq.matmul)
    return jax.jit(lambda x: call(x, w)).trace(x).lower(lowering_platforms=("cuda",)).as_text()


def architectures(device):
    """The architectures that kernels of a program for this device need."""
    return {int(sm) for sm in re.findall(r"\.target sm_(\d+)", lowered(device))}


@needs_plugin
def test_kernels_are_for_the_devices_of_the_program():
    assert max(architectures(described("Tesla T4", 7, 5, 40))) <= 75
    assert max(architectures(described("NVIDIA A10", 8, 6, 72))) == 80
    assert max(architectures(described("NVIDIA of tomorrow", 13, 1, 200))) == 80


@needs_plugin
def test_a_gpu_older_than_the_kernels_gets_plain_jax_and_one_warning():
    volta = described("Tesla V100-SXM2-16GB", 7, 0, 80)
    gpu.warn_of.cache_clear()
    reason = r"compute capability 7\.5 or newer, and Tesla V100-SXM2-16GB has 7\.0"
    with pytest.warns(jq.GpuUnavailableWarning, match=f"plain JAX, which is slow, .*{reason}"):
        text = lowered(volta)
    assert "xla.gpu.ptx" not in text and "dot_general" in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lowered(volta)
    with pytest.raises(jq.UnavailableError, match=f"implementation 'ptx': .*{reason}"):
        lowered(volta, name="ptx")
