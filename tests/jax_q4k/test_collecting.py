"""The garbage collector is throttled inside a block, and restored after the last block."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

import pytest

from jax_q4k import collecting


def test_thresholds_come_back_with_the_last_block_of_all_threads() -> None:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    try:
        entered, leave = threading.Event(), threading.Event()

        def other() -> None:
            with collecting.gc_throttled():
                entered.set()
                leave.wait()

        thread = threading.Thread(target=other)
        with collecting.gc_throttled():
            thread.start()
            entered.wait()
            held = gc.get_threshold()
        assert held[0] > 700 and gc.get_threshold() == held  # the other block continues
        leave.set()
        thread.join()
        assert gc.get_threshold() == (700, 10, 10)
    finally:
        gc.set_threshold(*before)


def test_an_exception_ends_a_block() -> None:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    try:
        with pytest.raises(KeyError), collecting.gc_throttled():
            raise KeyError
        assert gc.get_threshold() == (700, 10, 10)
    finally:
        gc.set_threshold(*before)


def test_importing_leaves_the_thresholds() -> None:
    code = "import gc; was = gc.get_threshold(); import jax_q4k; print(was == gc.get_threshold())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


def test_the_former_name_warns() -> None:
    with pytest.warns(DeprecationWarning, match="seldom_collecting is now gc_throttled"):
        assert collecting.seldom_collecting is collecting.gc_throttled
    with pytest.raises(AttributeError, match="has no attribute 'x'"):
        _ = collecting.x
