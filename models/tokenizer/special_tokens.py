"""Tokens known by their text: GGUF names few of them by key, and llama.cpp recognizes the rest so
too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

# Texts that end a turn or a document in published models.
END_TEXTS = frozenset({
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "</s>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
})  # fmt: skip


@dataclass(frozen=True)
class FillInMiddle:
    """A fill-in-the-middle token: its texts serve where the key is missing; `ends` if it ends
    generation.
    """

    key: str
    texts: tuple[str, ...]
    ends: bool = False


FILL_IN_MIDDLE = (
    FillInMiddle(
        "fim_pre_token_id",
        ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>"),
    ),
    FillInMiddle(
        "fim_suf_token_id",
        ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>"),
    ),
    FillInMiddle(
        "fim_mid_token_id",
        ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>"),
    ),
    FillInMiddle(
        "fim_pad_token_id", ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"), ends=True
    ),
    FillInMiddle(
        "fim_rep_token_id",
        ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
        ends=True,
    ),
    FillInMiddle("fim_sep_token_id", ("<|file_sep|>",), ends=True),
)


def classify(
    ids: dict[str, int], named: Callable[[str], int | None], eos: int | None
) -> tuple[tuple[int, ...], list[int]]:
    """(ids that end generation, ids that count as control tokens whatever their type says).

    ids: token text -> id. named: metadata key -> id or None.
    """
    control = {ids[text] for text in END_TEXTS if text in ids}
    ends = set(control)
    ends.update(
        token for token in (eos, named("eot_token_id"), named("eom_token_id")) if token is not None
    )
    for token_kind in FILL_IN_MIDDLE:
        token = named(token_kind.key)
        if token is None:
            token = next((ids[text] for text in token_kind.texts if text in ids), None)
            if token is not None:
                control.add(token)
        if token is not None and token_kind.ends:
            ends.add(token)
    return tuple(sorted(ends)), sorted(control)
