"""Train a small llama on public-domain English, in Flax NNX with optax.

The result is the demo model that ships with this package.

    pip install -e '.[train]'
    python examples/train_tiny.py /tmp/tiny                    # about an hour on two cores
    jax-q4k quantize /tmp/tiny/float.gguf /tmp/tiny/Q4_K_M.gguf --type Q4_K_M

The decoder is the one that runs GGUF files, here with float32 weights. After an interruption, the
same command resumes from the last checkpoint in the work folder. That folder also holds the
tokenizer, the held-out text, the losses (loss.jsonl, loss.png) and finally the model, float.gguf.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import optax.contrib
import orbax.checkpoint as ocp
import tiny_corpus
import tokenizers
from flax import nnx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jax_q4k import models
from jax_q4k.models.config.tensors import expected_tensors
from jax_q4k.models.network.build import build

END = "<|endoftext|>"  # token 0: precedes every window of text
HELD_OUT = 0.05  # fraction at the end of every book; never trained on
EVALUATE_EVERY = 100  # steps; also the checkpoint interval
EVALUATION_WINDOWS = 64  # of the held-out text, evenly spaced


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    work: pathlib.Path = options.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    books = tiny_corpus.from_files(options.text) if options.text else tiny_corpus.load(work)
    _check_settings(work / "settings.json", options)
    training, held_out = zip(*map(_split, books), strict=True)
    (work / "held_out.txt").write_text("\n".join(held_out))
    tokenizer = train_tokenizer(work / "tokenizer.json", training, options.vocab_size)
    config = models.Config(
        architecture="llama",
        vocab_size=tokenizer.get_vocab_size(),
        context_length=options.context,
        hidden_size=256,
        intermediate_size=512,
        num_layers=options.layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        norm_eps=1e-5,
    )
    decoder = train(config, Text(tokenizer, training), Text(tokenizer, held_out), options)
    special = {"bos_token": END, "eos_token": END}
    of_model = models.tokenizer.from_json(json.loads(tokenizer.to_str()), special)
    metadata = config.to_metadata() | {"general.name": "tiny-austen"}
    model = models.Model(decoder, of_model, metadata)
    models.save_gguf(model, work / "float.gguf")
    sample = models.generate(
        model, "She was", max_new_tokens=min(64, options.context // 2), temperature=0.7
    )
    print("She was" + sample.text)


def _split(book: str) -> tuple[str, str]:
    """Splits a book at a paragraph into its training part and its held-out end."""
    at = book.rfind("\n", 0, int(len(book) * (1 - HELD_OUT))) + 1
    return book[:at], book[at:]


def _check_settings(path: pathlib.Path, options: argparse.Namespace) -> None:
    """Ends the program if the work folder was made with other settings.

    Its checkpoints would not fit.
    """
    settings = {
        name: getattr(options, name)
        for name in ("batch", "context", "vocab_size", "layers", "seed")
    }
    if not path.exists():
        path.write_text(json.dumps(settings))
    for name, before in json.loads(path.read_text()).items():
        if settings[name] != before:
            option = name.replace("_", "-")
            raise SystemExit(
                f"{path.parent} is of a run with --{option} {before}: give that, or another folder"
            )


def train_tokenizer(
    path: pathlib.Path, texts: tuple[str, ...], vocab_size: int
) -> tokenizers.Tokenizer:
    """Trains a byte-level BPE with GPT-2's word splitting; END, token 0, begins each text."""
    if not path.exists():
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet
        )
        tokenizer.train_from_iterator(texts, trainer)
        tokenizer.save(str(path))
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{END} $A", pair=f"{END} $A {END} $B", special_tokens=[(END, 0)]
    )
    return tokenizer


