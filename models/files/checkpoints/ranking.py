"""Classification heads of decoders that rank documents: Qwen3-Reranker.

The publisher's folders hold a text model, whose answer is "yes" or "no": their rows of the output
layer are the head. Folders of a class for sequence classification hold the head itself, `score`.
The tensors, metadata and prompt are those of llama.cpp's converter.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jax_q4k import CheckpointError

from ...config.encoder_fields import LABELS
from ...config.pooling import metadata_of
from ...support.json_fields import JSONFields, read_bytes
from ...tokenizer import Tokenizer
from .config_json import MAX_CONFIG, Description
from .packed.weights import DecodedWeights

#: Names of the head in GGUF files and in checkpoints.
HEAD, SCORE = "cls.output.weight", "score.weight"
#: The first is the label whose probability is the score.
ANSWERS = ("yes", "no")
#: Name -> chat template that joins query and document, with the publisher's default instruction.
TEMPLATES = {
    "rerank": (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
        'and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant passages that "
        "answer the query\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
}


class Ranking(NamedTuple):
    """Description of a folder that holds a reranker.

    Attributes:
      description: the decoder's, with a head and its metadata.
      rows: row of each label in the checkpoint's `score`, None: zeros; None: the head consists of
        the output layer's rows of ANSWERS.
    """

    description: Description
    rows: tuple[int | None, ...] | None

    def answers(self, tokenizer: Tokenizer | None, folder: Path) -> tuple[int | None, ...]:
        """Returns the row of each label in the output layer; raises CheckpointError without one."""
        if tokenizer is None:
            problem = f"is missing: a reranker needs the ids of {' and '.join(ANSWERS)}"
            raise CheckpointError(str(folder), "tokenizer.json", problem)
        ids = tokenizer.vocabulary.ids
        for answer in ANSWERS:
            if answer not in ids:
                file = str(folder / "tokenizer.json")
                raise CheckpointError(file, "vocabulary", f"lacks {answer!r}, a reranker's answer")
        return tuple(ids[answer] for answer in ANSWERS)


class Head(NamedTuple):
    """Rows of a checkpoint tensor that are the classification head.

    Attributes:
      name: the tensor, (n, hidden_size).
      rows: row of each label; None: zeros.
    """

    name: str
    rows: tuple[int | None, ...]

    def read(self, weights: DecodedWeights) -> np.ndarray:
        """Returns the head, float32 (labels, hidden_size)."""
        found = np.zeros((len(self.rows), weights.stored[self.name].shape[1]), np.float32)
        for label, row in enumerate(self.rows):
            if row is not None:
                found[label] = weights.read(self.name, slice(row, row + 1))[0]
        return found


def ranking_of(description: Description, folder: Path, fields: JSONFields) -> Ranking | None:
    """Returns the description of a reranker, or None if the folder holds another model.

    The label of "yes" becomes the first. A single label's score is a logit; a second label with the
    logit 0 gives the first label the probability that is its sigmoid.

    fields: config.json.
    """
    part = description.checkpoint.reranker
    if part is None or not _is_named(part, folder, fields):
        return None
    prefix, rows = f"{description.config.architecture}.", None
    labels = description.metadata.get(prefix + LABELS, ANSWERS)
    if prefix + LABELS in description.metadata:
        order = sorted(range(len(labels)), key=lambda i: labels[i].lower() != ANSWERS[0])
        rows = (0, None) if len(labels) == 1 else tuple(order)
        labels = ANSWERS if len(labels) == 1 else [labels[i] for i in order]
    found = {prefix + LABELS: list(labels)} | metadata_of(prefix.rstrip("."), "rank")
    config = dataclasses.replace(description.config, labels=len(labels))
    metadata = description.metadata | found
    return Ranking(dataclasses.replace(description, config=config, metadata=metadata), rows)


def _is_named(part: str, folder: Path, fields: JSONFields) -> bool:
    """Returns whether names of a folder's model, or a title in its README.md, contain a text."""
    names = folder.resolve().name, fields.values.get("_name_or_path")
    if any(part in str(name).lower() for name in names):
        return True
    card = folder / "README.md"
    if not card.is_file() or card.stat().st_size > MAX_CONFIG:  # `model_card` warns of its size
        return False
    return f"# {part}" in read_bytes(card, MAX_CONFIG).decode(errors="replace").lower()
