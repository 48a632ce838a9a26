"""Groups of real processes that lose a rank, and go on without it."""

import numpy as np
import pytest

from evenkeel_moe.engines.reference.config import ExitCode, RankConfig
from evenkeel_moe.engines.reference.lines import read_lines
from evenkeel_moe.engines.reference.state import SavedPlacement, first_placement, save_placement
from evenkeel_moe.model.placement import Placement
from tests.engines.reference.test_resize_run import (
    FULL,
    REQUESTS,
    Run,
    everywhere,
    scripted,
    starts,
)
from tests.engines.reference.test_run import SMALL, lines

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]
ROOMY = {"num_ranks": 4, "slots_per_rank": 6, "pool_slots_per_layer": 12, "shrinks": True}


def killed(run, rank):
    """Kill a rank and return how the others went on."""
    before = run.supervisor.resized
    run.supervisor.kill_rank(rank)

    def outlived():
        found = run.supervisor.resized
        return None if found is before else found

    return run.wait(outlived, "the group without the dead rank")


def ended_well(run, folder, ranks):
    """Stop the run; every output was right and no step of a rank is missing."""
    run.wait_for_steps()
    report = run.supervisor.stop()
    assert report.ok and report.codes == (0,) * ranks and not report.restarts, report
    assert all(check["rows_checked"] and not check["mismatches"] for check in report.checks)
    served = [line["step"] for line in lines(folder, 0, "step")]
    assert served == sorted(set(served))
    return report


@pytest.mark.parametrize("dead", [0, 2])
def test_experts_that_died_with_their_rank_come_from_the_checkpoint(tmp_path, dead):
    with Run(tmp_path, **ROOMY, **REQUESTS) as run:
        pids = run.supervisor.pids
        run.wait_for_requests(0)
        outcome = killed(run, dead)
        assert outcome.dead == (dead,) and not outcome.failed, outcome
        # Each of four ranks had two of eight experts in each of three layers.
        assert outcome.recovered == 6
        assert outcome.words.startswith(f"rank {dead} died, the other 3 go on: every expert")
        assert run.supervisor.pids == (*pids[:dead], *pids[dead + 1 :])
        run.wait_for_requests(1)
        report = ended_well(run, tmp_path, 3)
    assert not report.problems and not report.retired
    begun = [starts(tmp_path, rank, 1) for rank in range(3)]
    assert [line["former_rank"] for line in begun] == [r for r in range(4) if r != dead]
    assert {line["epoch"] for line in begun} == {starts(tmp_path, 0, 0)["epoch"] + 1}


def test_replicas_on_other_ranks_serve_at_once_and_a_second_death_is_outlived_too(tmp_path):
    everywhere(tmp_path, 3)
    with Run(tmp_path, num_ranks=3, shrinks=True, **FULL, **REQUESTS) as run:
        first = killed(run, 1)
        run.wait_for_steps()
        second = killed(run, 1)
        assert (first.recovered, second.recovered) == (0, 0)
        assert second.first_step > first.first_step
        ended_well(run, tmp_path, 1)
    assert starts(tmp_path, 0, 2)["ranks"] == 1


def test_a_rank_without_room_takes_blocks_of_the_newest_requests_and_serves_them_again(tmp_path):
    sizes = {**ROOMY, "pool_slots_per_layer": 8, "slots_per_rank": 8, "layers": 2}
    with Run(tmp_path, **sizes, **{**REQUESTS, "requests_per_s": 40.0}) as run:

        def full(rank):
            line = lines(tmp_path, rank, "step")[-1]
            return line["free_blocks"] == 0 and line["running"]

        run.wait(lambda: any(map(full, (0, 1, 3))), "a full cache")
        assert killed(run, 2).recovered == 4
        run.wait_for_requests(1)
        ended_well(run, tmp_path, 3)