class Text:
    """Texts as token ids with END before each, and the positions where paragraphs begin."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, texts: tuple[str, ...]) -> None:
        newline = tokenizer.token_to_id("\u010a")  # "\n" in GPT-2's byte alphabet
        parts = [np.array(encoded.ids, np.int32) for encoded in tokenizer.encode_batch(texts)]
        self.tokens = np.concatenate(parts)
        self.starts = np.flatnonzero((self.tokens == newline) | (self.tokens == 0)) + 1
        self.bytes = sum(len(text.encode()) for text in texts)

    def batch(self, seed: int, rows: int, length: int) -> np.ndarray:
        """Samples windows (rows, length + 1) int32: END, then text from a paragraph's start."""
        starts = self.starts[self.starts <= len(self.tokens) - length]
        if not len(starts):
            raise SystemExit(
                f"the text to train on has no window of {length} tokens; "
                "it must be several paragraphs"
            )
        drawn = np.random.default_rng(seed).integers(0, starts[-1], rows, endpoint=True)
        # the probability of a paragraph is proportional to the length of the one before it
        at = starts[np.searchsorted(starts, drawn)]
        return self._rows([self.tokens[i : i + length] for i in at])

    def windows(self, length: int) -> np.ndarray:
        """Consecutive windows of the text, int32 (rows, length + 1), with END before each row.

        A partial window at the end is dropped.
        """
        if len(self.tokens) < length:
            raise SystemExit(
                f"the held-out text has {len(self.tokens)} tokens, less than a window of {length}"
            )
        return self._rows(
            [self.tokens[i : i + length] for i in range(0, len(self.tokens) - length + 1, length)]
        )

    def bits_per_byte(self, losses: list[jax.Array]) -> float:
        """Converts losses in nats per token to their mean in bits per byte."""
        return float(np.mean(losses)) / math.log(2) * len(self.tokens) / self.bytes

    @staticmethod
    def _rows(texts: list[np.ndarray]) -> np.ndarray:
        return np.pad(np.stack(texts), ((0, 0), (1, 0)))  # token 0 is END


def initial_decoder(config: models.Config, seed: int) -> models.Decoder:
    """Random decoder: norms of 1, normal matrices with standard deviation 0.02.

    The deviation is smaller for matrices that add to the residual stream.
    """
    rng = np.random.default_rng(seed)
    weights = {}
    for name, (shape, required, *_) in expected_tensors(config).items():
        if required and len(shape) == 1:
            weights[name] = jnp.ones(shape)
        elif required:
            residual = name.endswith(("attn_output.weight", "ffn_down.weight"))
            deviation = 0.02 / math.sqrt(2 * config.num_layers) if residual else 0.02
            weights[name] = jnp.asarray(rng.normal(0.0, deviation, shape), jnp.float32)
    return build(config, weights)


def optimizer(options: argparse.Namespace) -> optax.GradientTransformation:
    """Muon for the layers' matrices, AdamW for embedding and norms.

    The learning rate warms up, stays constant, and falls to zero over the last third of the steps.
    """
    fall = options.steps // 3
    schedule = optax.join_schedules(
        [
            optax.linear_schedule(0.0, options.learning_rate, options.warmup),
            optax.constant_schedule(options.learning_rate),
            optax.linear_schedule(options.learning_rate, 0.0, fall),
        ],
        [options.warmup, options.steps - fall],
    )
    # a weight is (n, k)
    rows_and_columns = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0)

    def matrices(parameters: nnx.State) -> nnx.State:
        def kind(path: tuple, weight: jax.Array) -> optax.contrib.MuonDimensionNumbers | None:
            is_matrix = getattr(weight, "ndim", 0) == 2 and "layers" in jax.tree_util.keystr(path)
            return rows_and_columns if is_matrix else None

        return jax.tree_util.tree_map_with_path(kind, parameters)

    muon = optax.contrib.muon(
        schedule,
        consistent_rms=0.2,  # updates of AdamW's size, so that one learning rate serves both
        weight_decay=0.1,
        adam_b2=0.95,
        muon_weight_dimension_numbers=matrices,
    )
    return optax.chain(optax.clip_by_global_norm(1.0), muon)


