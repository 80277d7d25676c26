"""`jax-q4k chat`, from a pipe and on a terminal."""

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time

import pytest
from rich.cells import cell_len
from rich.console import Console
from support.gguf_bytes import rewritten, text_entry

from jax_q4k import models
from jax_q4k.models import cli
from jax_q4k.models.cli.answers import AnswerWriter
from jax_q4k.models.cli.lines import line_reader, read_message
from jax_q4k.models.engine import generate as generation
from jax_q4k.models.engine.outputs import Output, Piece, Timings

from ...golden_files import path

#: With a field for thoughts, and a switch for them.
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}<think>"
    "{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}{% endfor %}"
    "{% if enable_thinking is defined %}enable_thinking={{ enable_thinking }}{% endif %}"
)


@pytest.fixture
def run(capsys, monkeypatch):
    """Returns a function that runs a chat on `lines`, a string or a file.

    It returns (exit code, standard output, standard error).
    """

    def run(lines, *arguments):
        capsys.readouterr()
        stdin = io.StringIO(lines) if isinstance(lines, str) else lines
        monkeypatch.setattr(sys, "stdin", stdin)
        code = cli.main(("chat", "--temperature", "0", *arguments))
        return code, *capsys.readouterr()

    return run


@pytest.fixture(scope="session")
def templated(tmp_path_factory):
    """The text model, with a chat template."""
    file = tmp_path_factory.mktemp("chat") / "templated.gguf"
    entry = text_entry("tokenizer.chat_template", TEMPLATE)
    file.write_bytes(rewritten(path("text-spm"), {"tokenizer.chat_template": entry}))
    return str(file)


def test_a_chat_in_a_pipe(run, templated, tmp_path):
    """Two turns; the second prompt contains the first turn, and the output equals the library's."""
    saved = tmp_path / "saved.json"
    code, out, err = run(
        f"Hello\\\nthere\n/save {saved}\nMore\n/save {saved}\n/quit\nnever\n",
        *(templated, "--system", "Be kind.", "-n", "6"),
    )
    assert code == 0
    messages = json.loads(saved.read_text())
    assert [m["role"] for m in messages] == ["system", *["user", "assistant"] * 2]
    assert [m["content"] for m in messages[:4:3]] == ["Be kind.", "More"]
    assert messages[1]["content"] == "Hello\nthere"
    assert out == "".join(f"{m['content']}\n" for m in messages[2::2])
    text_model = models.load(templated)
    for end in (2, 4):
        ids = models.chat.encode(text_model.tokenizer, messages[:end])
        want = models.generate(text_model, ids, max_new_tokens=6).text
        assert messages[end]["content"] == want.strip()
    seconds = r"seconds: (compiling \d+\.\d\d, )?prompt \d+\.\d{3} \(\d+ tokens.*\), decoding \d+"
    speed = rf"6 tokens, \d+\.\d tokens/s; {seconds}"
    assert len(re.findall(speed, err)) == 2
    assert f"3 messages are in {saved}" in err and f"5 messages are in {saved}" in err


def test_commands_of_a_chat(run, templated, tmp_path):
    first, second = tmp_path / "1", tmp_path / "2"
    lines = f"Hi\n/reset\n/system Be brief.\n/save {first}\n/system\n\n/save {second}\n/help\n"
    code, out, err = run(lines, templated, "-n", "1")
    assert code == 0 and out.count("\n") == 1
    assert json.loads(first.read_text()) == [{"role": "system", "content": "Be brief."}]
    assert json.loads(second.read_text()) == []
    assert "/save FILE    write the messages as JSON" in err


THOUGHT = "First [this],\n*then* that."


@pytest.fixture
def prompts(monkeypatch):
    """Makes a model answer with a thought and a text; returns a list that gets its prompts."""
    prompts = []

    def stream(model, prompt, *_, **__):
        prompts.append(model.tokenizer.decode(prompt))
        text = f"<think>\n{THOUGHT}\n</think>\n\nIt is so."
        pieces = re.findall(r"(?s)<.*?>|.", text)
        yield from (Piece(i, piece) for i, piece in enumerate(pieces))
        yield Piece(None, "", Output([*range(len(pieces))], text, "end", Timings()))

    monkeypatch.setattr(generation, "stream", stream)
    return prompts


FOLDED = rf"Thought for 0\.\d s \({len(THOUGHT)} tokens\)"


