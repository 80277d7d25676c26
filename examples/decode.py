"""Decode with a GGUF model: load it packed, prefill the prompt, then one jitted step per token.

python examples/decode.py MODEL.gguf "Once upon a time"

`models.generate` does the same with a jitted loop, sampling and batches. This example shows the
calls underneath.
"""

from __future__ import annotations

import argparse
import sys

import jax
import jax.numpy as jnp

from jax_q4k import models

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("model", metavar="MODEL.gguf", help="or a checkpoint folder, or demo")
parser.add_argument("prompt")
arguments = parser.parse_args()
model = models.load(arguments.model)
if model.tokenizer is None:
    sys.exit(f"{arguments.model} holds no tokenizer")
tokens = jnp.array([model.tokenizer.encode(arguments.prompt, add_end=False)])
new_tokens = 24

# Weights are arguments so that they do not become constants of the program. The cache is donated so
# that its pages are updated in place.
prefill = jax.jit(lambda weights, *args: model.decoder(weights).prefill(*args), donate_argnums=3)
decode = jax.jit(lambda weights, *args: model.decoder(weights).decode(*args), donate_argnums=2)

cache = models.PagedCache.create(model.config, batch=1, capacity=tokens.size + new_tokens)
logits, cache = prefill(model.weights, tokens, jnp.array([tokens.size]), cache)
text = model.tokenizer.stream(strip_prefix=False)  # the ids continue a text
for _ in range(new_tokens):
    token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    print(text.push(int(token[0])), end="", flush=True)
    logits, cache = decode(model.weights, token, cache)
print(text.finish())
