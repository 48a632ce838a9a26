"""The cost of a report from its bytes to the window, without gRPC, in processor time.

The same reports are decoded, entered, added up and kept as in the controller. Everything runs in a
loop, so the caches hold more of it than in the server.
"""

import time
from collections.abc import Iterator

from bench.ingest_fleet import Fleet, Scale, hello_of
from bench.report import Row
from bench.scale_parts import large, many
from evenkeel_moe.model.ids import Epoch
from evenkeel_moe.model.load import LoadReport
from evenkeel_moe.telemetry.assembly import StepAssembler
from evenkeel_moe.telemetry.windows import StepRing
from evenkeel_moe.v1 import agent_pb2
from evenkeel_moe.wire.from_rank import decode_rank_message


def receive_rows(rounds: int = 6) -> Iterator[list[Row]]:
    """Yield the cost of a message, of a step in it and of a count, at 16 and 64 steps."""
    for name, group in (("256", many), ("2048", large)):
        costs = {steps: _message_s(group(steps), rounds) for steps in (16, 64)}
        rows = []
        for steps, seconds in costs.items():
            counts = steps * group().layers * group().slots_per_rank
            row = f"scale_receive_{name}_{steps}"
            rows += [
                Row(f"{row}_message_us", seconds * 1e6, "us of CPU per message"),
                Row(f"{row}_step_us", seconds / steps * 1e6, "us of CPU per rank step"),
                Row(f"{row}_count_ns", seconds / counts * 1e9, "ns of CPU per count"),
            ]
        ratio = costs[64] / 64 / (costs[16] / 16)
        rows.append(Row(f"scale_receive_{name}_64_over_16", ratio, "ratio, per rank step"))
        yield rows


def _message_s(scale: Scale, rounds: int) -> float:
    """Return the least processor seconds of a message over some rounds of all ranks."""
    fleet = Fleet(scale)
    hellos = [hello_of(rank.identity, fleet.placement, scale.shape) for rank in fleet.ranks]
    assembler = StepAssembler(scale.shape, max_pending=2 * scale.steps)
    assembler.learn_epoch(Epoch(0), fleet.placement)
    ring = StepRing(scale.shape, 512)
    best = float("inf")
    for number in range(rounds):
        data = [rank.message(number).SerializeToString() for rank in fleet.ranks]
        began = time.process_time()
        for message, hello in zip(data, hellos, strict=True):
            report = decode_rank_message(agent_pb2.RankMessage.FromString(message), hello)
            assert isinstance(report, LoadReport)
            for _, steps in assembler.take(report).complete:
                ring.append(steps)
        best = min(best, (time.process_time() - began) / len(data))
        assert ring.newest_step == (number + 1) * scale.steps - 1
    return best
