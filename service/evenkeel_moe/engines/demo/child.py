"""`python -m evenkeel_moe.engines.demo.child PARENT COMMAND...`: the command, ended with its parent.

The demo stops its controller itself; this is for the demo that is killed before it can.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Become the command, with SIGTERM due when the parent goes (Linux)."""
    parent, *command = arguments
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(parent):
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
