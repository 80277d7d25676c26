"""Fine-tune a packed GGUF model with LoRA adapters, in Flax NNX with optax.

    python examples/lora.py MODEL.gguf TEXT.txt --steps 100 --rank 8
    # saved adapters, no training:
    python examples/lora.py MODEL.gguf --load lora.safetensors --steps 0
    # and a file for any program that reads GGUF:
    python examples/lora.py MODEL.gguf TEXT.txt --merge OUT.gguf

LoRA: https://arxiv.org/abs/2106.09685.

Gradients flow through `jq.matmul`. The base weights stay packed and are not trained. Training
updates two small float32 matrices per attention projection. The default text is a poem, short
enough for a CPU.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx
from rich.progress import Progress, TextColumn
from safetensors.flax import load_file, save_file

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models.files.quantizing import recipes

TEXT = Path(__file__).with_name("lora_text.txt")
HELD_OUT = 0.15  # fraction at the end of the text
PROJECTIONS = ("query", "key", "value", "output")


def add_adapters(decoder: models.Decoder, rank: int, rngs: nnx.Rngs) -> None:
    """Replaces each projection y = x @ W.T of attention with y + x @ a @ b; b starts at 0."""
    for layer in decoder.layers:
        for name in PROJECTIONS:
            linear = getattr(layer.attention, name)
            n, k = linear.weight.get_value().shape
            setattr(layer.attention, name, nnx.LoRA(k, rank, n, base_module=linear, rngs=rngs))


def adapters(decoder: models.Decoder) -> dict[str, nnx.LoRAParam]:
    """Maps paths such as `layers.0.attention.query.lora_a` to parameters, here (k, rank)."""
    nodes = nnx.iter_graph(decoder)
    return {
        ".".join(map(str, path)): node for path, node in nodes if isinstance(node, nnx.LoRAParam)
    }


def save_adapters(decoder: models.Decoder, path: Path) -> None:
    save_file({name: adapter.get_value() for name, adapter in adapters(decoder).items()}, path)


def load_adapters(decoder: models.Decoder, path: Path) -> None:
    saved, mine = load_file(path), adapters(decoder)
    if {name: a.shape for name, a in saved.items()} != {
        name: a.get_value().shape for name, a in mine.items()
    }:
        raise ValueError(f"{path} holds adapters of another model or of another --rank")
    if not all(a.dtype == np.float32 and np.isfinite(a).all() for a in saved.values()):
        raise ValueError(f"{path} must hold finite float32 numbers, as --save writes them")
    for name, adapter in mine.items():
        adapter.set_value(saved[name])


def merge_adapters(decoder: models.Decoder) -> None:
    """Merges each adapter into its matrix: W + (a @ b).T.

    The merged matrix is float32 and can be quantized again.
    """
    for layer in decoder.layers:
        for name in PROJECTIONS:
            adapter = getattr(layer.attention, name)
            linear, a, b = (
                adapter.base_module,
                adapter.lora_a.get_value(),
                adapter.lora_b.get_value(),
            )
            weight = linear.weight.get_value()
            weight = weight.dequantize() if isinstance(weight, jq.QuantizedArray) else weight
            linear.weight = nnx.Param(weight + (a @ b).T)
            setattr(layer.attention, name, linear)


def loss(decoder: models.Decoder, rows: jax.Array) -> jax.Array:
    """Mean cross-entropy of rows (batch, time), in nats per token.

    Each token but the first is predicted from those before it.
    """
    return optax.softmax_cross_entropy_with_integer_labels(
        decoder(rows[:, :-1]), rows[:, 1:]
    ).mean()


@nnx.jit
def train_step(decoder: models.Decoder, optimizer: nnx.Optimizer, rows: jax.Array) -> jax.Array:
    adapters_only = nnx.DiffState(0, nnx.LoRAParam)
    value, gradient = nnx.value_and_grad(loss, argnums=adapters_only)(decoder, rows)
    optimizer.update(decoder, gradient)
    return value


def train(
    decoder: models.Decoder, tokens: np.ndarray, start: list[int], options: argparse.Namespace
) -> None:
    """Trains for `options.steps` steps on random rows of `tokens` (count,).

    Each row begins with `start`.
    """
    optimizer = nnx.Optimizer(decoder, optax.adamw(options.learning_rate), wrt=nnx.LoRAParam)
    rng = np.random.default_rng(options.seed)
    length = min(options.row_length, len(tokens))
    before = np.tile(np.array(start, np.int32), (options.batch, 1))
    with Progress(
        *Progress.get_default_columns(), TextColumn("loss {task.fields[loss]:.3f}")
    ) as progress:
        task = progress.add_task("Training", total=options.steps, loss=float("nan"))
        for _ in range(options.steps):
            at = rng.integers(0, len(tokens) - length + 1, (options.batch, 1))
            rows = np.concatenate([before, tokens[at + np.arange(length)]], axis=1)
            progress.update(task, advance=1, loss=float(train_step(decoder, optimizer, rows)))


def report(
    when: str, model: models.Model, text: str, held_out: str, options: argparse.Namespace
) -> None:
    trained, new = (
        models.score(model, part, context=options.row_length + 1).bits_per_byte
        for part in (text, held_out)
    )
    print(
        f"{when}: {trained:.3f} bits per byte of the text to learn, {new:.3f} of its held-out end"
    )
    sample = models.generate(
        model, options.prompt, max_new_tokens=options.new_tokens, temperature=0.7
    )
    print(f"    {options.prompt}{sample.text}".replace("\n", "\n    "), end="\n\n")


def main(arguments: list[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    for name in ("rank", "batch", "row_length"):
        if getattr(options, name) < 1:
            sys.exit(f"--{name.replace('_', '-')} must be at least 1")
    path = options.model
    model = models.load(path)
    if model.tokenizer is None:
        sys.exit(f"{path} holds no tokenizer")
    text = options.text.read_text(encoding="utf-8")
    cut = int(len(text) * (1 - HELD_OUT))
    text, held_out = text[:cut], text[cut:]
    report("The model itself", model, text, held_out, options)

    decoder = model.decoder()
    add_adapters(decoder, options.rank, nnx.Rngs(options.seed))
    size = sum(adapter.get_value().size for adapter in adapters(decoder).values())
    print(f"{size:,} parameters of adapters beside {model}")
    if options.load:
        load_adapters(decoder, options.load)
    if options.steps:
        tokens = np.array(model.tokenizer.encode(text, add_special=False), np.int32)
        train(decoder, tokens, model.tokenizer.encode("", add_end=False), options)
        save_adapters(decoder, options.save)
        print(f"Saved: {options.save}")
    # Any decoder can become a model. This one generates with the adapters; its weights are still
    # packed.
    adapted = models.Model(decoder, model.tokenizer)
    report("With adapters", adapted, text, held_out, options)
    if options.merge:
        merge_adapters(decoder)
        merged = models.quantize(
            models.Model(decoder, model.tokenizer, model.metadata), options.type
        )
        models.save_gguf(merged, options.merge)
        report(f"Merged into {options.merge}", merged, text, held_out, options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "model",
        nargs="?",
        default="demo",
        help="GGUF file, checkpoint's folder (default: demo, the model of this package)",
    )
    parser.add_argument(
        "text", nargs="?", type=Path, default=TEXT, help="UTF-8 text (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--batch", type=int, default=8, help="rows per step (default: %(default)s)")
    parser.add_argument(
        "--row-length", type=int, default=96, help="tokens per row (default: %(default)s)"
    )
    parser.add_argument("--prompt", default="Once upon a midnight dreary,")
    parser.add_argument(
        "--new-tokens", type=int, default=80, help="of the samples (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--load", type=Path, help="adapters to start from")
    parser.add_argument(
        "--save", type=Path, default=Path("lora.safetensors"), help="default: %(default)s"
    )
    parser.add_argument(
        "--merge", type=Path, metavar="OUT.gguf", help="write the model with the adapters in it"
    )
    parser.add_argument(
        "--type",
        choices=recipes.RECIPES,
        default="Q4_K_M",
        help="of OUT.gguf (default: %(default)s)",
    )
    return parser


if __name__ == "__main__":
    main()
