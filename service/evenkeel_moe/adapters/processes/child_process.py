"""Child processes that must not outlive the controller, however it ends."""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1

_LAUNCH = f"""
import ctypes, os, sys
ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, int(sys.argv[2]))
if int(sys.argv[3]) >= 0:
    os.umask(int(sys.argv[3]))
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[4], sys.argv[4:])
"""


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process with its parent; called in the child. Linux only.

    Args:
        parent: process id of the parent. If it has died already, this process exits.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def dying_with_parent(
    command: Sequence[str], number: int = signal.SIGKILL, *, umask: int = -1
) -> list[str]:
    """Return a command line that runs `command` and signals it when this process ends. Linux only.

    The kernel sends the signal when the thread that started the command ends, for any reason. A
    small launcher asks for the signal and then becomes the command. Asking between fork and exec
    would run Python in a copy of this process whose other threads, those of gRPC, are gone while
    their locks are held.

    Args:
        command: an absolute path and its arguments.
        number: the signal; SIGTERM lets the command clean up.
        umask: mode bits that its files do not get; -1 is those of this process.
    """
    if sys.platform != "linux":
        return list(command)
    launcher = [sys.executable, "-I", "-S", "-c", _LAUNCH]
    return [*launcher, str(os.getpid()), str(int(number)), str(umask), *command]
