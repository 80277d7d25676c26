"""Compiles constraints for a vocabulary, with llguidance, and tells which tokens may come next."""

from __future__ import annotations

import collections
import functools
import itertools
import json
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf.constants import TokenType

from ..support.json_forms import SPACE, STRICT
from ..support.lru_cache import LRUCache
from ..tokenizer import Tokenizer
from .constraint import Constraint, ConstraintError, Thought
from .json_schemas import prepared

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

#: Compiled constraints that are kept.
_MOST_KEPT = 64

#: Bounds of compiling a grammar, a few seconds, and of a step, a few milliseconds.
_LIMITS = {"initial_lexer_fuel": 2_000_000, "step_lexer_fuel": 400_000, "max_lexer_states": 100_000}


#: Text without a space, which precedes a text whose tokens are wanted without an added space.
_BEFORE = "\n"


class Grammars:
    """Compiler of constraints for one vocabulary. Its methods may be called from any thread."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Prepares it; `vocab_size` is that of the model, which may exceed the tokenizer's."""
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._compiled: LRUCache = LRUCache(_MOST_KEPT)
        self._lock = threading.Lock()

    def matcher(self, constraint: Constraint) -> Matcher:
        """Returns the state of an answer that has not begun.

        Raises:
          ConstraintError: the constraint is malformed, too complex, or not supported. ImportError:
            llguidance is not installed.
        """
        matcher: LLMatcher | None = None
        if constraint.kind != "anything":
            key = constraint.kind, constraint.source, constraint.thought is not None
            make = functools.partial(self._compile, constraint)
            matcher = self._compiled.get(key, make).deep_copy()
        before = None
        if constraint.thought is not None:
            before = Preface(self._tokenizer, constraint.thought)
        return Matcher(matcher, before)

    @functools.cached_property
    def _vocabulary(self) -> LLTokenizer:
        """llguidance's view of the vocabulary, which takes a second to make for a large one."""
        llguidance = _llguidance()
        wrapped = llguidance.TokenizerWrapper(_Vocabulary(self._tokenizer))
        ends = list(self._tokenizer.eos_token_ids)
        return llguidance.LLTokenizer(wrapped, n_vocab=self._vocab_size, eos_token=ends)

    def _compile(self, constraint: Constraint) -> LLMatcher:
        llguidance = _llguidance()
        with self._lock:
            vocabulary = self._vocabulary
        limits = llguidance.LLParserLimits(**_LIMITS, verbose_errors=False)
        grammar = _grammar_of(constraint)
        matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise ConstraintError(f"{constraint.kind}: {_first_line(matcher.get_error())}")
        # What the library would ignore changes which answers are valid.
        problem = next(iter(matcher.get_grammar_warnings()), "")
        if not problem:  # some grammars fail at the first step
            first = matcher.deep_copy()
            first.compute_bitmask()
            problem = first.get_error()
        if problem:
            raise ConstraintError(f"{constraint.kind}: {_first_line(problem)}")
        return matcher


class Matcher:
    """State of one answer under a constraint. One thread uses it at a time.

    Attributes:
      is_finished: whether the answer is complete and nothing can follow.
    """

    def __init__(self, matcher: LLMatcher | None, before: Preface | None) -> None:
        """Begins an answer. matcher: None allows everything. before: what may precede its form."""
        self._matcher, self._before = matcher, before
        self._forced: collections.deque[int] = collections.deque()
        self.is_finished = False

    @property
    def is_free(self) -> bool:
        """Whether everything may follow: the thought is over, and nothing else was demanded."""
        return self._matcher is None and self._before is None

    def allow(self, mask: np.ndarray) -> None:
        """Writes which tokens may come next to `mask`, int32 (vocab_size / 32,), a bit for each.

        If that is too complex to tell, it allows all, and the next `push` fails.
        """
        before = self._before
        if forced := self.forced():
            allow_only(mask, forced[0])
        elif before is not None and before.is_inside:
            before.exclude_ends(mask)
        elif self._matcher is not None:
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if self._matcher.is_error():
                mask[:] = -1
            elif before is not None:
                before.allow_begin(mask)

    def push(self, token: int) -> None:
        """Appends a token to the answer; raises ConstraintError if it leaves the form."""
        if self._before is not None:
            taken = self._before.takes(token)
            if not taken or self._before.is_over:
                self._before = None
            if taken:
                return
        if self._matcher is None:
            return
        if self._forced and self._forced[0] == token:
            self._forced.popleft()
        else:
            self._forced.clear()
        if not self._matcher.consume_token(token) or self._matcher.is_error():
            error = _first_line(self._matcher.get_error())
            raise ConstraintError(f"the answer cannot satisfy its constraint: {error}")
        self.is_finished = self._matcher.is_stopped()

    def forced(self) -> list[int]:
        """Returns the tokens that must come next, up to the first choice."""
        if self._before is not None:
            return self._before.forced()
        if self._matcher is None or self.is_finished:
            return []
        if not self._forced:
            self._forced.extend(self._matcher.compute_ff_tokens())
        return list(self._forced)


