"""The process in which `chat.render` runs a chat template: one JSON object in, one out.

Run as a script, so that it imports jinja2 and nothing of this package.
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
    """`{% generation %}`: marks the assistant's text for training; here its body is rendered as it
    is.
    """

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def limit_memory(megabytes: int) -> None:
    if sys.platform != "linux":
        return  # elsewhere the limit is not honoured, or breaks the interpreter
    import resource

    size = megabytes << 20
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """The `tojson` of chat templates: Jinja's own escapes characters for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def environment() -> ImmutableSandboxedEnvironment:
    """What Hugging Face's `apply_chat_template` offers templates, in the sandbox."""
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    env.filters["tojson"] = to_json
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return env


def render(template: str, context: dict[str, Any], characters: int) -> str:
    pieces, size = [], 0
    for piece in environment().from_string(template).generate(context):
        pieces.append(piece)
        size += len(piece)
        if size > characters:
            raise TemplateError(f"output exceeds {characters} characters")
    return "".join(pieces)


def main() -> None:
    job = json.load(sys.stdin)
    limit_memory(job["megabytes"])
    try:
        answer = {"text": render(job["template"], job["context"], job["characters"])}
    except MemoryError:
        answer = {"error": f"needs more than {job['megabytes']} MB"}
    except RecursionError:
        answer = {"error": "recurses too deeply"}
    except Exception as error:  # whatever a template can bring about is the template's error
        answer = {"error": f"{type(error).__name__}: {error}"[:2000]}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
