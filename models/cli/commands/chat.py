"""`jax-q4k chat`: chats with a model in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from jax_q4k import models

from ...sampling import Sampling
from .. import interrupts
from ..answers import AnswerWriter
from ..arguments import add_model
from ..lines import line_reader, read_message
from ..options import add_running, add_sampling, implementation_of, sampling_of
from ..output import (
    UsageError,
    load_model,
    loaded_draft,
    printable,
    reading_status,
    timings_line,
)
from ..prompts import add_show_thinking, add_template, template_variables

if TYPE_CHECKING:
    from ...engine.conversation import Conversation
    from ...engine.outputs import Piece, Timings

MAX_NEW_TOKENS = 1024

HELP = """\
/system TEXT  set the system message; without TEXT, remove it
/thinking     show the thoughts of the last answer
/thinking X   on, off: ask for thoughts or not; show, fold: write them in full, or as one line
/reset        forget the conversation, but keep the system message
/save FILE    write the messages as JSON
/quit         quit, like Ctrl-D
/help         show this help
A line that ends with \\ continues on the next; \"\"\" starts and ends a message of several lines.
Ctrl-C stops an answer; at the prompt, pressing it twice quits."""


def add_parser(commands: Any) -> None:
    description = "Chat with a model in the terminal. Also reads messages from a pipe."
    parser = commands.add_parser("chat", help="chat with a model", description=description)
    parser.set_defaults(command=_chat, runs_programs=True)
    add_model(parser)
    add_template(parser)
    add_show_thinking(parser)
    add_sampling(parser, max_new_tokens=MAX_NEW_TOKENS)
    add_running(parser.add_argument_group("running"))


def _chat(options: argparse.Namespace, notes: Console) -> int:
    if sys.stdin is None:
        raise UsageError("standard input is closed")
    model = load_model(options.model, notes, options.devices, options.lora)
    if model.tokenizer is None:
        raise UsageError(f"{options.model} has no tokenizer, which a chat needs")
    try:
        model.check_generates()
    except ValueError as error:
        raise UsageError(error) from None
    model.program_cache = options.programs
    sampling = sampling_of(options, model, notes)
    running = {"cache_dtype": options.cache_dtype, "draft": loaded_draft(options, notes)}
    conversation = models.Conversation(model, options.system, variables=template_variables(options))
    session = Session(conversation, sampling, running, notes)
    session.shows_thoughts = options.show_thinking
    with implementation_of(options):
        return session.run()


class Session:
    """Reads messages and commands until the user quits; streams answers."""

    def __init__(
        self,
        conversation: Conversation,
        sampling: Sampling,
        running: dict[str, Any],
        notes: Console,
    ) -> None:
        """Prepares a session; `running` has further keyword arguments of `stream`."""
        self.conversation = conversation
        self.sampling = sampling
        self.running = running
        self.notes = notes
        self.interactive = sys.stdin.isatty()
        self.shows_thoughts = False  # in full, instead of folded
        self.saved: set[str] = set()  # files that may be overwritten
        self.pressed = interrupts.Pressed()  # Ctrl-C since the last line
        self.commands: dict[str, Callable[[str], None]] = {
            "/system": self.set_system,
            "/thinking": self.set_thinking,
            "/reset": self.reset,
            "/save": self.save,
            "/help": lambda _: self.say(HELP),
        }

    def say(self, text: str) -> None:
        """Prints a note to the user, separate from answers."""
        self.notes.print(f"[dim]{escape(printable(text))}[/]", soft_wrap=True)

    def run(self) -> int:
        """Runs the session; returns the exit code."""
        if self.interactive:
            self.say("/help lists commands; Ctrl-D quits.")
        if not self.conversation.has_template:
            self.say("The file has no chat template: the model continues a transcript.")
        read = line_reader()
        with interrupts.noticing() as self.pressed:
            while True:
                try:
                    with interrupts.raising_at_prompt():
                        message = read_message(read)
                except UnicodeDecodeError as error:
                    raise UsageError(f"standard input is not text: {error}") from error
                except EOFError:
                    if self.interactive:
                        self.notes.print()
                    return 0
                except KeyboardInterrupt:
                    self.notes.print()
                    if self.pressed.once:
                        return 128 + signal.SIGINT
                    self.pressed.once = True
                    self.say("Press Ctrl-C again, or Ctrl-D, to quit.")
                    continue
                self.pressed.once = False
                if message.split(" ")[0] in ("/quit", "/exit", "/bye"):
                    return 0
                self.take(message)

    def take(self, message: str) -> None:
        """Executes a command, or answers a message; in a script, an error ends the chat."""
        name, _, rest = message.partition(" ")
        try:
            if re.fullmatch("/[a-z]+", name):
                self.commands.get(name, self.unknown)(rest.strip())
            elif message.strip():
                self.answer(message)
        except BrokenPipeError:  # the reader of the answers is gone
            raise
        except (ValueError, OSError) as error:
            if not self.interactive:
                raise UsageError(error) from error
            self.notes.print(f"[bold red]error:[/] {escape(printable(str(error)))}")

    def unknown(self, _: str) -> None:
        raise ValueError("no such command; /help lists them")

    def set_system(self, text: str) -> None:
        self.conversation.system = text or None
        self.say("The system message is set." if text else "There is no system message.")

    def set_thinking(self, text: str) -> None:
        """Switches thoughts on or off, or how they are shown; without a word, shows the last."""
        turns = self.conversation.turns
        if not text:
            thought = turns[-1].get("reasoning_content") if turns else None
            self.say(thought or "The last answer has no thoughts.")
        elif text in ("on", "off"):
            self.conversation.variables["enable_thinking"] = text == "on"
            self.say(f"Thinking is {text}, if the chat template has a switch for it.")
        elif text in ("show", "fold"):
            self.shows_thoughts = text == "show"
            self.say(f"Thoughts are shown {'in full' if self.shows_thoughts else 'as one line'}.")
        else:
            raise ValueError("/thinking takes on, off, show, fold, or nothing")

    def reset(self, _: str) -> None:
        self.conversation.turns.clear()
        self.say("The conversation starts over.")

    def save(self, file: str) -> None:
        if not file:
            raise ValueError("/save needs a file name")
        file = os.path.expanduser(file)
        if os.path.exists(file) and os.path.realpath(file) not in self.saved:
            raise ValueError(f"{file} exists; choose another name")
        with open(file, "w", encoding="utf-8") as target:
            json.dump(self.conversation.messages, target, ensure_ascii=False, indent=1)
            target.write("\n")
        self.saved.add(os.path.realpath(file))
        self.say(f"{len(self.conversation.messages)} messages are in {file}")

    def answer(self, message: str) -> None:
        """Sends a message, and streams the answer until it ends or Ctrl-C is pressed."""
        before = len(self.conversation.turns)
        pieces = self.conversation.stream(message, self.sampling, **self.running)
        if dropped := before - len(self.conversation.turns):
            self.say(f"The context is full: the oldest {dropped} messages are dropped.")
        with contextlib.closing(pieces):  # type: ignore[type-var]
            timings = self.write(pieces)
        self.say("stopped" if timings is None else timings_line(timings))

    def write(self, pieces: Iterator[Piece]) -> Timings | None:
        """Writes an answer as it streams; returns its timings, None if it was stopped."""
        timings: Timings | None = None
        with AnswerWriter(self.notes, shows_thoughts=self.shows_thoughts) as writer:
            status: contextlib.AbstractContextManager[Any] = reading_status(self.notes)
            while timings is None and not self.pressed.once:
                with status:
                    piece = next(pieces)
                status = contextlib.nullcontext()
                writer.write(piece)
                timings = None if piece.output is None else piece.output.timings
        return timings
