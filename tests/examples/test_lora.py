"""The example that trains LoRA adapters on packed weights."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support.helpers import nmse
from support.paths import GOLDEN

import jax_q4k as jq
from examples import lora
from jax_q4k import QuantizedArray, models

pytestmark = pytest.mark.cpu_kernels

GGUF = GOLDEN / "llama-gqa.Q4_K_M.gguf"


def adapted_decoder(rank=2):
    decoder = models.from_gguf(GGUF).decoder()
    lora.add_adapters(decoder, rank, nnx.Rngs(0))
    return decoder


def base_weights(decoder):
    """All parameters but the adapters, as host arrays."""
    _, _, rest = nnx.split(decoder, nnx.LoRAParam, ...)
    return jax.tree.map(np.asarray, jax.tree.leaves(rest))


def rows(decoder, batch=2, time=12):
    return jax.random.randint(jax.random.key(1), (batch, time), 0, decoder.config.vocab_size)


@pytest.mark.slow("compiles a model twice")
def test_adapters_change_nothing_at_first():
    plain = models.from_gguf(GGUF)
    tokens = rows(plain)
    with jq.implementation("xla"):  # kernels round differently from a fused program
        np.testing.assert_array_equal(
            jax.jit(adapted_decoder().__call__)(tokens), jax.jit(plain.decoder().__call__)(tokens)
        )


@pytest.mark.slow("trains for twenty steps")
def test_loss_falls_and_the_packed_weights_stay_bit_for_bit():
    decoder = adapted_decoder()
    assert isinstance(
        decoder.layers[0].attention.query.base_module.weight.get_value(), QuantizedArray
    )
    before, tokens = base_weights(decoder), rows(decoder)
    optimizer = nnx.Optimizer(decoder, optax.adamw(1e-2), wrt=nnx.LoRAParam)
    losses = [float(lora.train_step(decoder, optimizer, tokens)) for _ in range(8)]
    assert float(lora.loss(decoder, tokens)) < losses[0] - 0.1
    after = base_weights(decoder)
    assert len(before) == len(after)
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.slow("compiles two training steps")
@pytest.mark.usefixtures("exact")
def test_gradient_is_that_of_the_model_with_decoded_weights():
    decoder = adapted_decoder()
    # with b = 0, a would have no gradient
    for seed, adapter in enumerate(lora.adapters(decoder).values()):
        adapter.set_value(jax.random.normal(jax.random.key(seed), adapter.get_value().shape) / 16)
    tokens = rows(decoder)
    gradient = nnx.jit(nnx.grad(lora.loss, argnums=nnx.DiffState(0, nnx.LoRAParam)))
    packed = jax.tree.leaves(gradient(decoder, tokens))
    for _, module in nnx.iter_modules(decoder):
        if isinstance(getattr(module, "weight", None), nnx.Variable):
            weight = module.weight.get_value()
            module.weight = nnx.Param(
                weight.dequantize() if isinstance(weight, QuantizedArray) else weight
            )
    decoded = jax.tree.leaves(gradient(decoder, tokens))
    assert len(packed) == len(decoded) == 2 * 4 * decoder.config.num_layers
    for got, want in zip(packed, decoded, strict=True):
        assert jnp.any(want != 0) and nmse(got, want) <= 1e-8


@pytest.mark.slow("runs an example")
def test_saved_adapters_are_loaded(tmp_path):
    saved, path = adapted_decoder(), tmp_path / "lora.safetensors"
    for adapter in lora.adapters(saved).values():
        adapter.set_value(adapter.get_value() + 0.5)
    lora.save_adapters(saved, path)
    loaded = adapted_decoder()
    lora.load_adapters(loaded, path)
    np.testing.assert_array_equal(loaded(rows(loaded)), saved(rows(saved)))
    with pytest.raises(ValueError, match=r"lora.safetensors holds adapters.*--rank"):
        lora.load_adapters(adapted_decoder(rank=3), path)


@pytest.mark.parametrize("value", [np.float32(np.nan), np.int32(1)])
def test_adapters_that_are_no_finite_floats(tmp_path, value):
    decoder, path = adapted_decoder(), tmp_path / "lora.safetensors"
    for adapter in lora.adapters(decoder).values():
        adapter.set_value(jnp.full(adapter.get_value().shape, value))
    lora.save_adapters(decoder, path)
    with pytest.raises(ValueError, match=r"lora.safetensors must hold finite float32 numbers"):
        lora.load_adapters(adapted_decoder(), path)


@pytest.mark.parametrize("option", ["--rank", "--batch", "--row-length", "--type"])
def test_bad_options_end_before_any_work(option, capsys):
    with pytest.raises(SystemExit) as ended:
        lora.main(["no/such.gguf", option, "0"])
    assert option in f"{ended.value}{capsys.readouterr().err}"


@pytest.mark.slow("runs an example")
@pytest.mark.usefixtures("exact")
def test_merged_adapters_compute_the_same():
    decoder = adapted_decoder()
    for seed, adapter in enumerate(lora.adapters(decoder).values()):
        adapter.set_value(jax.random.normal(jax.random.key(seed), adapter.get_value().shape) / 16)
    want = decoder(rows(decoder))
    lora.merge_adapters(decoder)
    assert not lora.adapters(decoder)
    assert nmse(want, models.from_gguf(GGUF).logits(rows(decoder))) > 1e-3
    assert nmse(decoder(rows(decoder)), want) <= 1e-10


# int8 rounding differs between processors, and the differences accumulate
@pytest.mark.slow("trains, saves and generates in three processes")
@pytest.mark.usefixtures("exact")
def test_command(tmp_path, capsys):
    gguf, text = GOLDEN / "text-spm.Q4_K_M.gguf", tmp_path / "verse.txt"
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    text.write_text("Till the dirges of his Hope that melancholy burden bore\n" * 6)
    decoder = models.from_gguf(gguf).decoder()
    lora.add_adapters(decoder, 2, nnx.Rngs(0))
    lora.save_adapters(decoder, first)
    options = "--rank 2 --steps 8 --batch 2 --row-length 16 --new-tokens 3".split()
    files = ["--load", str(first), "--save", str(second), "--merge", str(tmp_path / "merged.gguf")]
    lora.main([str(gguf), str(text), *options, *files, "--type", "Q6_K"])
    figures = re.findall(r"([\d.]+) bits per byte", capsys.readouterr().out)
    before, after, merged = (float(figure) for figure in figures)
    assert after < before
    assert abs(merged - after) < 0.05
    learnt = text.read_text()[: int(text.stat().st_size * (1 - lora.HELD_OUT))]
    base, loaded = models.from_gguf(gguf), models.from_gguf(tmp_path / "merged.gguf")
    assert abs(models.score(loaded, learnt, context=17).bits_per_byte - merged) < 1e-3
    lora.load_adapters(decoder, second)
    assert all(jnp.any(adapter.get_value() != 0) for adapter in lora.adapters(decoder).values())
    adapted = models.Model(decoder, base.tokenizer)
    assert abs(models.score(adapted, learnt, context=17).bits_per_byte - after) < 1e-3
    tokens = jnp.array([base.tokenizer.encode(learnt)[:64]])
    want = decoder(tokens)
    assert nmse(loaded.logits(tokens), want) < 0.1 * nmse(base.logits(tokens), want)


def test_file_without_a_tokenizer():
    with pytest.raises(SystemExit, match="holds no tokenizer"):
        lora.main([str(GGUF)])
