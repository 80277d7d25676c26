"""Stop strings over streams: the outcome depends on the text alone, not on how it is cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_q4k.models.stopping import StopStrings


def stream(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    stop = StopStrings(stops)
    output = "".join(map(stop.push, pieces)) + stop.finish()
    return output, stop.matched


def reference(stops: list[str], text: str) -> tuple[str, str | None]:
    """Read character by character, look for a stop string at the end of what has been read."""
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


def test_what_only_looked_like_a_match_is_passed_on() -> None:
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