def test_experts_move_before_and_after_a_death(tmp_path):
    script = {"seed": 7, "plans": 1, "fill": 4, "homes": {"4": 4, "3": 3}}
    with Run(tmp_path, script, **ROOMY, **REQUESTS) as run:
        run.wait(lambda: len(scripted(tmp_path, 4)) == 4, "a plan of four ranks")
        held = run.placement().placement
        outcome = killed(run, 3)
        assert not outcome.failed
        alone = (held.only_rank == 3).sum()
        assert outcome.recovered == alone
        run.wait(lambda: len(scripted(tmp_path, 3)) == 3, "a plan of three ranks")
        ended_well(run, tmp_path, 3)


def test_a_death_ends_a_resize_that_had_not_begun_to_form_and_is_outlived(tmp_path):
    everywhere(tmp_path, 3)
    slow = {**REQUESTS, "requests_per_s": 6.0, "output_tokens": 60}
    with Run(tmp_path, num_ranks=3, shrinks=True, **FULL, **slow) as run:
        run.wait(lambda: lines(tmp_path, 1, "step")[-1]["running"] > 2, "requests on rank 1")
        run.supervisor.resize(2, retire=(1,), drain_s=60)
        outcome = killed(run, 0)
        assert outcome.dead == (0,) and not outcome.failed
        told = read_lines(tmp_path / "supervisor.jsonl")
        assert [row["detail"] for row in told if row["kind"] == "resize_failed"] == ["a rank died"]

        def served():
            return [line for line in lines(tmp_path, 0, "request") if line["group"] == 2]

        # More than it had: the rank that was to retire takes new requests again.
        run.wait(lambda: len(served()) > 20, "new requests")
        ended_well(run, tmp_path, 2)


class LeftByItself:
    """A rank process whose end looks like one after a failed gate."""

    def __init__(self, process):
        self._process = process

    def __getattr__(self, name):
        return getattr(self._process, name)

    def poll(self):
        return None if self._process.poll() is None else ExitCode.GATE_FAILED


def test_all_ranks_start_again_if_one_left_because_a_poll_is_unknown_to_it(tmp_path):
    with Run(tmp_path, **ROOMY, min_step_s=0.02) as run:
        run.supervisor._ranks[1] = LeftByItself(run.supervisor._ranks[1])
        run.supervisor.kill_rank(1)
        run.wait_for_restart()
        assert run.supervisor.resized is None and run.supervisor.num_ranks == 4


def test_all_ranks_start_again_with_a_map_that_only_the_dead_rank_had_come_to(tmp_path):
    with Run(tmp_path, **ROOMY, min_step_s=0.02) as run:
        first = first_placement(RankConfig(run_folder="", **{**SMALL, **ROOMY}))
        rows = first.phy2log[:, ::-1].copy()
        told = SavedPlacement(Placement(rows, 4, 8), 1, "told")
        save_placement(tmp_path / "state" / "rank-1.npz", told)
        outcome = killed(run, 1)
        assert outcome.failed == "they are at epoch 0, who died had come to 1"
        run.wait_for_restart()
        begun = lines(tmp_path, 0, "start")[-1]
        assert (begun["epoch"], begun["placement_digest"]) == (1, told.placement.digest)


def test_without_room_or_after_a_death_more_all_ranks_start_again(tmp_path):
    tight = {"num_ranks": 2, "slots_per_rank": 5, "pool_slots_per_layer": 5}
    with Run(tmp_path / "tight", **tight, shrinks=True) as run:
        run.supervisor.kill_rank(0)
        run.wait_for_restart()
        assert run.supervisor.resized is None and run.supervisor.num_ranks == 2
    with Run(tmp_path / "twice", **ROOMY, min_step_s=0.02) as run:
        run.supervisor.kill_rank(0)
        run.wait(lambda: run.supervisor._resizing, "the first death to be seen")
        run.supervisor.kill_rank(0)
        outcome = run.wait(lambda: run.supervisor.resized, "the end of the smaller group")
        assert outcome.failed
        run.wait_for_restart()
        run.wait_for_steps()
        report = run.supervisor.stop()
    assert report.ok, report
    rows = read_lines(tmp_path / "twice" / "supervisor.jsonl")
    assert [row["kind"] for row in rows].count("rank_died") == 2
    assert np.diff([line["step"] for line in lines(tmp_path / "twice", 0, "step")]).min() > 0
