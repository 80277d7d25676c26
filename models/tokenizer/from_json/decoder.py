"""Reads the `decoder` of a tokenizer.json, which turns tokens into text."""

from __future__ import annotations

from ...support.json_fields import JSONFields
from ..encoders import SPACE
from .tokens import steps


def decoding(root: JSONFields) -> tuple[bool, bool]:
    """Returns two flags: tokens are UTF-8 with SPACE (not bytes); decoding strips the first space.

    Raises CheckpointError for other decoders.
    """
    decoders = steps(root.object("decoder"), "decoders")
    if not decoders:
        return _guessed(root)
    raw, strips = True, False
    for step in decoders:
        match step.string("type"):
            case "ByteLevel":
                raw = False
            case "ByteFallback" | "Fuse":
                pass
            case "WordPiece":
                strips = True
            case "Replace" if _is(step.object("pattern"), SPACE) and step.string("content") == " ":
                pass
            case "Strip" if step.string("content") == " " and not step.integer("stop"):
                strips = step.integer("start") > 0
            case "Metaspace" if step.string("replacement", SPACE) == SPACE:
                strips = prepends(step)
            case kind:
                expected = f"expected 'ByteLevel', or steps that write {SPACE!r} as a space"
                step.fail("type", f"{kind[:100]!r} of this kind is not supported; {expected}")
    return raw, raw and strips


def prepends(metaspace: JSONFields) -> bool:
    """Returns whether a `Metaspace` adds a space before a text."""
    early = "always" if metaspace.boolean("add_prefix_space", True) else "never"
    return metaspace.string("prepend_scheme", early) != "never"


def _guessed(root: JSONFields) -> tuple[bool, bool]:
    """Guesses the flags of `decoding`, for a file without a decoder, from its other steps."""
    parts = steps(root.object("normalizer"), "normalizers")
    parts += steps(root.object("pre_tokenizer"), "pretokenizers")
    kinds = [step.string("type") for step in parts]
    if "ByteLevel" in kinds:
        return False, False
    return True, any(
        kind in ("Prepend", "BertPreTokenizer") or (kind == "Metaspace" and prepends(step))
        for kind, step in zip(kinds, parts, strict=True)
    )


def _is(pattern: JSONFields | None, text: str) -> bool:
    return pattern is not None and pattern.values == {"String": text}
