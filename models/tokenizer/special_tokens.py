"""Recognizes special tokens by their text, like llama.cpp; GGUF has keys for only a few."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gguf.constants import TokenType

#: Tokens that end a turn or a document in published models.
END_TEXTS = frozenset({
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>",
    "<|calls|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "</s>", "<EOT>", "_<EOT>",
    "[EOT]", "[EOS]", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
    "<｜end▁of▁sentence｜>", "[e~[",
})  # fmt: skip


#: (end tokens of a vocabulary, one of END_TEXTS that then does not end generation, its type).
EXCEPTIONS = (
    # gpt-oss: ends a channel, and the answer follows.
    (("<|return|>", "<|call|>"), "<|end|>", TokenType.USER_DEFINED),
    # Solar Open; and combinations of both that llama.cpp's rule covers.
    (("<|calls|>", "<|flush|>"), "<|end|>", TokenType.USER_DEFINED),
    (("<|call|>", "<|flush|>"), "<|end|>", TokenType.USER_DEFINED),
    (("<|return|>", "<|calls|>"), "<|end|>", TokenType.USER_DEFINED),
    # Gemma 4: markup.
    (("<|tool_response>",), "</s>", TokenType.NORMAL),
    (("<|plamo:eos|>",), "</s>", TokenType.NORMAL),
)

#: Tokens that are printed regardless of type, because they delimit the answers of gpt-oss.
PRINTED_TEXTS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")


@dataclass(frozen=True)
class FillInMiddle:
    """Metadata key and known texts of a fill-in-the-middle token."""

    key: str  # without "tokenizer.ggml."
    texts: tuple[str, ...]  # candidates if the key is missing
    ends: bool = False  # whether it ends generation


FILL_IN_MIDDLE = (
    FillInMiddle("fim_pre_token_id", (
        "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>",
        "<|code_prefix|>", "<|prefix|>",
    )),
    FillInMiddle("fim_suf_token_id", (
        "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>",
        "<|code_suffix|>", "<|suffix|>",
    )),
    FillInMiddle("fim_mid_token_id", (
        "<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>",
        "<|code_middle|>", "<|middle|>",
    )),
    FillInMiddle(
        "fim_pad_token_id", ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"), ends=True
    ),
    FillInMiddle(
        "fim_rep_token_id",
        ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
        ends=True,
    ),
    FillInMiddle("fim_sep_token_id", ("<|file_sep|>",), ends=True),
)  # fmt: skip


def classify(
    ids: dict[str, int], named: Callable[[str], int | None], ends_of_file: Iterable[int]
) -> tuple[tuple[int, ...], dict[int, TokenType]]:
    """Classifies special tokens by their text.

    Returns the ids that end generation, ascending, and id -> type, which overrides the file's type.

    ids: token text -> id. named: maps a metadata key to an id or None. ends_of_file: end tokens
    that the file names.
    """
    types = {ids[text]: TokenType.CONTROL for text in END_TEXTS if text in ids}
    ends = {*types, *ends_of_file}
    for token_kind in FILL_IN_MIDDLE:
        token = named(token_kind.key)
        if token is None:
            token = next((ids[text] for text in token_kind.texts if text in ids), None)
            if token is not None:
                types[token] = TokenType.CONTROL
        if token is not None and token_kind.ends:
            ends.add(token)
    types |= {ids[text]: TokenType.USER_DEFINED for text in PRINTED_TEXTS if text in ids}
    for others, text, kind in EXCEPTIONS:
        if text in ids and all(ids.get(other) in ends for other in others):
            ends.discard(ids[text])
            types[ids[text]] = kind
    return tuple(sorted(ends)), types
