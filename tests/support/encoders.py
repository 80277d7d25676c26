"""Small random encoders in GGUF files, and their results in NumPy, written from the papers.

BERT: https://arxiv.org/abs/1810.04805; ALiBi: https://arxiv.org/abs/2108.12409; ModernBERT:
https://arxiv.org/abs/2412.13663; EmbeddingGemma: https://arxiv.org/abs/2509.20354.
"""

import math

import numpy as np

from jax_q4k import gguf

EXPERTS, USED = 5, 2
HIDDEN, HEADS, INNER, CONTEXT, WINDOW = 64, 4, 96, 640, 12
EPS = 1e-6
WORDS = ["the", "sea", "was", "calm", "no", "##body", "##s", "a", "word", "said", ",", ".", "##a"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
#: Kind -> layers: as many as have full and windowed attention, or experts in one of them.
LAYERS = {
    "bert": 2,
    "nomic-bert": 2,
    "nomic-bert-moe": 3,
    "jina-bert-v2": 2,
    "jina-bert-v3": 2,
    "modern-bert": 4,
    "gemma-embedding": 6,
}
KINDS = tuple(LAYERS)


def wordpiece():
    """Metadata of a WordPiece vocabulary, and its size."""
    inner = [w[2:] if w.startswith("##") else f"▁{w}" for w in WORDS]
    letters = [f"{space}{c}" for c in "bcdefghijklmnopqrstuvwxyz" for space in ("", "▁")]
    tokens = list(dict.fromkeys([*SPECIAL, *inner, *letters]))
    types = [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL))
    key = "tokenizer.ggml."
    return {
        f"{key}model": "bert",
        f"{key}pre": "default",
        f"{key}tokens": tokens,
        f"{key}token_type": np.array(types, np.int32),
        f"{key}token_type_count": np.uint32(2),
        f"{key}unknown_token_id": np.uint32(1),
        f"{key}bos_token_id": np.uint32(2),
        f"{key}cls_token_id": np.uint32(2),
        f"{key}eos_token_id": np.uint32(3),
        f"{key}seperator_token_id": np.uint32(3),
        f"{key}padding_token_id": np.uint32(0),
        f"{key}mask_token_id": np.uint32(4),
    }, len(tokens)


def metadata(kind):
    """Metadata of a file, as llama.cpp's converter writes it."""
    words, _ = wordpiece()
    values = {
        "context_length": CONTEXT,
        "embedding_length": HIDDEN,
        "block_count": LAYERS[kind],
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.causal": False,
        "pooling_type": 1,
    }
    norm = "attention.layer_norm_epsilon"
    if kind == "gemma-embedding":
        norm = "attention.layer_norm_rms_epsilon"
        values |= {
            "attention.head_count_kv": 1,
            "attention.key_length": HIDDEN // HEADS,
            "attention.value_length": HIDDEN // HEADS,
            "attention.sliding_window": WINDOW,
            "rope.freq_base": 1e6,
            "rope.freq_base_swa": 1e4,
            "dense_2_feat_in": HIDDEN,
            "dense_2_feat_out": 2 * HIDDEN,
            "dense_3_feat_in": 2 * HIDDEN,
            "dense_3_feat_out": HIDDEN,
        }
    if kind == "modern-bert":
        values |= {
            "attention.sliding_window": WINDOW,
            "attention.sliding_window_pattern": 3,
            "rope.freq_base": 160000.0,
            "rope.freq_base_swa": 10000.0,
            "rope.scaling.type": "none",
        }
    if kind == "nomic-bert":
        values["rope.freq_base"] = 1000.0
    if kind == "jina-bert-v3":
        values["rope.freq_base"] = 20000.0
    if kind == "nomic-bert-moe":
        values |= {
            "rope.freq_base": 10000.0,
            "expert_count": EXPERTS,
            "expert_used_count": USED,
            "moe_every_n_layers": 2,
        }
    values[norm] = EPS
    prefixed = {f"{kind}.{key}": _typed(value) for key, value in values.items()}
    return {"general.architecture": kind, **prefixed, **words}


