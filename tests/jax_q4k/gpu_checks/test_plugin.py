"""Why JAX does not use the GPUs that the driver has, and what to install."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import jax
import pytest

from jax_q4k.gpu_checks import plugin
from ptx_kernels import driver


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch):
    """Returns a function (CUDA version of the driver, CUDA versions of plugins) -> problem."""
    monkeypatch.setattr(plugin, "platforms_without_gpu", lambda: None)

    def said(cuda: tuple[int, int], *plugins: int, capabilities=(80,)) -> str | None:
        monkeypatch.setattr(plugin, "installed_plugins", lambda: dict.fromkeys(plugins, "0.10"))
        return plugin.problem(driver.Installed(cuda, capabilities))

    return said


def test_a_plugin_for_a_newer_driver(said):
    assert said((12, 4), 13) == (
        "JAX does not use the GPU: jax-cuda13-plugin needs a driver for CUDA 13, and this one is "
        "for CUDA 12.4: pip install '.[cuda12]' in a clone, after pip uninstall jax-cuda13-plugin"
    )


@pytest.mark.parametrize(
    "cuda, advice",
    [
        ((13, 1), "pip install '.[cuda13]' in a clone"),
        ((14, 0), "pip install '.[cuda13]' in a clone"),
        ((12, 0), "pip install '.[cuda12]' in a clone"),
        ((11, 8), "install a driver for CUDA 12 or newer"),
    ],
)
def test_no_plugin(said, cuda, advice):
    assert said(cuda) == (f"JAX does not use the GPU, because its CUDA plugin is missing: {advice}")


def test_a_plugin_that_does_not_start(said, monkeypatch):
    """JAX logs the error and uses the CPU."""

    def devices():
        logger = logging.getLogger("jax._src.xla_bridge")
        try:
            raise RuntimeError("Unable to load cuDNN.\nIs it installed?")
        except RuntimeError:
            logger.exception("Jax plugin configuration error")
        logger.warning("An NVIDIA GPU may be present")
        return [SimpleNamespace(platform="cpu")]

    monkeypatch.setattr(jax, "devices", devices)
    assert said((13, 0), 13) == (
        "JAX does not use the GPU: jax-cuda13-plugin does not start: Unable to load cuDNN. Is it "
        "installed?"
    )
    assert not [h for h in logging.getLogger("jax").handlers if "Listening" in type(h).__name__]


def test_a_backend_that_does_not_start(said, monkeypatch):
    def devices():
        raise RuntimeError("Unable to initialize backend 'cuda'")

    monkeypatch.setattr(jax, "devices", devices)
    assert str(said((13, 0), 12, 13)).endswith(
        "jax-cuda13-plugin does not start: Unable to initialize backend 'cuda'"
    )


def test_no_problem(said, monkeypatch):
    assert plugin.problem(None) is None
    assert said((12, 4), capabilities=()) is None
    with monkeypatch.context() as patched:
        patched.setattr(plugin, "platforms_without_gpu", lambda: "cpu")
        assert said((12, 4)) is None
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(platform="gpu")])
    assert said((12, 4)) is None


@pytest.mark.parametrize("named, kept", [("cpu", "cpu"), ("cuda,cpu", None), (None, None)])
def test_platforms_that_jax_is_told_to_use(monkeypatch, named, kept):
    monkeypatch.setattr(type(jax.config), "jax_platforms", named, raising=False)
    assert plugin.platforms_without_gpu() == kept
