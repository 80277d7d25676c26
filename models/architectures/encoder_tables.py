"""Tables of tensors that encoders share, beside those in `tensor_tables`."""

from __future__ import annotations

import dataclasses
from typing import Any

from .tensor_tables import ATTENTION, GATED_MLP, PLAIN_MLP, Tensor, optional

WORDS = Tensor("token_embd", "embedding", "embeddings.word_embeddings", "vocab hidden", table=True)
POSITIONS = Tensor(
    "position_embd",
    "positions",
    "embeddings.position_embeddings",
    "context hidden",
    exact=True,
    table=True,
)
TOKEN_TYPES = Tensor(
    "token_types",
    "token_types",
    "embeddings.token_type_embeddings",
    "token_types hidden",
    required=False,
    exact=True,
    table=True,
)
EMBEDDING_NORM = Tensor(
    "token_embd_norm", "embedding_norm", "embeddings.LayerNorm", "hidden", bias="norm"
)

#: Names of the tensors in checkpoints of transformers' BERT.
_NAMES = {
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
}


def _as_in_bert(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Returns copies with BERT's names in checkpoints, which devices do not split."""
    return tuple(
        dataclasses.replace(tensor, checkpoint=_NAMES.get(tensor.gguf), split=None)
        for tensor in tensors
    )


BERT_ATTENTION = _as_in_bert(ATTENTION)
BERT_MLP = _as_in_bert(PLAIN_MLP)
GATED_BERT_MLP = _as_in_bert(GATED_MLP)

#: Norms of the sums of each sublayer's input and output.
SUM_NORMS = (
    Tensor(
        "attn_output_norm",
        "attention.sum_norm",
        "attention.output.LayerNorm",
        "hidden",
        bias="norm",
    ),
    Tensor("layer_output_norm", "mlp.sum_norm", "output.LayerNorm", "hidden", bias="norm"),
)

#: Classification head of rerankers, after pooling: output(norm(activation(dense(x)))).
HEAD = optional(
    (
        Tensor("cls", "head.dense", "classifier.dense", "hidden hidden", bias="head"),
        Tensor("cls.norm", "head.norm", "head.norm", "hidden"),
        Tensor("cls.output", "head.output", "classifier.out_proj", "labels hidden", bias="labels"),
    )
)
#: Dense layers of sentence-transformers, after pooling.
DENSE = optional(
    (
        Tensor("dense_2", "dense.first", "model.dense_2.linear", "dense hidden"),
        Tensor("dense_3", "dense.second", "model.dense_3.linear", "hidden dense"),
    )
)


def labels(fields: Any) -> dict[str, Any]:
    """Returns metadata of the labels of a classification head in a config.json."""
    named = fields.object("id2label")
    count = fields.integer("num_labels", 2, least=1) if named is None else len(named.values)
    names = {} if named is None else named.values
    return {
        "classifier.output_labels": [str(names.get(str(i), f"LABEL_{i}")) for i in range(count)]
    }