def _typed(value):
    if isinstance(value, bool | str):
        return value
    return np.uint32(value) if isinstance(value, int) else np.float32(value)


def tensors(kind, seed=0, *, labels=0, more_norms=False, sum_bias=False):
    """Random tensors of a file by name, float32.

    labels: of a classification head, 0: none. more_norms: of queries and keys and a second one of
    the attention's output, as in jina-embeddings-v2-base-code. sum_bias: of the sum of experts.
    """
    rng = np.random.default_rng(seed)
    found = {}

    def add(name, *shape, scale=None):
        scale = shape[-1] ** -0.5 if scale is None else scale
        found[name] = (rng.standard_normal(shape) * scale).astype(np.float32)

    def norm(name, bias=True):
        found[f"{name}.weight"] = (1 + rng.standard_normal(HIDDEN) / 5).astype(np.float32)
        if bias:
            add(f"{name}.bias", HIDDEN, scale=0.2)

    def linear(name, n, k, bias=True):
        add(f"{name}.weight", n, k)
        if bias:
            add(f"{name}.bias", n, scale=0.2)

    _, vocab = wordpiece()
    kv = HIDDEN // HEADS if kind == "gemma-embedding" else HIDDEN
    add("token_embd.weight", vocab, HIDDEN, scale=1.0)
    if kind == "bert":
        add("position_embd.weight", CONTEXT, HIDDEN, scale=0.5)
    if kind in ("bert", "nomic-bert", "nomic-bert-moe", "jina-bert-v2", "jina-bert-v3"):
        add("token_types.weight", 2, HIDDEN, scale=0.5)
    if kind != "gemma-embedding":
        norm("token_embd_norm", kind != "modern-bert")
    for i in range(LAYERS[kind]):
        b = f"blk.{i}."
        match kind:
            case "bert" | "jina-bert-v2":
                for name in ("q", "k", "v"):
                    linear(f"{b}attn_{name}", HIDDEN, HIDDEN)
                linear(f"{b}attn_output", HIDDEN, HIDDEN)
            case "nomic-bert-moe" | "jina-bert-v3":
                linear(f"{b}attn_qkv", 3 * HIDDEN, HIDDEN)
                linear(f"{b}attn_output", HIDDEN, HIDDEN)
            case "nomic-bert" | "modern-bert":
                linear(f"{b}attn_qkv", 3 * HIDDEN, HIDDEN, bias=False)
                linear(f"{b}attn_output", HIDDEN, HIDDEN, bias=False)
            case "gemma-embedding":
                for name, n in (("q", HIDDEN), ("k", kv), ("v", kv)):
                    linear(f"{b}attn_{name}", n, HIDDEN, bias=False)
                linear(f"{b}attn_output", HIDDEN, HIDDEN, bias=False)
                for name in ("attn_q_norm", "attn_k_norm"):
                    size = HIDDEN // HEADS
                    found[f"{b}{name}.weight"] = (1 + rng.standard_normal(size) / 5).astype("f4")
        match kind:
            case "nomic-bert-moe" if i % 2:
                add(f"{b}ffn_gate_inp.weight", EXPERTS, HIDDEN)
                add(f"{b}ffn_up_exps.weight", EXPERTS, INNER, HIDDEN)
                add(f"{b}ffn_down_exps.weight", EXPERTS, HIDDEN, INNER)
                if sum_bias:
                    add(f"{b}ffn_exps.bias", HIDDEN, scale=0.2)
            case "bert" | "nomic-bert-moe" | "jina-bert-v3":
                linear(f"{b}ffn_up", INNER, HIDDEN)
                linear(f"{b}ffn_down", HIDDEN, INNER)
            case "jina-bert-v2":
                linear(f"{b}ffn_up", 2 * INNER, HIDDEN, bias=False)
                linear(f"{b}ffn_down", HIDDEN, INNER)
            case "modern-bert":
                linear(f"{b}ffn_up", 2 * INNER, HIDDEN, bias=False)
                linear(f"{b}ffn_down", HIDDEN, INNER, bias=False)
            case _:
                linear(f"{b}ffn_gate", INNER, HIDDEN, bias=False)
                linear(f"{b}ffn_up", INNER, HIDDEN, bias=False)
                linear(f"{b}ffn_down", HIDDEN, INNER, bias=False)
        match kind:
            case "modern-bert":
                if i:
                    norm(f"{b}attn_norm", bias=False)
                norm(f"{b}ffn_norm", bias=False)
            case "gemma-embedding":
                for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
                    norm(f"{b}{name}", bias=False)
            case _:
                norm(f"{b}attn_output_norm")
                norm(f"{b}layer_output_norm")
        for name in ("attn_q_norm", "attn_k_norm", "attn_norm_2") if more_norms else ():
            norm(f"{b}{name}")
    if kind in ("modern-bert", "gemma-embedding"):
        norm("output_norm", bias=False)
    if kind == "gemma-embedding":
        add("dense_2.weight", 2 * HIDDEN, HIDDEN)
        add("dense_3.weight", HIDDEN, 2 * HIDDEN)
    if labels:
        linear("cls", HIDDEN, HIDDEN)
        linear("cls.output", labels, HIDDEN)
    return found


