"""Copies a packed weight from device to device and multiplies by it on each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.gpu_checks.kernels import BAR, nmse

from ..output import devices, split_cpu
from .results import Result, failed, not_run, ok


def copies(simulated: bool, progress: Callable[[str], object]) -> Result:
    """Compares a product on each device with plain JAX on the CPU.

    simulated: on two parts of the CPU, with kernels in the simulator.
    """
    if simulated:
        split_cpu(2)
    elif jq.environment.cuda_devices() < 2:
        return not_run("there is one GPU")
    w: Any = jq.gguf.read(models.demo_path()).tensors["blk.0.ffn_up.weight"]
    x = np.random.default_rng(0).standard_normal((1, w.shape[1]), np.float32)
    with jax.default_device(jax.devices("cpu")[0]), jq.implementation("xla"):
        want = jq.matmul(x, w, activations="q8_1")
    multiply = jax.jit(lambda x, w: jq.matmul(x, w, activations="q8_1"))
    found = devices()
    for device in found:
        progress(f"device {device.id}")
        w = jax.device_put(w, device)  # from the device before
        with jq.implementation("sim" if simulated else "ptx"):
            got = multiply(jax.device_put(x, device), w)
        if got.devices() != {device}:
            return failed(f"a product on device {device.id} ran elsewhere")
        if not (error := nmse(got, want)) <= BAR:
            return failed(f"a product on device {device.id} is wrong: NMSE {error:.1e}")
    return ok(f"a weight copied from one to the next has the same products on {len(found)} devices")
