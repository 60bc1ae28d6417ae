"""Ending with the parent process, whatever kills it.

Knows: how a child notices. Does not know: what the child does.
"""

import ctypes
import multiprocessing
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def ignore_stop_signals() -> None:
    """Leave Ctrl-C and SIGTERM, which reach every process of a terminal or a service, to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, even in the middle of a long kernel.

    Where that is not to be had (not Linux) nothing is arranged; the end of the pipe tells as well.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:  # it died before the call above
        os._exit(1)