def write(path, kind, *, labels=0, more_norms=False, **more):
    """Writes a file; more: further metadata, with dots written as two underscores."""
    values = metadata(kind) | {
        f"{kind}.{key.replace('__', '.')}": value for key, value in more.items()
    }
    if labels:
        values[f"{kind}.pooling_type"] = np.uint32(4)
        names = [f"LABEL_{i}" for i in range(labels)]
        values[f"{kind}.classifier.output_labels"] = names
    held = tensors(kind, labels=labels, more_norms=more_norms)
    gguf.write(path, values, {k: gguf.TensorPieces.of(k, v) for k, v in held.items()})
    return held


def reference(kind, held, ids, second=None):
    """Outputs of the last norm for each token, float64 (tokens, hidden); see `Encoder.encode`."""
    w = {name: value.astype(np.float64) for name, value in held.items()}
    count = len(ids)
    x = w["token_embd.weight"][ids]
    if "token_types.weight" in w:
        types = (np.arange(count) >= (count if second is None else second)).astype(int)
        x = x + w["token_types.weight"][types]
    if "position_embd.weight" in w:
        x = x + w["position_embd.weight"][:count]
    if kind == "gemma-embedding":
        x = x * math.sqrt(HIDDEN)
    else:
        x = _norm(w, "token_embd_norm", x)
    for i in range(LAYERS[kind]):
        b = f"blk.{i}."
        pre = kind in ("modern-bert", "gemma-embedding")
        h = _norm(w, f"{b}attn_norm", x) if pre and f"{b}attn_norm.weight" in w else x
        y = _linear(w, f"{b}attn_output", _attention(kind, w, b, i, h))
        if kind == "gemma-embedding":
            y = _norm(w, f"{b}post_attention_norm", y)
        before, x = x, x + y
        x = x if pre else _norm(w, f"{b}attn_output_norm", x)
        if f"{b}attn_norm_2.weight" in w:
            x = _norm(w, f"{b}attn_norm_2", x + before)
        h = _norm(w, f"{b}ffn_norm", x) if pre else x
        if f"{b}ffn_gate_inp.weight" in w:
            y = _experts(w, b, h)
        else:
            y = _linear(w, f"{b}ffn_down", _inner(kind, w, b, h))
        if kind == "gemma-embedding":
            y = _norm(w, f"{b}post_ffw_norm", y)
        x = x + y
        x = x if pre else _norm(w, f"{b}layer_output_norm", x)
    return _norm(w, "output_norm", x) if "output_norm.weight" in w else x


