"""Checked access to metadata: types, bounds, defaults, error messages."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import jax_q4k as jq
from jax_q4k.gguf import Fields

VALUES: dict[str, Any] = {
    "a.text": "x",
    "a.flag": True,
    "a.count": 3,
    "a.rate": 0.5,
    "a.nothing": None,
    "a.small": np.uint8(7),
    "a.equal": np.array([4, 4]),
    "a.mixed": np.array([4, 5]),
    "a.names": ["x", "y"],
    "a.huge": 10**400,
    "b.count": 9,
}
FIELDS = Fields(VALUES, "f.gguf").under("a.")


def test_values_of_every_type() -> None:
    assert (FIELDS.string("text"), FIELDS.boolean("flag"), FIELDS.integer("count")) == (
        "x",
        True,
        3,
    )
    assert (FIELDS.number("rate"), FIELDS.number("count")) == (0.5, 3.0)
    assert FIELDS.integer("small") == 7 and type(FIELDS.integer("small")) is int
    assert FIELDS.integer("equal", least=1, most=9, repeated=True) == 4
    assert FIELDS.integer("equal", repeated=True) == 4
    assert FIELDS.integer("count", least=3) == FIELDS.integer("count", most=3) == 3
    assert FIELDS.number("rate", above=0.4) == FIELDS.number("rate", most=0.5) == 0.5
    assert FIELDS.strings("names") == ["x", "y"]
    numbers = FIELDS.numbers("mixed", np.float32)
    assert numbers.dtype == np.float32 and numbers.tolist() == [4, 5]
    assert "count" in FIELDS and "names" in FIELDS and "b.count" not in FIELDS


def test_defaults_stand_for_what_is_missing() -> None:
    assert FIELDS.integer("other", None) is None and FIELDS.string("nothing", "y") == "y"
    assert FIELDS.integer("other", 5, least=1, most=9) == 5
    assert FIELDS.number("other", 5, above=1, most=9) == 5.0
    assert FIELDS.numbers("other", np.int32, None) is None
    assert FIELDS.value("other", 1) == 1 and FIELDS.value("names") == ["x", "y"]
    with pytest.raises(jq.GGUFError, match="a.other: must be an integer from 1 to 9, not 0"):
        FIELDS.integer("other", 0, least=1, most=9)


@pytest.mark.parametrize(
    ("read", "problem"),
    [
        (lambda: FIELDS.integer("other"), "a.other: is missing, expected an integer"),
        (lambda: FIELDS.string("nothing"), "a.nothing: is missing, expected a string"),
        (lambda: FIELDS.value("other"), "a.other: is missing"),
        (lambda: FIELDS.strings("other"), "a.other: is missing"),
        (lambda: FIELDS.integer("flag"), "a.flag: is of type bool, expected int"),
        (lambda: FIELDS.boolean("count"), "a.count: is of type int, expected bool"),
        (lambda: FIELDS.string("equal"), "a.equal: is of type ndarray, expected str"),
        (lambda: FIELDS.number("flag"), "a.flag: is of type bool, expected float"),
        (lambda: FIELDS.number("huge"), "a.huge: must be a finite number"),
        (
            lambda: FIELDS.integer("count", least=4, most=9),
            "a.count: must be an integer from 4 to 9, not 3",
        ),
        (
            lambda: FIELDS.integer("mixed", least=1, most=9, repeated=True),
            r"a.mixed: must be an integer from 1 to 9, not array\(\[4, 5\]\)",
        ),
        (
            lambda: FIELDS.integer("equal", least=1, most=9),
            r"a.equal: must be an integer from 1 to 9, not array\(\[4, 4\]\)",
        ),
        (
            lambda: FIELDS.number("rate", above=0.5, most=1e6),
            r"a.rate: must be a number above 0.5 and up to 1e\+06, not 0.5",
        ),
        (lambda: FIELDS.number("huge", above=0.5, most=2), "a.huge: must be a number above 0.5"),
        (lambda: FIELDS.number("huge", above=0.5), "a.huge: must be a number above 0.5, not 1000"),
        (lambda: FIELDS.number("rate", above=0.5), "a.rate: must be a number above 0.5, not 0.5"),
        (lambda: FIELDS.number("rate", most=0.4), "a.rate: must be a number up to 0.4, not 0.5"),
        (
            lambda: Fields({"a.x": -math.inf}, "f.gguf").number("a.x", most=1),
            "a.x: must be a number up to 1, not -inf",
        ),
        (
            lambda: Fields({"a.x": -(10**400)}, "f.gguf").number("a.x", most=1),
            "a.x: must be a number up to 1, not -1000",
        ),
        (lambda: FIELDS.integer("count", least=4), "a.count: must be an integer from 4, not 3"),
        (lambda: FIELDS.integer("count", most=2), "a.count: must be an integer to 2, not 3"),
        (lambda: FIELDS.integer("text", least=4), "a.text: must be an integer from 4, not 'x'"),
        (
            lambda: FIELDS.integer("mixed", repeated=True),
            r"a.mixed: must be an integer, not array\(\[4, 5\]\)",
        ),
        (lambda: FIELDS.strings("text"), "a.text: is not an array of strings"),
        (lambda: FIELDS.numbers("names", np.float32), "a.names: is not an array of numbers"),
        (lambda: FIELDS.numbers("rate", np.int32), "a.rate: is not an array of integers"),
        (lambda: FIELDS.fail("x", "is odd"), "a.x: is odd"),
    ],
)
def test_bad_values_name_the_file_and_the_key(read: Any, problem: str) -> None:
    with pytest.raises(jq.GGUFError, match=f"^f.gguf: {problem}"):
        read()
