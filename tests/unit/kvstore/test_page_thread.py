"""A thread that nobody has to wait for."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import CancelledError

import pytest

from kvstore.page_thread import DiskThread


def test_it_does_what_it_is_given_in_order_in_one_thread() -> None:
    thread, seen = DiskThread("disk"), list[tuple[int, str]]()

    def note(number: int) -> int:
        seen.append((number, threading.current_thread().name))
        return 2 * number

    futures = [thread.submit(note, number) for number in range(5)]
    assert [future.result(10) for future in futures] == [0, 2, 4, 6, 8]
    assert seen == [(number, "disk") for number in range(5)]
    thread.shutdown()
    with pytest.raises(RuntimeError, match="'disk' takes nothing any more"):
        thread.submit(note, 9)
    thread.shutdown()


def test_what_is_raised_is_told_and_ends_nothing() -> None:
    thread = DiskThread("disk")
    with pytest.raises(ZeroDivisionError):
        thread.submit(lambda: 1 // 0).result(10)
    assert thread.submit(lambda: 7).result(10) == 7
    thread.shutdown()


def test_what_was_given_before_the_end_is_done_unless_it_is_cancelled() -> None:
    go_on = threading.Event()
    thread = DiskThread("disk")
    first, second, third = thread.submit(go_on.wait), thread.submit(lambda: 2), thread.submit(lambda: 3)
    assert second.cancel()
    thread.shutdown(wait=False)
    go_on.set()
    assert first.result(10) is True
    assert third.result(10) == 3
    go_on.clear()
    thread = DiskThread("disk")
    first, second = thread.submit(go_on.wait), thread.submit(lambda: 2)
    thread.shutdown(wait=False, cancel_futures=True)
    go_on.set()
    assert first.result(10) is True
    with pytest.raises(CancelledError):
        second.result(10)
    DiskThread("never used").shutdown()


def test_a_process_ends_while_it_hangs() -> None:
    program = """
import threading
from kvstore.page_thread import DiskThread
thread, hanging = DiskThread("disk"), threading.Event()
thread.submit(lambda: (hanging.set(), threading.Event().wait()))
hanging.wait()
print("ends")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("ends\n", "")
