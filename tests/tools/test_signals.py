"""Signals at random moments of commands, and the faults that the tool must detect."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from jax_q4k import models
from tools import signals

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="processes are listed by /proc"
)


@pytest.mark.slow("starts a command for each phase of each")
def test_commands_end_at_once_and_leave_nothing(tmp_path: Path, capsys) -> None:
    """One moment of each phase with one signal; `python -m tools.signals` runs all of them."""
    file = tmp_path / "signals.json"
    assert signals.main(["-n", "1", "--seed", "1", str(file)]) == 0, capsys.readouterr().out
    rows = json.loads(file.read_text())["results"]
    assert [row["phase"] for row in rows] == list(signals.PHASES)
    assert all(row["signals"] == 1 for row in rows)


#: A command's script -> the tool's message about it after SIGTERM.
FAULTY = {
    "import signal; signal.signal(15, signal.SIG_IGN)": "it goes on",
    "import signal; signal.signal(15, lambda *_: exit(3))": "exit code 3",
    "print('\\x1b[?25l', flush=True)": "the cursor is hidden",
    "open('.0.partial', 'w')": "left work/.0.partial",
    "import signal, subprocess; signal.signal(1, signal.SIG_IGN);"
    " subprocess.Popen(['sleep', '5'])": "process ",
    "import termios; a = termios.tcgetattr(0); a[3] = 0; termios.tcsetattr(0, 0, a)": "mode",
    "import signal, sys; signal.signal(15, lambda *_: sys.exit(print('Traceback')))": "complains",
    "import signal, time, os;"
    " signal.signal(15, lambda *_: (time.sleep(1.2), os._exit(143)))": "ended after 1.2 s",
}


@pytest.mark.slow("waits for commands that do not end", quick=["*exit(3))", "print(*", "open(*"])
@pytest.mark.parametrize("code", FAULTY)
def test_faults_are_found(code: str, tmp_path: Path, monkeypatch) -> None:
    script = tmp_path / "command"
    script.write_text(f"{code}\nprint('ready', flush=True)\nimport time; time.sleep(60)")
    monkeypatch.setattr(signals, "_SCRIPT", script)
    monkeypatch.setattr(signals, "LONGEST", 5.0)
    phase = signals.Phase((), b"ready", None, b"done")
    ended = signals.interrupted(phase, models.demo_path(), signal.SIGTERM, 0.05)
    assert any(FAULTY[code] in fault for fault in ended.faults), ended
