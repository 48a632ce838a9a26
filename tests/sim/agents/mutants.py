"""Mutants of the agent's glue: a small mistake each, in the code between machines and engine.

If no invariant catches one, the mistake does no harm or the simulation does not see it.
"""

from dataclasses import replace
from functools import partial

from evenkeel_moe.adapters.torch.transport import StageOutcome, TorchWeightTransport
from evenkeel_moe.agent.agent import Agent
from evenkeel_moe.agent.engine_moves import EngineMoves
from evenkeel_moe.agent.staging import StagingWorker
from evenkeel_moe.agent.swap_record import SwapRecord
from evenkeel_moe.protocol.messages import StagingFinished, SwapFinished, WeightsReloaded
from tests.sim.agents.kit import AgentKit
from tests.sim.mutants import MUTANTS, Mutant


class AcknowledgesBeforeSave(Agent):
    def _after_swap(self, record, placement):
        with self._lock:
            for answer in self._saving.end():
                self._carry_out(answer)
        super()._after_swap(record, placement)


class SavesWithoutBarrier(Agent):
    def _finish_swap(self, ready, layers, seconds):
        self._carry_out_answers(SwapFinished(ready.wave, ready.digest, seconds))
        step, received = self._recorder.last_step, ready.received_bytes
        record = SwapRecord(ready.wave, self.epoch, step, layers, seconds, received)
        self.later(partial(self._after_swap, record, self.placement))


class LivesThroughGateErrors(Agent):
    def step_boundary(self, step=None):
        if self._gate.advance(step):
            try:
                self._at_gate()
            except Exception:
                return


class PollsWithoutLock(Agent):
    def _at_gate(self):
        gate = self._gate
        if gate.resolve_due:
            result = self._polls.wait()
            with self._lock:
                self._carry_out_gate(gate.handle(result, self.now()))
        if gate.poll_due:
            self._polls.begin(gate.begin_poll(self.now()))


class HashesFirstExpert(TorchWeightTransport):
    def stage(self, prepare, cancel, progress):
        self.hashed = False
        return super().stage(prepare, cancel, progress)

    def _verify(self, transfer, expected):
        if self.hashed:
            return StageOutcome()
        self.hashed = True
        return super()._verify(transfer, expected)


class LeavesOperationsInFlight(TorchWeightTransport):
    def _give_up(self, flights, reason, detail):
        self.abort()
        return StageOutcome(reason, detail)


class WaitsForNoBatch(TorchWeightTransport):
    def _end(self, flights, deadline):
        flight = flights[0]
        while flight.works:
            flight.works = []
            self._post(flight)


class VotesYesAnyway(StagingWorker):
    """Breaks nothing by itself: a swap refuses what another wave has staged (R8)."""

    def _stage(self, prepare, old, new, cancel):
        self._try_stage(prepare, old, new, cancel)
        if self._transport.broken:
            self._events.request_rebuild(self._transport.serial)
        self._events.feed(StagingFinished(prepare.wave))

    def _forget(self):
        ready = self._ready
        super()._forget()
        self._ready = ready


class SwapsWhateverIsStaged(VotesYesAnyway):
    def swap(self, wave):
        if self._ready is not None:
            wave = self._ready.wave
        return super().swap(wave)


class RenewsFirstSlot(StagingWorker):
    def swap(self, wave):
        ready = super().swap(wave)
        return replace(ready, staged=dict(list(ready.staged.items())[:1]))


class KeepsOldChecksums(Agent):
    def finish_reload(self, weights_version):
        self._moves.register(self.placement)
        self.feed(WeightsReloaded(weights_version, self._participant.checksums))


GLUE_MUTANTS = (
    Mutant("save", "R3", "acknowledges before the save", AgentKit(agent=AcknowledgesBeforeSave)),
    Mutant("barrier", "R3", "begins no save barrier", AgentKit(agent=SavesWithoutBarrier)),
    Mutant(
        "gate", "R8", "lives through an error at the gate", AgentKit(agent=LivesThroughGateErrors)
    ),
    Mutant("lock", "R7", "polls without the lock", AgentKit(agent=PollsWithoutLock)),
    Mutant("hash", "R4", "hashes the first expert only", AgentKit(transport=HashesFirstExpert)),
    Mutant(
        "flight", "R7", "does not wait for operations", AgentKit(transport=LeavesOperationsInFlight)
    ),
    Mutant("batch", "R10", "waits for no batch", AgentKit(transport=WaitsForNoBatch)),
    Mutant("renew", "R11", "renews the first written slot", AgentKit(worker=RenewsFirstSlot)),
    Mutant("reload", "R4", "keeps the old checksums", AgentKit(agent=KeepsOldChecksums)),
    Mutant("swap", "R8", "swaps whatever is staged", AgentKit(worker=SwapsWhateverIsStaged)),
)
RULE_MUTANTS = tuple(replace(mutant, kit=AgentKit(**vars(mutant.kit))) for mutant in MUTANTS)
"""The mutants of the protocol's rules, with the real agent around their machines."""
GLUE_BY_NAME = {mutant.name: mutant for mutant in GLUE_MUTANTS}


class TakesAnyMap(EngineMoves):
    """Ends a move as agreed, whatever map the engine went to."""

    def move_finished(self, phy2log):
        if self.move is not None:
            super().move_finished(self.move.placement.phy2log.astype("int64"))


class ReloadsDuringMoves(EngineMoves):
    """Lets weights be replaced while a move is under way."""

    def end_move(self):
        self._agent.resolve_poll()


class GoesOnArmed(Agent):
    """Serves on after a poll that may have passed a wave on other ranks."""

    def _raise_if_left(self):
        self._without_gate = self._left is not None


GUEST_MUTANTS = (
    Mutant("map", "R8", "takes any map for the agreed one", AgentKit(moves=TakesAnyMap)),
    Mutant("under way", "R4", "reloads during moves", AgentKit(moves=ReloadsDuringMoves)),
    Mutant("armed", "R8", "serves on after a lost poll", AgentKit(agent=GoesOnArmed)),
)
"""In an engine that moves its experts itself."""