def scores(held, vector):
    """Logits of the classification head for a pooled vector."""
    w = {name: value.astype(np.float64) for name, value in held.items()}
    return _linear(w, "cls.output", np.tanh(_linear(w, "cls", vector)))


def _linear(w, name, x):
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)


def _norm(w, name, x):
    if "token_embd_norm.weight" in w:  # LayerNorm, else RMSNorm
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS)
    return x * w[f"{name}.weight"] + w.get(f"{name}.bias", 0.0)


def _attention(kind, w, b, layer, x):
    count, size = len(x), HIDDEN // HEADS
    if f"{b}attn_qkv.weight" in w:
        q, k, v = np.split(_linear(w, f"{b}attn_qkv", x), 3, axis=-1)
    else:
        q, k, v = (_linear(w, f"{b}attn_{name}", x) for name in ("q", "k", "v"))
    if f"{b}attn_norm_2.weight" in w:
        q, k = _norm(w, f"{b}attn_q_norm", q), _norm(w, f"{b}attn_k_norm", k)
    q, k, v = (y.reshape(count, -1, size) for y in (q, k, v))
    if kind == "gemma-embedding":
        q, k = (
            y / np.sqrt((y**2).mean(-1, keepdims=True) + EPS) * w[f"{b}attn_{name}_norm.weight"]
            for y, name in ((q, "q"), (k, "k"))
        )
    windowed = {
        "modern-bert": layer % 3 > 0,
        "gemma-embedding": layer % 6 < 5,
    }.get(kind, False)
    thetas = {
        "nomic-bert": 1000.0,
        "nomic-bert-moe": 10000.0,
        "jina-bert-v3": 20000.0,
        "modern-bert": 10000.0 if windowed else 160000.0,
        "gemma-embedding": 1e4 if windowed else 1e6,
    }
    if kind in thetas:
        q, k = (_rotated(y, thetas[kind]) for y in (q, k))
    distance = np.abs(np.arange(count)[:, None] - np.arange(count))
    out = np.zeros((count, HEADS, size))
    for head in range(HEADS):
        kv = head * k.shape[1] // HEADS
        score = q[:, head] @ k[:, kv].T / math.sqrt(size)
        if kind == "jina-bert-v2":
            score -= 2.0 ** (-8.0 * (head + 1) / HEADS) * distance
        if windowed:
            score = np.where(distance <= WINDOW // 2, score, -np.inf)
        weight = np.exp(score - score.max(-1, keepdims=True))
        out[:, head] = weight / weight.sum(-1, keepdims=True) @ v[:, kv]
    return out.reshape(count, HIDDEN)


def _rotated(x, theta):
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _experts(w, b, x):
    """The experts of the largest probabilities, weighted with these, which are not normalized."""
    scores = np.exp(_linear(w, f"{b}ffn_gate_inp", x))
    scores /= scores.sum(-1, keepdims=True)
    found = np.zeros_like(x) + w.get(f"{b}ffn_exps.bias", 0.0)
    for token, score in enumerate(scores):
        for expert in np.argsort(-score)[:USED]:
            inner = _gelu(w[f"{b}ffn_up_exps.weight"][expert] @ x[token])
            found[token] += score[expert] * (w[f"{b}ffn_down_exps.weight"][expert] @ inner)
    return found


def _inner(kind, w, b, x):
    up = _linear(w, f"{b}ffn_up", x)
    if kind in ("bert", "nomic-bert-moe", "jina-bert-v3"):
        return _gelu(up)
    if f"{b}ffn_gate.weight" in w:
        gate = _linear(w, f"{b}ffn_gate", x)
    else:
        gate, up = np.split(up, 2, axis=-1)
    if kind == "nomic-bert":
        return gate / (1 + np.exp(-gate)) * up
    if kind == "gemma-embedding":
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        return 0.5 * gate * (1 + np.tanh(inner)) * up
    return _gelu(gate) * up


def _gelu(x):
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
