"""The process in which `chat.render` runs chat templates: a JSON object a line in, and one out.

It runs as a script, so that it imports jinja2 and nothing of this package. It ends with its
standard input, and by an alarm of the kernel's where a template outlives the process that asked.
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

MAX_COMPILED = 8  # templates that are kept compiled,
MAX_KEPT = 1 << 20  # each of so many characters at most
GRACE = 1.0  # seconds beyond a job's limit, by which the asking process has ended this one

#: The present, or the time that a job names.
Clock = Callable[[], datetime.datetime]


class Generation(Extension):
    """`{% generation %}`, which marks the assistant's text for training; its body is rendered."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Sandbox:
    """One template in an environment of its own, with what transformers gives templates.

    Attributes:
      clock: what `strftime_now` tells.
      marks: characters that `tojson` never escapes; see `marking.py`.
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
        """The `tojson` of transformers, without the escapes for HTML of Jinja's own."""
        text = json.dumps(
            value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
        )
        return re.sub("[^\0-\x7f]", self._escaped, text) if ensure_ascii else text

    def _escaped(self, match: re.Match[str]) -> str:
        character = match.group()
        return character if character in self.marks else json.dumps(character)[1:-1]

    def render(self, context: dict[str, Any], characters: int) -> str:
        """The text, of at most `characters`; Jinja's errors and the template's own."""
        pieces, size = [], 0
        for piece in self.template.generate(context):
            pieces.append(piece)
            size += len(piece)
            if size > characters:
                raise TemplateError(f"output exceeds {characters} characters")
        return "".join(pieces)


def raise_exception(message: str) -> NoReturn:
    """A template's own error."""
    raise TemplateError(message)


class Worker:
    """Answers jobs; templates used lately stay compiled."""

    def __init__(self) -> None:
        self._compiled: collections.OrderedDict[str, Sandbox] = collections.OrderedDict()

    def _sandbox(self, template: str) -> Sandbox:
        sandbox = self._compiled.pop(template, None) or Sandbox(template)
        if len(template) <= MAX_KEPT:
            self._compiled[template] = sandbox  # the latest, and so the last to go
        if len(self._compiled) > MAX_COMPILED:
            self._compiled.popitem(last=False)
        return sandbox

    def answer(self, job: dict[str, Any]) -> dict[str, str]:
        """{"text": ...}, {"error": ...}, or {"memory": ...}, after which this process is spent."""
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
        except Exception as error:  # whatever a template can bring about is the template's error
            return {"error": f"{type(error).__name__}: {error}"[:2000]}


def limit_memory(megabytes: int | None) -> None:
    """Bounds the process's address space, on Linux; None lifts the bound."""
    if sys.platform != "linux":
        return  # elsewhere the limit is not honoured, or breaks the interpreter
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_AS)
    size = most if megabytes is None else megabytes << 20
    if most != resource.RLIM_INFINITY:
        size = min(size, most)
    resource.setrlimit(resource.RLIMIT_AS, (size, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def answered(worker: Worker, line: bytes) -> str:
    """The answer to a job, both as JSON; keeps to the job's limits."""
    job = json.loads(line)
    signal.setitimer(signal.ITIMER_REAL, job["seconds"] + GRACE)
    limit_memory(job["megabytes"])
    answer = worker.answer(job)
    limit_memory(None)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return json.dumps(answer)


def main() -> None:
    """Answers the jobs on standard input, one after the other."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    worker = Worker()
    while line := sys.stdin.buffer.readline():
        print(answered(worker, line), flush=True)


if __name__ == "__main__":
    main()
