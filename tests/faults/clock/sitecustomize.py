"""Makes the wall clock adjustable; Python runs this first in a process with this folder on PYTHONPATH.

The file that TEST_CLOCK_FILE names holds the seconds by which the clock is wrong; none: it is right.
"""

import os
import time

_PATH = os.environ["TEST_CLOCK_FILE"]
_true_time, _true_time_ns = time.time, time.time_ns


def _wrong_by() -> int:
    try:
        with open(_PATH, encoding="ascii") as file:
            return int(file.read() or 0)
    except FileNotFoundError:
        return 0


time.time = lambda: _true_time() + _wrong_by()
time.time_ns = lambda: _true_time_ns() + _wrong_by() * 10**9
