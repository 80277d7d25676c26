"""Collects a kernel's PTX text: lines, the registers that they use, the versions that they need."""

from __future__ import annotations

from types import CodeType

from .errors import KernelError, Line, call_path
from .instructions import BASELINE, Version
from .oldest import COMMON

MAX_LINES = 50_000  # ptxas takes minutes for more, and no instruction cache holds them
#: Register class -> prefix of its registers' names.
_PREFIXES = {"pred": "%p", "b16": "%h", "b32": "%r", "b64": "%rd", "f32": "%f"}


class Text:
    """PTX text of one kernel under construction.

    Attributes:
      name: name of the kernel's entry.
      needs: the lowest (PTX version, sm) that support all instructions so far.
      oldest: oldest architecture (75 for sm_75) that must run the text.
    """

    def __init__(self, name: str, code: CodeType | None = None, oldest: int = COMMON) -> None:
        """Starts an empty text.

        Args:
          code: code of the kernel's function, used for `lines` of the finished kernel.
        """
        self.name = name
        self.needs = BASELINE
        self.oldest = oldest
        self._code = code
        #: (text, the Python lines that wrote it)
        self._lines: list[tuple[str, tuple[Line, ...]]] = []
        #: Lines before all others; every branch may use their results.
        self._first_lines: list[tuple[str, tuple[Line, ...]]] = []
        self._registers: dict[str, int] = dict.fromkeys(_PREFIXES, 0)
        self._labels = 0

    def write(self, line: str) -> None:
        if len(self._lines) >= MAX_LINES:
            raise KernelError(
                f"{self.name} would have more than {MAX_LINES} lines: something is unrolled too"
                " often"
            )
        self._lines.append((f"  {line}", self.here()))

    def write_first(self, line: str) -> None:
        """Writes a line that comes before the body."""
        self._first_lines.append((f"  {line}", self.here()))

    def here(self) -> tuple[Line, ...]:
        """Returns the (file, line) of the Python that is emitting now; see `call_path`."""
        return call_path(self._code)

    def label(self) -> str:
        """Returns a new label name."""
        self._labels += 1
        return f"$L{self._labels}"

    def mark(self, label: str) -> None:
        """Places a label at the current position."""
        self._lines.append((f"{label}:", self.here()))

    def require(self, version: Version) -> None:
        """Raises the declared PTX version and target to at least this version.

        Raises:
          KernelError: the text must run on an architecture that is older than this and COMMON.
        """
        if not self.has(version) and self.oldest < COMMON:
            raise KernelError(
                f"{self.name} is built for sm_{self.oldest}, and an instruction or argument of it"
                f" needs sm_{version[1]}"
            )
        self.needs = (max(self.needs[0], version[0]), max(self.needs[1], version[1]))

    def has(self, version: Version) -> bool:
        """Returns whether all architectures that must run the text have this version."""
        return version[1] <= self.oldest

    def register_name(self, register: str) -> str:
        """Returns the name of a new register of class `register` (`b32`)."""
        number = self._registers[register]
        self._registers[register] += 1
        return f"{_PREFIXES[register]}{number}"

    def target_lines(self) -> list[str]:
        """Returns the module's version and target directives."""
        (major, minor), sm = self.needs
        return [f".version {major}.{minor}", f".target sm_{sm}", ".address_size 64"]

    def register_lines(self) -> list[str]:
        """Returns the declarations of all registers."""
        return [
            f"  .reg .{register} {_PREFIXES[register]}<{count}>;"
            for register, count in self._registers.items()
            if count
        ]