class Preface:
    """Beginning of one answer before its form: a thought, or nothing.

    Attributes:
      is_inside: whether the thought has begun and not ended.
      is_over: whether the form follows.
    """

    def __init__(self, tokenizer: Tokenizer, thought: Thought) -> None:
        self._tokenizer, self._end = tokenizer, thought.end.encode()
        self._begin = None if thought.begin is None else _token_of(tokenizer, thought.begin)
        self.is_inside, self.is_over = thought.begin is None, False
        self._budget, self._last = thought.budget, b""
        self._closing: list[int] = []
        if self.is_inside:
            self._count(0)

    def takes(self, token: int) -> bool:
        """Adds a token; returns False if it belongs to the form."""
        if not self.is_inside:
            self.is_inside = token == self._begin
            self._count(0)
            return self.is_inside
        if token in self._tokenizer.eos_token_ids:
            raise ConstraintError("the answer cannot satisfy its constraint: its thought is all")
        self._last += self._tokenizer.token_bytes(token)
        if self._end in self._last:
            self.is_over = True
            return True
        self._last = self._last[-len(self._end) :]
        self._count(1)
        return True

    def forced(self) -> list[int]:
        """Returns the tokens that end a thought whose budget is used up."""
        return self._closing

    def exclude_ends(self, mask: np.ndarray) -> None:
        """Excludes end tokens: an answer may not end in its thought."""
        for token in self._tokenizer.eos_token_ids:
            mask.view(np.uint32)[token // 32] &= ~np.uint32(1 << token % 32)

    def allow_begin(self, mask: np.ndarray) -> None:
        """Allows the token that begins a thought, if there may be one."""
        if self._begin is not None:
            mask.view(np.uint32)[self._begin // 32] |= np.uint32(1 << self._begin % 32)

    def _count(self, tokens: int) -> None:
        """Counts tokens of the thought; forces its end when the budget is used up."""
        if self._closing:
            self._closing = self._closing[tokens:]
        elif self._budget is not None:
            self._budget -= tokens
            if self._budget <= 0:
                end = self._end.decode()
                self._closing = self._tokenizer.encode(end, add_special=False, parse_special=True)


def _token_of(tokenizer: Tokenizer, text: str) -> int | None:
    """Returns the token that a text is; None if it is several."""
    ids = tokenizer.encode(text, add_special=False, parse_special=True)
    return ids[0] if len(ids) == 1 else None


def allow_only(mask: np.ndarray, token: int) -> None:
    """Makes `mask`, int32 (vocab_size / 32,), allow one token alone."""
    mask[:] = 0
    mask.view(np.uint32)[token // 32] = np.uint32(1 << token % 32)


class _Vocabulary:
    """A tokenizer as llguidance reads it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        count = range(tokenizer.vocab_size)
        special = TokenType.CONTROL, TokenType.UNKNOWN
        types = tokenizer.vocabulary.types
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = tokenizer.eos_token_id, tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(token) for token in count]
        self.special_token_ids = [token for token in count if types[token] in special]
        plain = {*count} - {*self.special_token_ids}
        self._ids = {self.tokens[token]: token for token in sorted(plain, reverse=True)}
        self._longest = tokenizer.longest_token

    def __call__(self, text: str | bytes) -> list[int]:
        """Returns tokens that spell a text in the middle of an answer; nothing is added to it."""
        raw = text if isinstance(text, bytes) else text.encode()
        text = raw.decode(errors="replace")
        for before in ("", _BEFORE):  # some tokenizers add a space to a text's beginning
            ids = self._tokenizer.encode(before + text, add_special=False)
            if before:
                spelled = itertools.accumulate(len(self.tokens[token]) for token in ids)
                added = sum(len(self.tokens[token]) for token in ids) - len(raw)
                ids = ids[next((i for i, n in enumerate(spelled, 1) if n >= added), 0) :]
            if b"".join(self.tokens[token] for token in ids) == raw:
                return ids
        return self._greedy(raw)

    def _greedy(self, raw: bytes) -> list[int]:
        """Returns the longest token at each place."""
        found, at = list[int](), 0
        while at < len(raw):
            ends = range(min(len(raw), at + self._longest), at, -1)
            end = next((end for end in ends if raw[at:end] in self._ids), None)
            if end is None:
                break  # a byte without a token
            found.append(self._ids[raw[at:end]])
            at = end
        return found


def _grammar_of(constraint: Constraint) -> str:
    """Returns a constraint as llguidance takes it; raises ConstraintError."""
    matcher, source = _llguidance().LLMatcher, constraint.source
    try:
        if constraint.kind == "json_schema":
            options = {"whitespace_pattern": SPACE}, STRICT
            found = matcher.grammar_from_json_schema(prepared(source), *options)
        elif constraint.kind == "regex":
            found = matcher.grammar_from_regex(source)
        elif constraint.kind == "choice":
            texts = " | ".join(json.dumps(text) for text in json.loads(source))
            found = _lark(f"start: {texts}")
        else:
            from llguidance.gbnf_to_lark import any_to_lark

            found = _lark(any_to_lark(source))
    except Exception as error:  # the conversion of GBNF raises errors of many types
        raise ConstraintError(f"{constraint.kind}: {_first_line(str(error))}") from None
    if constraint.thought is None:
        return str(found)
    (inner,) = json.loads(found)["grammars"]
    outer = {"name": "outer", "lark_grammar": "start: /[ \\n]{0,4}/ @inner"}
    return json.dumps({"grammars": [outer, {**inner, "name": "inner"}]})


def _lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def _llguidance() -> Any:
    try:
        import llguidance
    except ModuleNotFoundError:
        problem = "constraints need llguidance: pip install 'jax-q4k[serve]'"
        raise ImportError(problem) from None
    return llguidance


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:500]
