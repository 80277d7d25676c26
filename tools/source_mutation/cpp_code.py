"""Mutants of the C++ sources.

An operator `a + b` becomes `a + Plus<7>{} + b`, which mutants.h defines; precedence and operands
are unchanged. Mutants that are invalid C++, such as those of constant expressions, are found by the
compiler and dropped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from .mutant import Edit, Mutant

#: Operator -> its replacement; mutants.h defines each pair.
OPERATORS = {
    "+": "-",
    "-": "+",
    "*": "+",
    "/": "*",
    "%": "*",
    "<": "<=",
    "<=": "<",
    ">": ">=",
    ">=": ">",
    "==": "!=",
    "!=": "==",
    "&": "|",
    "|": "&",
    "<<": ">>",
    ">>": "<<",
}
NAMES = dict(
    zip(
        OPERATORS,
        ("Add", "Sub", "Mul", "Div", "Mod", "Lt", "Le", "Gt", "Ge", "Eq", "Ne", "And", "Or")
        + ("Shl", "Shr"),
        strict=True,
    )
)
_BINARY = re.compile(r"(?<=[\w\])]) (\+|-|\*|/|%|<|<=|>|>=|==|!=|&|\||<<|>>) (?=[\w(~!&*-])")
_NUMBER = re.compile(r"(?<![\w.])(\d+(?:\.\d*)?f?)(?![\w.'])")
_IF = re.compile(r"\b(?:if|while) \(")
_MINIMUM = re.compile(r"\bstd::(min|max)\(")
_STATEMENT = re.compile(r"^(\s+)[\w\]\[.>*-]+(?:\([^;{}]*\))? ?(?:[-+*/|&^]?= [^;{}]*)?;$")
_NO_CODE = re.compile(r"^\s*(?://|#|template|static_assert|using|constexpr|struct|enum|return;)")


def mutants(path: str, text: str) -> Iterator[Mutant]:
    """Finds every mutant of a source file's text, line by line."""
    for number, line in enumerate(text.split("\n"), 1):
        code = line.split("//")[0]
        if _NO_CODE.match(code) or "static constexpr" in code or '"' in code or code.endswith("\\"):
            continue
        for at in _BINARY.finditer(code):
            before, after = at[1], OPERATORS[at[1]]
            switch = f" jax_q4k_mutant::{NAMES[before]}<{{id}}>{{}} {before}"
            position = (number, at.end(1))
            yield _mutant("operator", path, line, before, after, Edit(position, position, switch))
        for at in _NUMBER.finditer(code):
            one = "1.0f" if at[1].endswith("f") else "1.0" if "." in at[1] else "1"
            now = f"(jax_q4k_mutant::on({{id}}) ? {at[1]} + {one} : {at[1]})"
            span = (number, at.start(1)), (number, at.end(1))
            yield _mutant("constant", path, line, at[1], f"{at[1]} + {one}", Edit(*span, now))
        for at in _IF.finditer(code):
            end = _closing(code, at.end() - 1)
            if end and ";" not in code[at.end() : end] and "constexpr" not in code:
                start = (number, at.end())
                opening = Edit(start, start, "jax_q4k_mutant::on({id}) != bool(")
                closing = Edit((number, end), (number, end), ")")
                yield _mutant("condition", path, line, "if (c)", "if (!c)", opening, closing)
        for at in _MINIMUM.finditer(code):
            span = (number, at.start()), (number, at.end(1))
            other = {"min": "max", "max": "min"}[at[1]]
            now = f"jax_q4k_mutant::{at[1]}_or_{other}<{{id}}>"
            if code[at.end(1)] == "(":
                yield _mutant("function", path, line, at[1], other, Edit(*span, now))
        if statement := _STATEMENT.match(code):
            position = (number, len(statement[1]))
            # with an else of its own: one may follow that belongs to an `if` above
            edit = Edit(position, position, "if (jax_q4k_mutant::on({id})) {} else ")
            yield _mutant("statement", path, line, code.strip(), ";", edit)


def _mutant(operator: str, path: str, line: str, before: str, after: str, *edits: Edit) -> Mutant:
    position = edits[0].start
    return Mutant(operator, path, position[0], f"{before} in: {line.strip()}", after, edits)


def _closing(code: str, opening: int) -> int | None:
    """Returns the column of the parenthesis that closes the one at `opening`, or None."""
    depth = 0
    for column in range(opening, len(code)):
        depth += {"(": 1, ")": -1}.get(code[column], 0)
        if depth == 0:
            return column
    return None


def header() -> str:
    """Returns the text of mutants.h, which the compiler includes before every source."""
    pairs = "\n".join(
        f"JAX_Q4K_MUTANT({NAMES[operator]}, {operator}, {other})"
        for operator, other in OPERATORS.items()
    )
    return _HEADER + pairs + "\n}  // namespace jax_q4k_mutant\n"


_HEADER = r"""
#pragma once
#include <unistd.h>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace jax_q4k_mutant {
struct State {
  unsigned char seen[1 << 16];
  int active;
};
// one for the library, whatever includes this
inline __attribute__((visibility("default"))) State state{{}, -1};

inline __attribute__((noinline)) void see(int number) {
  state.seen[number] = 1;
  if (state.active < 0) {
    const char* active = std::getenv("MUTANT");
    state.active = active ? std::atoi(active) : 0;
  }
  const char *folder = std::getenv("MUTANT_HITS"), *test = std::getenv("PYTEST_CURRENT_TEST");
  if (!folder) return;
  std::string name = test ? test : "";
  name = name.substr(0, name.rfind(' '));
  const std::string path = std::string(folder) + "/" + std::to_string(getpid()) + ".cpp";
  if (FILE* file = std::fopen(path.c_str(), "a")) {
    std::fprintf(file, "%d\t%s\n", number, name.c_str());
    std::fclose(file);
  }
}

inline __attribute__((always_inline)) bool on(int number) {
  if (__builtin_expect(!state.seen[number], 0)) see(number);
  return __builtin_expect(state.active == number, 0);
}

template <int number, class A, class B> auto min_or_max(const A& a, const B& b) {
  return on(number) ? std::max(a, b) : std::min(a, b);
}
template <int number, class A, class B> auto max_or_min(const A& a, const B& b) {
  return on(number) ? std::min(a, b) : std::max(a, b);
}
template <int number, class T, class A, class B> T min_or_max(const A& a, const B& b) {
  return on(number) ? std::max<T>(a, b) : std::min<T>(a, b);
}

#define JAX_Q4K_MUTANT(name, operation, other)                                                   \
  template <int number> struct name {};                                                          \
  template <int number, class A> struct name##Left { const A& a; };                              \
  template <int number, class A>                                                                 \
  inline __attribute__((always_inline)) name##Left<number, A> operator operation(                \
      const A& a, name<number>) {                                                                \
    return {a};                                                                                  \
  }                                                                                              \
  template <int number, class A, class B>                                                        \
  inline __attribute__((always_inline)) auto operator operation(                                 \
      name##Left<number, A> left, const B& b)->decltype(left.a operation b) {                    \
    decltype(left.a operation b) was = left.a operation b;                                       \
    if (on(number)) was = left.a other b;                                                        \
    return was;                                                                                  \
  }

extern "C" inline __attribute__((visibility("default"), used)) void jax_q4k_mutants_reset() {
  for (auto& seen : state.seen) seen = 0;
  state.active = -1;
}

"""
