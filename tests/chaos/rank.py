"""A rank of the reference engine that also writes what each step was computed with.

`python -m tests.chaos.rank CONFIG RANK`. Beside the engine's own lines it writes evidence-R.jsonl
for the outside judge, straight from the tables and the slots that the engine uses. A process that
gets another rank in the next group writes to the file of that rank from then on.

=====  =========================================================================================
kind   further keys
=====  =========================================================================================
state  number (from 0 in each group), step, epoch, tables ((L, E) the slots to which tokens of each
       expert go), slots (list of [layer, local slot, xxh3 of the bytes]); written if any of it has
       changed
step   step, epoch, states (numbers of the states right before and right after the computation)
saved  epoch (in the saved placement), changed (Unix seconds at which its file got its name)
=====  =========================================================================================

All have `kind`, `unix` and `group`.
"""

import sys
from typing import Any

import numpy as np
import xxhash

from evenkeel_moe.engines.reference.__main__ import leave, log_json, read_config
from evenkeel_moe.engines.reference.config import RankConfig
from evenkeel_moe.engines.reference.lines import LineWriter
from evenkeel_moe.engines.reference.parts import RankParts
from evenkeel_moe.engines.reference.rank import run_rank


class Evidence:
    """Writes the facts of one process, in one group after another."""

    def __init__(self) -> None:
        self._of_group: GroupEvidence | None = None

    def before_step(self, step: int, parts: RankParts) -> None:
        """Note the state with which a step begins."""
        if self._of_group is None or self._of_group.group != parts.config.group:
            self._of_group = GroupEvidence(parts.config)
        self._of_group.before_step(step, parts)

    def after_step(self, step: int, parts: RankParts) -> None:
        """Note the state with which a step ended, and write the step."""
        assert self._of_group is not None
        self._of_group.after_step(step, parts)


class GroupEvidence:
    """Writes the facts of one rank of one group.

    Args:
        config: of the rank.
    """

    def __init__(self, config: RankConfig) -> None:
        self._lines = LineWriter(
            config.folder / f"evidence-{config.rank}.jsonl", group=config.group
        )
        self._rank = config.rank
        self.group = config.group
        self._saved = config.state_file
        self._changed_ns = 0
        self._last: object = None
        self._states = 0
        self._before = 0

    def before_step(self, step: int, parts: RankParts) -> None:
        """Note the state with which a step begins."""
        self._note_save()
        self._before = self._state(step, parts)

    def after_step(self, step: int, parts: RankParts) -> None:
        """Note the state with which a step ended, and write the step."""
        states = [self._before, self._state(step, parts)]
        self._lines.write("step", step=step, epoch=parts.router.epoch, states=states)

    def _state(self, step: int, parts: RankParts) -> int:
        """Return the number of the present state; write it if it is new."""
        tables = [_slots_by_expert(table) for table in parts.router.tables]
        slots = self._checksums(tables, parts)
        present = (parts.router.epoch, tables, slots)
        if present != self._last:
            self._last = present
            epoch, number = parts.router.epoch, self._states
            self._lines.write(
                "state", number=number, step=step, epoch=epoch, tables=tables, slots=slots
            )
            self._states += 1
        return self._states - 1

    def _checksums(self, tables: list[list[list[int]]], parts: RankParts) -> list[list[Any]]:
        """Return [layer, local slot, checksum] of each own slot to which a table leads."""
        width = parts.config.slots_per_rank
        first = self._rank * width
        found = []
        for layer, experts in enumerate(tables):
            slots = {slot for of_expert in experts for slot in of_expert}
            for local in sorted(slot - first for slot in slots if first <= slot < first + width):
                digest = xxhash.xxh3_64()
                for tensor in parts.weights.tensors(layer, local):
                    digest.update(tensor.cpu().contiguous().numpy().data)
                found.append([layer, local, digest.hexdigest()])
        return found

    def _note_save(self) -> None:
        """Write the epoch of the saved placement if the file is another than before."""
        try:
            changed_ns = self._saved.stat().st_ctime_ns
            if changed_ns == self._changed_ns:
                return
            with np.load(self._saved, allow_pickle=False) as archive:
                epoch = int(archive["epoch"])
        except FileNotFoundError:
            return
        if self._saved.stat().st_ctime_ns == changed_ns:  # else another file was read
            self._changed_ns = changed_ns
            self._lines.write("saved", epoch=epoch, changed=changed_ns / 1e9)


def _slots_by_expert(table: Any) -> list[list[int]]:
    """Return (E,) the slots to which a table sends the tokens of each expert."""
    rows = zip(table.slots.tolist(), table.replicas.tolist(), strict=True)
    return [slots[:replicas] for slots, replicas in rows]


def main(path: str, rank: str) -> None:
    """Run the rank and exit with its ExitCode."""
    log_json()
    leave(run_rank(read_config(path, rank), observer=Evidence()))


if __name__ == "__main__":
    main(*sys.argv[1:])