def test_thoughts_are_folded(run, templated, prompts, tmp_path):
    """Only answers go to standard output; the template gets the thoughts."""
    code, out, err = run(f"Why?\nAnd?\n/save {tmp_path / 'saved'}\n", templated)
    assert (code, out) == (0, "It is so.\n" * 2)
    assert len(re.findall(rf"(?m)^{FOLDED}$", err)) == 2 and "First" not in err
    assert prompts[1] == f"<user>Why?<assistant><think>{THOUGHT}</think>It is so.<user>And?"
    saved = json.loads((tmp_path / "saved").read_text())[1]
    assert saved == {"role": "assistant", "content": "It is so.", "reasoning_content": THOUGHT}


def test_thoughts_in_full(run, templated, prompts):
    code, out, err = run("Why?\n/thinking fold\nWhy?\n", templated, "--show-thinking")
    assert (code, out) == (0, "It is so.\n" * 2)
    before, after = err.split("Thoughts are shown as one line.")
    assert re.search(rf"(?m)^{re.escape(THOUGHT)}\n{FOLDED}$", before) and "First" not in after
    code, out, err = run("Why?\n/thinking show\nWhy?\n", templated)
    before, after = err.split("Thoughts are shown in full.")
    assert THOUGHT in after and "First" not in before


def test_the_thinking_command(run, templated, prompts):
    lines = "/thinking\nWhy?\n/thinking\n/thinking off\n/reset\nWhy?\n/thinking on\nWhy?\n"
    code, out, err = run(lines, templated, "--no-thinking")
    assert (code, out) == (0, "It is so.\n" * 3)
    assert err.count(THOUGHT) == 1 and "The last answer has no thoughts." in err
    assert [re.findall("enable_thinking=(.*)", prompt) for prompt in prompts] == [
        ["False"],
        ["False"],
        ["True"],
    ]
    code, _, err = run("/thinking maybe\n", templated)
    assert code == 2 and "/thinking takes on, off, show, fold, or nothing" in err


def test_a_thought_that_took_all_tokens(capsys):
    for reason, text in (("length", ""), ("length", "Yes"), ("end", "")):
        output = Output([1], text, reason, Timings(), reasoning="Hm")
        with AnswerWriter(Console(stderr=True, highlight=False)) as writer:
            writer.write(Piece(1, text, output, reasoning="Hm"))
        out, err = capsys.readouterr()
        assert out == f"{text}\n" and err.startswith("Thought for 0.0 s (1 token)\n")
        assert ("a larger number leaves room" in err) == ((reason, text) == ("length", ""))


def test_a_line_of_a_thought_fits_the_terminal():
    """It has the last words; wide characters take two columns."""
    for width, text in ((40, "one\ntwo \x1b[2J " * 50), (41, "漢字" * 50), (10, "word " * 9)):
        screen = io.StringIO()
        notes = Console(file=screen, force_terminal=True, width=width, highlight=False)
        writer = AnswerWriter(notes)
        writer.write(Piece(1, "", reasoning=text))
        writer._thought._live.refresh()
        writer.write(Piece(2, "Yes"))
        shown = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", screen.getvalue())
        lines = re.split(r"[\r\n]+", shown.strip())
        assert max(map(cell_len, lines[:-1])) <= width
        assert all(line.startswith("Thinking…"[:width]) for line in lines[:-1])
        assert width < 20 or any(re.search(r"two \ufffd\[2J|漢字", line) for line in lines)
        assert re.fullmatch(r"Thought for 0\.\d s \(1 token\)", lines[-1])


def test_a_full_context_is_said(run, templated):
    code, out, err = run(2 * f"{'word ' * 1100}\n", templated, "-n", "2")
    assert code == 0 and out.count("\n") == 2
    assert err.count("The context is full: the oldest 2 messages are dropped.") == 1


def test_a_model_without_template_continues_a_transcript(run):
    code, out, err = run("Hello\n", "--demo", "-n", "8")
    demo = models.load("demo")
    text = models.generate(demo, "User: Hello\nAssistant:", max_new_tokens=8, stop="\nUser:").text
    assert (code, out) == (0, text.strip() + "\n")
    assert "The file has no chat template: the model continues a transcript." in err


