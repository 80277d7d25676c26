"""The process in which `chat.render` runs a chat template: a JSON object in, a JSON object out.

It runs as a script, so that it imports jinja2 and nothing of this package.
"""

from __future__ import annotations

import datetime
import json
import sys
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Generation(Extension):
    """`{% generation %}`, which marks the assistant's text for training; its body is rendered."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def limit_memory(megabytes: int) -> None:
    """Bounds the process's address space, on Linux."""
    if sys.platform != "linux":
        return  # elsewhere the limit is not honoured, or breaks the interpreter
    import resource

    size = megabytes << 20
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def raise_exception(message: str) -> NoReturn:
    """A template's own error."""
    raise TemplateError(message)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The `tojson` of transformers, without the escapes for HTML of Jinja's own."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def environment() -> ImmutableSandboxedEnvironment:
    """The sandbox, with the filters and functions of transformers' `apply_chat_template`."""
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    env.filters["tojson"] = to_json
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return env


def render(template: str, context: dict[str, Any], characters: int) -> str:
    """A template's text, of at most `characters`; Jinja's errors and the template's own."""
    pieces, size = [], 0
    for piece in environment().from_string(template).generate(context):
        pieces.append(piece)
        size += len(piece)
        if size > characters:
            raise TemplateError(f"output exceeds {characters} characters")
    return "".join(pieces)


def merged(messages: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Messages whose system message begins the user's first; None where there are no such two."""
    roles = [message.get("role") for message in messages[:2]]
    contents = [message.get("content") for message in messages[:2]]
    texts = [content for content in contents if isinstance(content, str)]
    if roles != ["system", "user"] or len(texts) != 2:
        return None
    return [messages[1] | {"content": "\n\n".join(texts)}, *messages[2:]]


def render_or_merge(template: str, context: dict[str, Any], characters: int) -> str:
    """`render`; of `merged` messages, where the template says that it has no system role."""
    try:
        return render(template, context, characters)
    except TemplateError as error:
        messages = merged(context["messages"])
        if messages is None or "system role not supported" not in str(error).lower():
            raise
        return render(template, context | {"messages": messages}, characters)


def main() -> None:
    """Answers {"text": ...} or {"error": ...} to the job on standard input."""
    job = json.load(sys.stdin)
    limit_memory(job["megabytes"])
    try:
        answer = {"text": render_or_merge(job["template"], job["context"], job["characters"])}
    except MemoryError:
        answer = {"error": f"needs more than {job['megabytes']} MB"}
    except RecursionError:
        answer = {"error": "recurses too deeply"}
    except Exception as error:  # whatever a template can bring about is the template's error
        answer = {"error": f"{type(error).__name__}: {error}"[:2000]}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
