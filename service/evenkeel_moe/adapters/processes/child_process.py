"""Child processes that must not outlive the controller, however it ends."""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

__all__ = ["die_with_parent", "dying_with_parent"]

_PR_SET_PDEATHSIG = 1

_LAUNCH = f"""
import ctypes, os, sys
ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {int(signal.SIGKILL)})
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process with its parent; called in the child. Linux only.

    Args:
        parent: its process id. One that died before it could be asked for is not waited for.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def dying_with_parent(command: Sequence[str]) -> list[str]:
    """The command, to be started by this process, such that it does not outlive it. Linux only.

    A launcher asks the kernel and becomes the command. Doing it between fork and exec instead would run
    Python in a copy of a process whose other threads, those of gRPC, are gone with their locks held.
    """
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), *command]
