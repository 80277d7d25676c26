"""Script of the process that renders chat templates for `chat.render`; talks in JSON lines.

As a script it imports jinja2 but nothing of this package. The process ends when its standard input
closes, or by a timer signal if a template outlives the client process.
"""

from __future__ import annotations

import collections
import datetime
import json
import re
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_COMPILED = 8  # compiled templates in the cache
MAX_KEPT = 1 << 20  # characters; longer templates are not cached
GRACE = 1.0  # seconds after a job's limit; by then the client has ended this process

#: Returns the current time, or the time of a job.
Clock = Callable[[], datetime.datetime]


class Generation(Extension):
    """The tag `{% generation %}`, which marks text for training; renders only its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Sandbox:
    """One template in its own Jinja environment, with the extensions that transformers provides.

    Attributes:
      clock: time for `strftime_now`.
      marks: characters that `tojson` never escapes; see `token_escaping.py`.
    """

    def __init__(self, template: str) -> None:
        self.clock: Clock = datetime.datetime.now
        self.marks = ""
        env = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
        )
        env.filters["tojson"] = self.to_json
        env.globals["raise_exception"] = raise_exception
        env.globals["strftime_now"] = lambda form: self.clock().strftime(form)
        self.template: Template = env.from_string(template)

    def to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Implements `tojson` like transformers, without the HTML escapes of Jinja's version."""
        text = json.dumps(
            value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
        )
        return re.sub("[^\0-\x7f]", self._escaped, text) if ensure_ascii else text

    def _escaped(self, match: re.Match[str]) -> str:
        character = match.group()
        return character if character in self.marks else json.dumps(character)[1:-1]

    def render(self, context: dict[str, Any], characters: int) -> str:
        """Renders at most `characters` of text; raises Jinja's errors and the template's own."""
        pieces, size = [], 0
        for piece in self.template.generate(context):
            pieces.append(piece)
            size += len(piece)
            if size > characters:
                raise TemplateError(f"output exceeds {characters} characters")
        return "".join(pieces)


def raise_exception(message: str) -> NoReturn:
    """Raises an error on behalf of a template."""
    raise TemplateError(message)


class Worker:
    """Runs jobs, with an LRU cache of compiled templates."""

    def __init__(self) -> None:
        self._compiled: collections.OrderedDict[str, Sandbox] = collections.OrderedDict()

    def _sandbox(self, template: str) -> Sandbox:
        sandbox = self._compiled.pop(template, None) or Sandbox(template)
        if len(template) <= MAX_KEPT:
            self._compiled[template] = sandbox  # the newest is evicted last
        if len(self._compiled) > MAX_COMPILED:
            self._compiled.popitem(last=False)
        return sandbox

    def answer(self, job: dict[str, Any]) -> dict[str, str]:
        """Runs a job; returns {"text": ...}, {"error": ...} or {"memory": ...}.

        After "memory" (out of memory), this process must not be used again.
        """
        try:
            sandbox = self._sandbox(job["template"])
            now, sandbox.marks = job["now"], job["marks"]
            time = None if now is None else datetime.datetime.fromisoformat(now)
            sandbox.clock = lambda: time or datetime.datetime.now()
            return {"text": sandbox.render(job["context"], job["characters"])}
        except MemoryError:
            return {"memory": f"needs more than {job['megabytes']} MB"}
        except RecursionError:
            return {"error": "recurses too deeply"}
        except Exception as error:  # any error that a template causes is the template's error
            return {"error": f"{type(error).__name__}: {error}"[:2000]}


def limit_memory(megabytes: int | None) -> None:
    """Limits the process's address space on Linux; None removes the limit."""
    if sys.platform != "linux":
        return  # other systems ignore the limit, or it breaks the interpreter
    import resource

    _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    size = hard_limit if megabytes is None else megabytes << 20
    if hard_limit != resource.RLIM_INFINITY:
        size = min(size, hard_limit)
    resource.setrlimit(resource.RLIMIT_AS, (size, hard_limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def answered(worker: Worker, line: bytes) -> str:
    """Runs a job within its limits, given as a line of JSON; returns its result as JSON."""
    job = json.loads(line)
    signal.setitimer(signal.ITIMER_REAL, job["seconds"] + GRACE)
    limit_memory(job["megabytes"])
    answer = worker.answer(job)
    limit_memory(None)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return json.dumps(answer)


def main() -> None:
    """Answers the jobs on standard input in sequence."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    worker = Worker()
    while line := sys.stdin.buffer.readline():
        print(answered(worker, line), flush=True)


if __name__ == "__main__":
    main()