@pytest.mark.parametrize(
    ("lines", "arguments", "message"),
    [
        ("/bogus\n", (), "no such command; /help lists them"),
        ("/save\n", (), "/save needs a file name"),
        ("/save there\n", (), "there exists; choose another name"),
        ("/save /no/such/folder/x\n", (), "No such file or directory"),
        ("a " * 3000 + "\n", (), "tokens; the context length is 2048"),
        ("x\n", ("-n", "0"), "max_new_tokens=0 must be at least 1"),
    ],
)
def test_an_error_ends_a_script(run, templated, lines, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").touch()
    code, out, err = run(lines, templated, *arguments)
    assert (code, out) == (2, "") and message in err.splitlines()[-1]


@pytest.mark.slow("starts the command several times")
def test_a_template_that_refuses_a_message(run, tmp_path):
    file = tmp_path / "refusing.gguf"
    entry = text_entry("tokenizer.chat_template", "{{ raise_exception('not this') }}")
    file.write_bytes(rewritten(path("text-spm"), {"tokenizer.chat_template": entry}))
    code, out, err = run("x\n", str(file))
    assert (code, out) == (2, "") and err.endswith("chat template: TemplateError: not this\n")


@pytest.mark.slow("starts the command several times")
def test_input_and_output_that_are_none(run, templated, monkeypatch):
    bad = io.TextIOWrapper(io.BytesIO(b"a\xffb\n"), encoding="utf-8")
    for stdin, message in ((None, "is closed"), (bad, "is not text: 'utf-8' codec can't decode")):
        code, out, err = run(stdin, templated)
        assert (code, out) == (2, "") and f"standard input {message}" in err

    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

        def fileno(self):
            return os.open(os.devnull, os.O_WRONLY)

    monkeypatch.setattr(sys, "stdin", io.StringIO("x\n"))
    monkeypatch.setattr(sys, "stdout", Closed())
    assert cli.main(("chat", templated, "-n", "1")) == 0


def test_a_model_without_tokenizer(run):
    code, _, err = run("x\n", str(path("llama-gqa")))
    assert code == 2 and err.endswith("has no tokenizer, which a chat needs\n")


def test_lines_of_a_terminal(monkeypatch, capsys):
    """Python's own line reader, which edits lines, is used if input and output are a terminal."""
    for is_terminal in (True, False):
        stdin = io.StringIO("one\ntwo")
        monkeypatch.setattr(stdin, "isatty", lambda: True, raising=False)
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(sys.stdout, "isatty", lambda on=is_terminal: on, raising=False)
        read = line_reader()
        assert [read("> "), read("> ")] == ["one", "two"]
        with pytest.raises(EOFError):
            read("> ")
        printed = capsys.readouterr()
        assert (printed.out if is_terminal else printed.err) == "> > > "


@pytest.mark.parametrize(
    ("lines", "messages"),
    [
        ("one\ntwo", ["one", "two"]),
        ("one\\\ntwo\\\nthree\nfour", ["one\ntwo\nthree", "four"]),
        ('"""one\ntwo"""\nthree', ["one\ntwo", "three"]),
        ('"""\none\n\n  two\n"""\nthree', ["one\n\n  two", "three"]),
        ('"""one"""', ["one"]),
        ("one\\", ["one"]),
        ('"""one\ntwo', ["one\ntwo"]),
        ("", []),
    ],
)
def test_messages_of_several_lines(lines, messages):
    left = iter(lines.split("\n") if lines else [])

    def read(prompt):
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    found = []
    while True:
        try:
            found.append(read_message(read))
        except EOFError:
            break
    assert found == messages


#: Output when an answer has begun: the progress line is gone and the cursor is back.
BEGUN = r"(?s)reading the prompt.*\x1b\[\?25h.*?[a-z]{2,} [a-z]+"

SLOW = """
import fcntl, signal, sys, termios, time
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # Ctrl-C of the terminal is for this process
from jax_q4k.models import cli
from jax_q4k.models.engine import generate as generation
signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may run where it is ignored
stream = generation.stream

def slow(*arguments, **options):
    for piece in stream(*arguments, **options):
        time.sleep(0.05)
        yield piece

generation.stream = slow
sys.exit(cli.main(sys.argv[1:]))
"""


#: Makes the model of a chat think, before SLOW slows it down.
THINKS = """
from jax_q4k.models.engine import generate as generation
from jax_q4k.models.engine.outputs import Output, Piece, Timings

def says(*arguments, **options):
    thought = "<think>", *"First this, then that.", "</think>"
    for i, piece in enumerate((*thought, "It", " is", " so.")):
        yield Piece(i, piece)
    yield Piece(None, "", Output([], "", "end", Timings(new_tokens=i + 1)))

generation.stream = says
"""


class Terminal:
    """A chat on a pseudo-terminal."""

    def __init__(self, *arguments, code=SLOW):
        self.screen, theirs = pty.openpty()
        command = [sys.executable, "-W", "ignore", "-c", code, "chat", *arguments]
        environment = os.environ | {"TERM": "xterm", "COLUMNS": "200"}
        self.process = subprocess.Popen(
            command,
            **dict.fromkeys(("stdin", "stdout", "stderr"), theirs),
            start_new_session=True,
            env=environment,
        )
        os.close(theirs)
        self.text = ""

    def until(self, pattern, seconds=60):
        """Removes and returns the output up to a match of `pattern`."""
        end = time.monotonic() + seconds
        os.set_blocking(self.screen, False)
        while not (found := re.search(pattern, self.text)):
            assert time.monotonic() < end, f"no {pattern!r} in {self.text!r}"
            try:
                self.text += os.read(self.screen, 10_000).decode(errors="replace")
            except BlockingIOError:
                time.sleep(0.02)
            except OSError:  # the other end is closed
                assert re.search(pattern, self.text), f"ended without {pattern!r}: {self.text!r}"
        before, self.text = self.text[: found.end()], self.text[found.end() :]
        return before

    def send(self, text):
        os.set_blocking(self.screen, True)
        os.write(self.screen, text.encode())

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.screen)


