"""The fork server, and the first steps of a process that it forks."""

import multiprocessing
import os
import signal
import threading
from multiprocessing.reduction import DupFd
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.forked.preloaded"])


class Output:
    """A descriptor that becomes stdout and stderr of the forked process.

    It is passed on while the process is started, so it can be closed after that.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __getstate__(self) -> Any:
        return DupFd(self._descriptor)

    def __setstate__(self, passed: Any) -> None:
        self._descriptor = passed.detach()

    def use(self) -> None:
        """Write there from now on; called in the forked process."""
        for number in (1, 2):
            os.dup2(self._descriptor, number)
        os.close(self._descriptor)


def end_with_parent() -> None:
    """Kill this process as soon as the one that asked for it has ended.

    The kernel does so for children, but this one is a child of the fork server.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()
