"""Chooses the types of a model's tensors: by a recipe, and by the user's own choices."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from jax_q4k import gguf, quantizers

from ...config import Config
from ...config.tensors import expected_tensors
from ...support.warn import warn
from .. import fused
from . import recipes

#: Regular expression, which is searched in names of tensors -> ggml type name. The first that is
#: found counts.
Types = Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class QuantizationPlan:
    """Types and sizes of a model file that has not been written yet.

    Attributes:
      types: name in the file -> ggml type name.
      shapes: name in the file -> row-major shape.
    """

    types: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, without metadata."""
        return sum(self.nbytes_of(name) for name in self.types)

    @property
    def bits_per_weight(self) -> float:
        """Mean over all tensors."""
        return 8 * self.nbytes / sum(map(math.prod, self.shapes.values()))

    def nbytes_of(self, name: str) -> int:
        """Returns the bytes of one tensor."""
        return gguf.TensorPieces(self.types[name], self.shapes[name], tuple).nbytes


class Choices:
    """A user's choices of types, which have precedence over a recipe's."""

    def __init__(self, types: Types | None = None) -> None:
        """Checks the choices; raises ValueError for a bad expression or an unknown type."""
        self._patterns = [
            (_pattern(pattern), _type(pattern, kind)) for pattern, kind in (types or {}).items()
        ]

    def type_of(self, name: str) -> str | None:
        """Returns the type chosen for a tensor; None if there is no choice."""
        found = (kind for pattern, kind in self._patterns if pattern.search(name))
        return next(found, None)

    def check_used(self, names: list[str]) -> None:
        """Raises ValueError for an expression that is found in none of the names."""
        for pattern, _ in self._patterns:
            if not any(map(pattern.search, names)):
                problem = "is found in no name of a tensor that can be quantized"
                if pattern.search("output.weight"):
                    problem += " (the embedding is the output layer)"
                raise ValueError(f"types: {pattern.pattern!r} {problem}, such as {names[-1]!r}")


def _pattern(text: Any) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except (re.error, TypeError) as error:
        raise ValueError(f"types: {text!r} is not a regular expression: {error}") from None


def _type(pattern: str, kind: Any) -> str:
    known = (*quantizers.names(), *gguf.PLAIN)
    if kind not in known:
        raise ValueError(f"types: {pattern!r} has type {kind!r}; it must be one of {known}")
    return str(kind)


def choose_types(
    recipe: recipes.Recipe,
    choices: Choices,
    config: Config,
    shapes: Mapping[str, tuple[int, ...]],
    importance: Mapping[str, Any],
    packed: Mapping[str, str],
) -> dict[str, str]:
    """Returns tensor name -> ggml type name, the same for all parts of a fused tensor.

    Warns of tensors that cannot have the type that is wanted, and of tensors that are already
    packed.

    packed: name -> type of the latter. Raises ValueError for choices that no tensor has.
    """
    has_importance = bool(importance)

    def choose(in_files: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
        choices.check_used([n for n, s in in_files.items() if not recipes.is_unquantized(n, s)])
        wanted = recipes.wanted_types(
            recipe, config, in_files, importance=has_importance, chosen=choices.type_of
        )
        types = recipes.fitting_types(wanted, in_files)
        _warn_of_fallbacks(wanted, types)
        return types

    types = fused.types_by_file(config, shapes, choose)
    _warn_of_packed(packed, types)
    if has_importance:
        _warn_of_unweighted(config, types, importance)
    return types


def copied_types(
    choices: Choices,
    shapes: Mapping[str, tuple[int, ...]],
    types: Mapping[str, str],
    packed: Mapping[str, str],
) -> dict[str, str]:
    """Returns tensor name -> ggml type name: its own in `types`, unless there is a choice.

    Warns and raises like `choose_types`.
    """
    quantized = [name for name, shape in shapes.items() if not recipes.is_unquantized(name, shape)]
    choices.check_used(quantized)
    chosen = {name: kind for name in quantized if (kind := choices.type_of(name)) is not None}
    fitting = recipes.fitting_types(chosen, shapes)
    _warn_of_fallbacks(chosen, fitting)
    _warn_of_packed(packed, fitting)
    return {**types, **fitting}


def _warn_of_fallbacks(wanted: Mapping[str, str], types: Mapping[str, str]) -> None:
    """Warns of tensors that get another type than the recipe's, like llama-quantize."""
    pairs = Counter((kind, types[name]) for name, kind in wanted.items() if types[name] != kind)
    if pairs:
        shown = ", ".join(f"{n} {kind} -> {got}" for (kind, got), n in sorted(pairs.items()))
        warn(
            f"{sum(pairs.values())} of {len(types)} tensors have rows that are not a multiple of "
            f"their type's block, and get another type: {shown}"
        )


def _warn_of_unweighted(config: Config, types: Mapping[str, str], importance: Any) -> None:
    """Warns of matrices without an entry in the importance matrix, like llama-quantize."""
    expected = expected_tensors(config)
    matrices = [
        name
        for name, kind in types.items()
        if kind not in gguf.PLAIN and not expected[name].entry.table
    ]
    if missing := [name for name in matrices if name not in importance]:
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        message = f"importance has no weights for {len(missing)} of {len(matrices)} matrices"
        warn(f"{message}, which are quantized without: {shown}")


def _warn_of_packed(packed: Mapping[str, str], types: Mapping[str, str]) -> None:
    again = Counter(
        kind
        for name, kind in packed.items()
        if types.get(name, kind) not in (kind, *gguf.PLAIN)  # floats hold what is packed
    )
    if again:
        shown = ", ".join(f"{count} {kind}" for kind, count in sorted(again.items()))
        problem = f"{sum(again.values())} tensors are already quantized ({shown})"
        advice = "quantizing them again adds error; start from a float model if there is one"
        warn(f"{problem}: {advice}")