def train(
    config: models.Config, training: Text, held_out: Text, options: argparse.Namespace
) -> models.Decoder:
    """Returns the decoder after `options.steps` steps; resumes from the last checkpoint, if any."""
    console = Console()
    graph, parameters, constants = nnx.split(initial_decoder(config, options.seed), nnx.Param, ...)
    update = optimizer(options)
    state = {"parameters": parameters, "optimizer": update.init(parameters)}
    count = sum(leaf.size for leaf in jax.tree.leaves(parameters))
    console.print(
        f"{count} parameters, {len(training.tokens)} tokens of {training.bytes} bytes to train on"
    )

    def loss(parameters: nnx.State, batch: jax.Array) -> jax.Array:
        """Mean cross-entropy of batch (rows, length + 1), in nats per token."""
        logits = nnx.merge(graph, parameters, constants)(batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    @jax.jit
    def advance(state: dict, batch: jax.Array) -> tuple[dict, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(state["parameters"], batch)
        change, progress = update.update(gradient, state["optimizer"], state["parameters"])
        return {
            "parameters": optax.apply_updates(state["parameters"], change),
            "optimizer": progress,
        }, value

    windows = held_out.windows(options.context)
    windows = windows[:: -(-len(windows) // EVALUATION_WINDOWS)]
    rows = min(options.batch, len(windows))
    batches = windows[: len(windows) // rows * rows].reshape(-1, rows, options.context + 1)
    evaluate = jax.jit(loss)

    def held_out_loss(state: dict) -> float:
        """Bits per byte of the held-out text."""
        return held_out.bits_per_byte([evaluate(state["parameters"], batch) for batch in batches])

    checkpoints = ocp.CheckpointManager(
        options.work.absolute() / "checkpoints", options=ocp.CheckpointManagerOptions(max_to_keep=2)
    )
    step = checkpoints.latest_step() or 0
    if step:
        state = checkpoints.restore(step, args=ocp.args.StandardRestore(state))
        console.print(f"going on from step {step}")
    log = options.work / "loss.jsonl"
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=options.steps, completed=step)
        values = []
        while step < options.steps:
            state, value = advance(state, training.batch(step, options.batch, options.context))
            values.append(value)
            step += 1
            progress.update(task, completed=step)
            if step % EVALUATE_EVERY == 0 or step == options.steps:
                trained, unseen = training.bits_per_byte(values), held_out_loss(state)
                values = []
                with log.open("a") as file:
                    print(
                        json.dumps({"step": step, "training": trained, "held_out": unseen}),
                        file=file,
                    )
                plot(log)
                checkpoints.save(step, args=ocp.args.StandardSave(state))
                console.print(
                    f"step {step}: {trained:.3f} bits per byte in training, {unseen:.3f} held out"
                )
    checkpoints.wait_until_finished()
    return nnx.merge(graph, state["parameters"], constants)


def plot(log: pathlib.Path) -> None:
    """Plots loss.jsonl as loss.png; if a step was run twice, its later entry counts."""
    entries = {entry["step"]: entry for entry in map(json.loads, log.read_text().splitlines())}
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name in ("training", "held_out"):
        axes.plot(
            sorted(entries),
            [entries[step][name] for step in sorted(entries)],
            label=name.replace("_", " "),
        )
    axes.set(xlabel="step", ylabel="bits per byte")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(log.with_suffix(".png"), dpi=120)
    plt.close(figure)


def _at_least(minimum: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        if int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text} must be at least {minimum}")
        return int(text)

    return integer


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", type=pathlib.Path, help="folder for data, checkpoints and results")
    parser.add_argument(
        "--text", type=pathlib.Path, nargs="+", help="train on these text files instead"
    )
    parser.add_argument("--steps", type=_at_least(0), default=2250)
    parser.add_argument("--batch", type=_at_least(1), default=8, help="windows per step")
    parser.add_argument(
        "--context",
        type=_at_least(16),
        default=512,
        help="tokens per window, and the model's context length",
    )
    parser.add_argument(
        "--vocab-size", type=_at_least(257), default=4096, help="all bytes and one more at least"
    )
    parser.add_argument("--layers", type=_at_least(1), default=6)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=100, help="steps")
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    main()
