"""Stop strings in streams: the result depends only on the text, not on how it is split."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_q4k.models.sampling.stop_strings import StopStrings


def stream(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    stop = StopStrings(stops)
    output = "".join(map(stop.push, pieces)) + stop.finish()
    return output, stop.matched


def reference(stops: list[str], text: str) -> tuple[str, str | None]:
    """Reads character by character and checks whether the text so far ends with a stop string."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_a_match_across_pieces() -> None:
    stop = StopStrings("</end>")
    assert stop.push("hello <") == "hello "
    assert stop.push("/e") == ""
    assert stop.push("nd> more") == ""
    assert stop.matched == "</end>"
    assert stop.push("ignored") == ""
    assert stop.finish() == ""


def test_text_that_only_looked_like_a_match_is_passed_on() -> None:
    stop = StopStrings(["\n\nUser:", "STOP"])
    assert [stop.push(piece) for piece in ("a\n", "\nUs", "able ST", "O", "NE")] == [
        "a",
        "",
        "\n\nUsable ",
        "",
        "STONE",
    ]
    assert stop.matched is None
    assert stop.push(" STO") == " "
    assert stop.finish() == "STO"


def test_a_restart_inside_a_partial_match() -> None:
    assert stream(["aab"], ["a", "a", "a", "b", "x"]) == ("a", "aab")


def test_nothing_is_held_back_without_need() -> None:
    assert StopStrings().push("abc") == "abc"
    assert StopStrings(["xyz"]).push("abc") == "abc"


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=4),
    st.lists(st.text("abc", max_size=5), max_size=8),
)
def test_against_reading_by_character(stops: list[str], pieces: list[str]) -> None:
    assert stream(stops, pieces) == reference(stops, "".join(pieces))


def test_bad_stops() -> None:
    with pytest.raises(ValueError, match="stop string is empty"):
        StopStrings(["a", ""])
    with pytest.raises(TypeError, match="stop string is of type int, expected str"):
        StopStrings([1])  # type: ignore[list-item]


CONTROLS = {"<|im_start|>": 1, "<|im_end|>": 2}


def cut(text: str) -> list[str | int]:
    parts = re.split("(" + "|".join(map(re.escape, CONTROLS)) + ")", text)
    return [CONTROLS.get(part, part) for part in parts if part]


def controlled(stops: list[str], pieces: list[str | int]) -> tuple[list[str], str | None]:
    """Pushes strings and ids of control tokens; returns the strings that pass, and the match."""
    stop = StopStrings(stops).read_controls(cut)
    texts = [stop.marks.get(piece, "") if isinstance(piece, int) else piece for piece in pieces]
    return [*map(stop.push, texts), stop.finish()], stop.matched


@pytest.mark.parametrize(
    ("stops", "pieces", "passed", "matched"),
    [
        (["<|im_end|>"], ["a", 2, "b"], ["a", "", "", ""], "<|im_end|>"),
        (["<|im_end|>"], ["a", 1, "b"], ["a", "", "b", ""], None),  # another token
        (["<|im_end|>"], ["a<|im", "_end|>b"], ["a", "", ""], "<|im_end|>"),  # spelled as text
        (["<|im_end|>\n"], ["a", 2, "\n", "b"], ["a", "", "", "", ""], "<|im_end|>\n"),
        (["<|im_end|>\n"], ["a", 2, "b"], ["a", "", "b", ""], None),
        (["<|im_end|>\n"], ["a", 2, 2, "\nb"], ["a", "", "", "", ""], "<|im_end|>\n"),
        # a line end may begin the stop string, so it is held back
        (["\n<|im_end|>"], ["a\n", "\n", 2], ["a", "\n", "", ""], "\n<|im_end|>"),
        (["\n<|im_end|>"], ["a\n", "b"], ["a", "\nb", ""], None),
        (["x<|im_end|>y<|im_start|>"], ["x", 2, "y", 2, "z"], ["", "", "", "xy", "z", ""], None),
        (["<|im_end|><|im_start|>"], [2, 1], ["", "", ""], "<|im_end|><|im_start|>"),
        (["<|im_end|>", "\ud800"], ["a", 1, "b"], ["a", "", "b", ""], None),
        (["\ud800", "x<|im_end|>"], ["a", 2, "b"], ["a", "", "b", ""], None),
        (["<|im_end|>", "b"], ["a", 1, "bc"], ["a", "", "", ""], "b"),
    ],
)
def test_control_tokens(
    stops: list[str], pieces: list[str | int], passed: list[str], matched: str | None
) -> None:
    assert controlled(stops, pieces) == (passed, matched)


def test_more_control_tokens_than_marks() -> None:
    stops = [f"<{i}>" for i in range(2049)]
    with pytest.raises(ValueError, match="stop strings name more than 2048 control tokens"):
        StopStrings(stops).read_controls(lambda text: [int(text[1:-1])])
    StopStrings(stops[1:] * 2).read_controls(lambda text: [int(text[1:-1])])