def without_styles(text):
    """Removes colours and the like, and modes of the terminal."""
    return re.sub(r"\x1b\[(\d*m|\?\d+[hl])", "", text)


@pytest.fixture
def terminal():
    opened = Terminal("--demo", "-n", "200", "--ignore-end")
    yield opened
    opened.close()


@pytest.mark.slow("starts the command several times")
def test_a_chat_on_a_terminal(terminal, tmp_path):
    """Ctrl-C stops an answer; arrows recall lines; lines continue; Ctrl-C at the prompt quits."""
    saved = tmp_path / "saved.json"
    terminal.until(">>> ")
    terminal.send("Hello\n")
    terminal.until(r"Hello\r\n")
    terminal.until(BEGUN)
    terminal.send("\x03")
    terminal.until("stopped")
    terminal.until(">>> ")
    terminal.send('"""one\n')
    terminal.until(r"\.\.\. ")
    terminal.send('two"""\n')
    terminal.until(BEGUN)
    terminal.send("\x03")
    terminal.until("stopped")
    terminal.until(">>> ")
    terminal.send("\x1b[A\x1b[A\x1b[A\n")  # up three lines
    terminal.until(BEGUN)
    terminal.send("\x03")
    terminal.until("stopped")
    terminal.until(">>> ")
    terminal.send(f"/save {saved}\n")
    terminal.until("messages are in")
    contents = [m["content"] for m in json.loads(saved.read_text()) if m["role"] == "user"]
    assert contents == ["Hello", "one\ntwo", "Hello"]
    terminal.until(">>> ")
    terminal.send("/bogus\n")
    terminal.until("error:.* no such command")
    terminal.until(">>> ")
    terminal.send("half a line\x03")
    terminal.until("Press Ctrl-C again, or Ctrl-D, to quit")
    terminal.until(">>> ")
    terminal.send("\x03")
    assert terminal.process.wait(10) == 128 + signal.SIGINT


@pytest.mark.slow("starts the command several times")
def test_thoughts_on_a_terminal(templated):
    """A line that changes while the model thinks; Ctrl-C in a thought leaves a line of it."""
    terminal = Terminal(templated, code=THINKS + SLOW)
    try:
        terminal.until(">>> ")
        terminal.send("Why?\n")
        terminal.until(r"Thinking… 0\.\d s, \d+ tokens  First this")
        terminal.send("\x03")
        after = terminal.until(">>> ")
        erased = r"\r(\x1b\[1A)?\x1b\[2K"
        line = r"Thought for \d\.\d s \({}\)\r\n"
        stopped = erased + line.format(r"1\d tokens") + r"stopped\r\n>>> $"
        assert re.search(stopped, without_styles(after))
        terminal.send("/thinking\n")
        assert re.search(r"First this,[a-z ]*\r\n>>> $", without_styles(terminal.until(">>> ")))
        terminal.send("Why?\n")
        answered = erased + line.format("22 tokens") + r"It is so\.\r\n27 tokens"
        assert re.search(answered, without_styles(terminal.until(">>> ")))
        terminal.send("/thinking show\n")
        terminal.until(">>> ")
        terminal.send("Why?\n")
        whole = r"First this, then that\.\r\n" + line.format("22 tokens") + r"It is so\."
        assert re.search(whole, without_styles(terminal.until(">>> ")))
    finally:
        terminal.close()


@pytest.mark.slow("starts the command several times")
def test_ctrl_d_ends_a_chat(terminal):
    terminal.until(">>> ")
    terminal.send("\x04")
    assert terminal.process.wait(10) == 0
