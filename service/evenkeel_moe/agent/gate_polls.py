"""Runs the gate's reductions over the EP group, on a communicator of their own."""

from datetime import timedelta

import numpy as np
import torch
from numpy.typing import NDArray

from evenkeel_moe.adapters.torch.groups import Communicator, Work
from evenkeel_moe.errors import Unavailable
from evenkeel_moe.protocol.rank.gate import Gate, PollFailed, PollResolved


class GatePolls:
    """Polls of one gate; at most one is in flight.

    Args:
        group: communicator of the gate; nothing else uses it.
        timeout_s: a poll that takes longer fails.
    """

    def __init__(self, group: Communicator, timeout_s: float) -> None:
        self._group = group
        self._timeout = timedelta(seconds=timeout_s)
        self._poll: tuple[torch.Tensor, Work] | None = None

    def settle(self, gate: Gate) -> None:
        """Compare the gates of all ranks before the first poll; collective.

        Raises:
            Unavailable: not all ranks came before the communicator's deadline.
        """
        agreement = torch.from_numpy(gate.agreement())
        try:
            self._group.start_all_reduce_min(agreement).wait()
        except RuntimeError as error:
            raise Unavailable(f"not all ranks came: {str(error)[:300]}") from error
        gate.settle(agreement.numpy())

    def begin(self, vector: NDArray[np.int64]) -> None:
        """Start the reduction of a poll.

        Raises:
            RuntimeError: the reduction cannot start.
        """
        value = torch.from_numpy(vector)
        self._poll = value, self._group.start_all_reduce_min(value)

    def wait(self) -> PollResolved | PollFailed:
        """Return the result of the poll in flight."""
        assert self._poll is not None
        value, work = self._poll
        self._poll = None
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            return PollFailed(str(error)[:300])
        return PollResolved(value.numpy())

    def abort(self) -> None:
        """Forget the poll in flight and abort the communicator: further polls of the peers fail.

        It may wait for the poll in flight. Gloo closes its connections with the last operation.
        """
        self._poll = None
        self._group.abort()
