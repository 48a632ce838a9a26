"""Asks experts the canary's token on the device: all at registration, moved ones between steps."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenkeel_moe.adapters.torch.checksum import checksum
from evenkeel_moe.adapters.torch.groups import Communicator
from evenkeel_moe.adapters.torch.streams import OwnStream, mark_queued
from evenkeel_moe.agent.canary import (
    HELD,
    Answer,
    Canary,
    Due,
    agree,
    answers_apart,
    fixed_token,
    held_answer,
    sketch_of,
)
from evenkeel_moe.agent.together import gather
from evenkeel_moe.errors import PeerViolation, Reason
from evenkeel_moe.model.placement import EMPTY, Placement
from evenkeel_moe.model.plan import WaveKey
from evenkeel_moe.protocol.messages import MovedAnswers

Probe = Callable[[int, int], Tensor]
"""(layer, local slot) -> the output of the expert in that slot for one token, the same token on
every rank and in every call, such as `canary_token`, by the kernel that serves. Called on the
engine's thread, between steps; the result may be overwritten by the next step."""

_log = structlog.get_logger(__name__)
_LEAST_LIMIT = 2.0**-14
_ROUNDINGS = 2.0
_FAILED = -1.0
"""Stands for the limit of a rank that could not ask its experts."""


def canary_token(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the (size,) token of the canary: hidden states in -2..2."""
    return torch.from_numpy(fixed_token(size)).to(device, dtype)


def rounding_limit(dtype: torch.dtype) -> float:
    """Return the largest distance of two outputs that rounding can explain; 0 for integers."""
    if not dtype.is_floating_point:
        return 0.0
    return max(_ROUNDINGS * torch.finfo(dtype).eps, _LEAST_LIMIT)


class CanaryRuns:
    """The canary of one rank.

    Args:
        probe: see `Probe`.
        rank: this rank.
        device: device of the experts.
        step_s: seconds that one step may wait for it.
        now: reads the monotonic clock [s].
        later: runs a job on the transfer thread.
        tell: sends the result of a wave to the controller.
        alarm: reports a difference, in words.
    """

    def __init__(
        self,
        probe: Probe,
        rank: int,
        device: torch.device,
        step_s: float,
        *,
        now: Callable[[], float],
        later: Callable[[Callable[[], None]], None],
        tell: Callable[[MovedAnswers], None],
        alarm: Callable[[str], None],
    ) -> None:
        self._probe = probe
        self._rank = rank
        self._device = device
        self._step_s = step_s
        self._now, self._later, self._tell, self._alarm = now, later, tell, alarm
        self._stream = OwnStream(device)
        self._canary: Canary | None = None
        self._cost_s = 0.0
        """Seconds that the engine waits for one answer, as measured at registration."""
        self._credit_s = 0.0

    # --- registration -----------------------------------------------------------------------------

    def register(self, group: Communicator, placement: Placement) -> None:
        """Ask every expert of this rank and gather the answers of all ranks; collective.

        A rank that fails still takes part, so that no other rank waits for it; all ranks then go on
        without a canary.

        Raises:
            PeerViolation: CHECKSUM_MISMATCH, on all ranks, if slots with the same expert differ by
                more than rounding.
            Unavailable: not all ranks came before the communicator's deadline.
        """
        self._canary, self._credit_s = None, 0.0
        table, limit, error = self._ask_all(placement)
        mine = torch.tensor([limit if error is None else _FAILED], dtype=torch.float64)
        limits = gather(group, mine).numpy()[:, 0]
        failed, limit = np.flatnonzero(limits == _FAILED).tolist(), float(limits.max())
        if failed:
            detail = f"ranks {failed[:8]} cannot ask their experts: {error!r:.300}"
            _log.error("canary_off", detail=detail, exc_info=error)
            return
        words = torch.from_numpy(table.view(np.int64).reshape(-1))
        tables = gather(group, words).numpy().view(HELD).reshape(-1, *table.shape)
        registered = agree(tables)
        if registered.noise > limit:
            layer, expert = registered.worst
            raise PeerViolation(
                f"replicas of an expert differ in their answer by {registered.noise:.2g}, more than"
                f" {limit:.2g}: layer {layer} expert {expert}",
                Reason.CHECKSUM_MISMATCH,
            )
        self._canary = Canary(self._rank, registered, placement, limit)
        _log.info(
            "canary_registered",
            replicas=registered.replicas,
            tolerance=self._canary.tolerance,
            blind=self._canary.blind,
            answer_s=round(self._cost_s, 7),
        )

    def pause(self) -> None:
        """Ask nothing until the next registration: weights are being replaced."""
        self._canary = None

    def _ask_all(self, placement: Placement) -> tuple[NDArray[np.void], float, Exception | None]:
        """Return the (L, E) table of this rank, its limit, and why it could not be made."""
        shape = placement.num_layers, placement.num_logical_experts
        table = np.zeros(shape, HELD)
        per_rank = placement.slots_per_rank
        mine = placement.phy2log[:, self._rank * per_rank : (self._rank + 1) * per_rank]
        limit, spent = 0.0, []
        try:
            for layer, local in np.argwhere(mine != EMPTY).tolist():
                # The second call may write its result to the same memory.
                output = self._probe(layer, local).detach().clone()
                limit = max(limit, rounding_limit(output.dtype))
                answer = _read(output)
                began = self._now()
                output = self._probe(layer, local).detach().cpu()
                spent.append(self._now() - began)
                again = _read(output)
                row = table[layer, mine[layer, local]]
                apart = answers_apart(answer, again)
                if row["slots"]:
                    first = held_answer(row)
                    apart = max(apart, answers_apart(first, answer))
                else:
                    row["digest"], row["sketch"] = answer.digest, answer.sketch()
                row["noise"] = max(float(row["noise"]), apart)
                row["slots"] += 1
        except Exception as error:  # of the engine's kernel: serving does not depend on it
            return table, limit, error
        self._cost_s = float(np.median(spent)) if spent else 0.0
        return table, limit, None

    # --- between steps, on the engine's thread ----------------------------------------------------

    def moved(self, wave: WaveKey | None, before: Placement, after: Placement) -> None:
        """Note that the map has changed; `wave` is None if the engine changed it by itself."""
        if self._canary is not None and (result := self._canary.moved(wave, before, after)):
            self._tell(result)

    def ask(self, placement: Placement) -> None:
        """Ask slots that are due, in the time that the canary has in this step.

        An answer that takes longer than this waits until the time of several steps has added up.
        """
        canary = self._canary
        if canary is None:
            return
        self._credit_s = min(self._credit_s + self._step_s, max(self._step_s, self._cost_s))
        while self._credit_s >= self._cost_s and (due := canary.next_due()) is not None:
            began = self._now()
            self._ask(canary, due, placement)
            self._credit_s -= max(self._now() - began, self._cost_s)

    def _ask(self, canary: Canary, due: Due, placement: Placement) -> None:
        slot = self._rank * placement.slots_per_rank + due.local
        output = None
        if placement.phy2log[due.layer, slot] == due.expert:
            try:
                # The engine's next step may write its result to the same memory.
                output = self._probe(due.layer, due.local).detach().clone()
            except Exception:
                _log.exception("canary_failed")
                self._canary = None
                return
        mark = mark_queued(self._device)
        self._later(partial(self._judge, canary, due, placement, output, mark))

    # --- on the transfer thread -------------------------------------------------------------------

    def _judge(
        self, canary: Canary, due: Due, placement: Placement, output: Tensor | None, mark: Any
    ) -> None:
        answer = None
        if output is not None:
            with self._stream.after(mark):
                answer = _read(output)
        if canary is not self._canary:
            return  # Other weights were registered meanwhile.
        judged = canary.judge(due, placement, answer)
        if (wrong := judged.different) is not None:
            slot = self._rank * placement.slots_per_rank + wrong.local
            self._alarm(
                f"layer {wrong.layer} expert {wrong.expert} in slot {slot} of rank {self._rank}"
                f" does not answer as when it was registered: {judged.by:.2g} of the answer"
                f" differs, {canary.tolerance:.2g} is allowed ({Reason.CHECKSUM_MISMATCH})."
                " Something that also belongs to the expert did not move with it, or was not"
                " derived again: load the weights again, or restart this group"
            )
        if judged.ended is not None:
            self._tell(judged.ended)


def _read(output: Tensor) -> Answer:
    """Return the answer in an output; waits for the device."""
    host = output.cpu()
    return Answer(checksum([host]), lambda: sketch_of(host.reshape(-1).to(torch.float64).numpy()))
