"""Groups of real processes that change their size while they serve."""

import os
import signal
import threading

import numpy as np
import psutil
import pytest

from evenkeel_moe.engines.reference.config import RankConfig
from evenkeel_moe.engines.reference.fleet import run_fleet
from evenkeel_moe.engines.reference.lines import read_lines
from evenkeel_moe.engines.reference.resize_request import ask_to_resize
from evenkeel_moe.engines.reference.state import SavedPlacement, load_placement, save_placement
from evenkeel_moe.errors import Conflict, InfeasiblePlan, InvalidInput
from evenkeel_moe.model.placement import Placement
from tests.engines.reference.test_run import SMALL, lines, supervisor_for
from tests.forked.rank import fork_rank
from tests.waiting import deadline, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]
REQUESTS = {"requests_per_s": 3.0, "prompt_tokens": 8, "output_tokens": 3, "min_step_s": 0.02}


class Run:
    """A supervisor that is polled while a test waits."""

    def __init__(self, folder, script=None, **changes):
        self.folder = folder
        self.supervisor = supervisor_for(folder, script, **{"steps": 0, **changes})

    def __enter__(self):
        self.supervisor.start()
        self.wait_for_steps()
        return self

    def __exit__(self, *_):
        self.supervisor.stop()

    def wait(self, condition, what):
        def poll():
            assert self.supervisor.poll() is None, self.supervisor.stop()
            return condition()

        return wait_until(poll, within_s=60, what=what)

    def wait_for_steps(self, count=5):
        """Wait until every rank of the present group has served so many steps."""

        def served():
            group = max(line["group"] for line in lines(self.folder, 0, "start"))
            return all(
                sum(line["group"] == group for line in lines(self.folder, rank, "step")) >= count
                for rank in range(self.supervisor.num_ranks)
            )

        self.wait(lambda: lines(self.folder, 0, "start") and served(), "steps of every rank")

    def wait_for_requests(self, group):
        """Wait until every rank of the present group has served one to its end."""

        def ended(rank):
            return any(line["group"] == group for line in lines(self.folder, rank, "request"))

        ranks = range(self.supervisor.num_ranks)
        self.wait(lambda: all(map(ended, ranks)), "requests of every rank")

    def wait_for_restart(self):
        """Wait until every rank has started again, for the first time."""

        def restarted(rank):
            return any(line["attempt"] == 1 for line in lines(self.folder, rank, "start"))

        self.wait(lambda: self.supervisor.restarts == 1, "the restart")
        ranks = range(self.supervisor.num_ranks)
        self.wait(lambda: all(map(restarted, ranks)), "the start of every rank")

    def resize(self, *args, **keys):
        self.supervisor.resize(*args, **keys)
        return self.wait(lambda: self.supervisor.resized, "the new group")

    def placement(self):
        """The newest one that a rank of the present group has saved."""
        shape = RankConfig.from_json((self.folder / "config.json").read_text()).shape
        files = [self.folder / "state" / f"rank-{rank}.npz" for rank in range(shape.num_ranks)]
        saved = [one for file in files if (one := load_placement(file, shape))]
        return max(saved, key=lambda one: one.epoch)


def starts(folder, rank, group):
    [line] = [line for line in lines(folder, rank, "start") if line["group"] == group]
    return line


def test_a_group_grows_and_shrinks_while_requests_run_and_experts_move(tmp_path):
    """4 to 6 to 3 ranks; a script moves experts to those who joined, then off those who leave."""
    script = {"seed": 7, "plans": 1, "fill": 4, "homes": {"4": 4, "6": 3, "3": 3}}
    sizes = {"num_ranks": 4, "slots_per_rank": 6, "pool_slots_per_layer": 12}
    with Run(tmp_path, script, **sizes, **REQUESTS) as run:
        supervisor, first = run.supervisor, run.supervisor.pids
        # Right after the start, each expert has one replica.
        moved = lines(tmp_path, 0, "swap")
        if not moved:
            with pytest.raises(InfeasiblePlan, match=r"experts live on the retiring ranks 3 alone"):
                supervisor.resize(3)
        with pytest.raises(InvalidInput, match="4 ranks already"):
            supervisor.resize(4)
        assert supervisor.pids == first

        run.wait_for_requests(0)
        grown = run.resize(6)
        assert not grown.failed and supervisor.pids[:4] == first
        with pytest.raises(InfeasiblePlan, match=r"on the retiring ranks 0, 1, 2, 3 alone"):
            supervisor.resize(2, retire=(0, 1, 2, 3))
        run.wait(lambda: len(scripted(tmp_path, 6)) == 6, "experts on the new ranks")
        run.wait_for_requests(1)
        held = run.placement().placement
        assert held.logcnt.min() >= 1 and (held.used_per_rank()[4:] > 0).all()

        shrunk = run.resize(3)
        assert not shrunk.failed and supervisor.pids == first[:3]
        held = run.placement().placement
        assert held.num_ranks == 3 and held.logcnt.min() >= 1
        run.wait_for_requests(2)
        report = supervisor.stop()
    assert report.ok, report
    assert (report.codes, report.retired, report.restarts) == ((0,) * 3, (0,) * 3, 0)
    assert len(report.checks) == 6
    assert all(check["mismatches"] == 0 and check["maps_agree"] for check in report.checks)
    assert all(check["rows_checked"] > 0 for check in report.checks)
    for rank in range(3):
        served = lines(tmp_path, rank, "step")
        assert [line["step"] for line in served] == list(range(report.steps))
        assert all(line["mismatches"] == 0 for line in served)
        # The same process with the same memory, into which no expert was read again.
        begun = [starts(tmp_path, rank, group) for group in range(3)]
        assert {line["pid"] for line in begun} == {first[rank]}
        assert len({line["loaded_bytes"] for line in begun}) == 1 and begun[0]["loaded_bytes"]
        for group, outcome in ((1, grown), (2, shrunk)):
            line, before = begun[group], [one for one in served if one["group"] < group][-1]
            assert line["step"] == outcome.first_step == before["step"] + 1
            last_swap = [one for one in lines(tmp_path, rank, "swap") if one["group"] < group]
            epoch = max([before["epoch"], *(one["epoch"] for one in last_swap)])
            assert line["epoch"] == epoch + 1
    for rank in (4, 5):
        assert starts(tmp_path, rank, 1)["loaded_bytes"] == 0
    for rank in (3, 4, 5):  # Who retired had served all its requests.
        assert lines(tmp_path, rank, "step")[-1]["running"] == 0
        assert not lines(tmp_path, rank, "gave_up")
    told = [row["lineage"] for row in scripted(tmp_path, 6, "registered")]
    generation = starts(tmp_path, 0, 0)["generation"]
    assert told == [[generation, former] for former in (0, 1, 2, 3, None, None)]


def scripted(folder, ranks, kind="script_done"):
    """Return what the scripts of a group of so many ranks have written, in the order of ranks."""
    rows = [row for path in sorted(folder.glob("script-*.jsonl")) for row in read_lines(path)]
    return [row for row in rows if row["kind"] == kind and row["ranks"] == ranks]


def everywhere(folder, ranks, experts=8, layers=3):
    """Save a placement in which every rank holds every expert."""
    rows = np.tile(np.arange(experts, dtype=np.int32), (layers, ranks))
    saved = SavedPlacement(Placement(rows, ranks, experts), 4, "before")
    save_placement(folder / "state" / "rank-0.npz", saved)


LONG = {"requests_per_s": 0.5, "output_tokens": 24}
FULL = {"slots_per_rank": 8, "pool_slots_per_layer": 12}


def test_a_retiring_rank_ends_its_requests_first_and_the_others_get_new_numbers(tmp_path):
    everywhere(tmp_path, 3)
    with Run(tmp_path, num_ranks=3, **FULL, **{**REQUESTS, **LONG}) as run:
        first = run.supervisor.pids
        run.wait(lambda: lines(tmp_path, 0, "step")[-1]["running"], "a request on rank 0")
        outcome = run.resize(2, retire=(0,), drain_s=60)
        assert not outcome.failed and not outcome.given_up
        assert run.supervisor.pids == first[1:]
        left = [line for line in lines(tmp_path, 0, "step") if line["group"] == 0]
        assert left[-1]["running"] == 0 and left[-1]["step"] == outcome.first_step - 1
        assert not lines(tmp_path, 0, "gave_up")
        assert starts(tmp_path, 0, 1)["former_rank"] == 1
        # Without time, what still runs is named.
        run.wait(lambda: lines(tmp_path, 1, "step")[-1]["running"], "a request on rank 1")
        outcome = run.resize(1, drain_s=0)
        given_up = lines(tmp_path, 1, "gave_up")
        assert outcome.given_up == len(given_up) > 0
        assert all(line["done"] < line["prompt"] + line["output"] for line in given_up)
        run.wait_for_steps()
        report = run.supervisor.stop()
    assert report.ok and report.retired == (0, 0), report
    served = sorted(line["step"] for line in lines(tmp_path, 0, "step"))
    assert served == list(range(report.steps))


def test_a_rank_killed_after_a_resize_restarts_the_group_at_its_new_size(tmp_path):
    with Run(tmp_path, min_step_s=0.01) as run:
        with pytest.raises(Conflict, match="under way"):
            run.supervisor.resize(3)
            run.supervisor.resize(4)
        run.wait(lambda: run.supervisor.resized, "three ranks")
        run.wait_for_steps()
        pids, newest = run.supervisor.pids, run.placement()
        run.supervisor.kill_rank(2)
        run.wait_for_restart()
        run.wait_for_steps()
        report = run.supervisor.stop()
    assert report.ok and len(report.codes) == 3 and report.restarts == 1, report
    for rank in range(3):
        begun = lines(tmp_path, rank, "start")[-1]
        assert (begun["warm"], begun["epoch"], begun["ranks"]) == (True, newest.epoch, 3)
        assert begun["placement_digest"] == newest.placement.digest
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_rank_killed_while_the_group_forms_restarts_it_with_the_newest_saved_map(tmp_path):
    everywhere(tmp_path, 2)
    with Run(tmp_path, min_step_s=0.05, **FULL) as run:
        run.supervisor.resize(3)
        run.wait(lambda: run.supervisor._resizing.forming, "the end of the old group")
        run.supervisor.kill_rank(1)
        outcome = run.wait(lambda: run.supervisor.resized, "the end of the resize")
        assert outcome.failed == "a rank died meanwhile, all ranks are started again"
        run.wait_for_restart()
        run.wait_for_steps()
        report = run.supervisor.stop()
    assert report.ok and report.restarts == 1, report
    assert report.codes == (0,) * run.supervisor.num_ranks
    # Of the group of three, no rank may have lived to save its map.
    begun = lines(tmp_path, 0, "start")[-1]
    assert (begun["ranks"], begun["epoch"]) in ((2, 4), (3, 5))
    served = [line["step"] for line in lines(tmp_path, 0, "step")]
    assert served == sorted(set(served))


def test_a_resize_that_is_stopped_or_loses_a_new_rank_leaves_the_group_whole(tmp_path):
    with Run(tmp_path, min_step_s=0.01) as run:
        pids = run.supervisor.pids
        run.supervisor.resize(3)
        [new] = run.supervisor._resizing.joining.values()
        new.kill()
        outcome = run.wait(lambda: run.supervisor.resized, "the end of the resize")
        assert "new ranks ended" in outcome.failed and run.supervisor.pids == pids
        run.wait_for_steps(len(lines(tmp_path, 0, "step")) + 5)
        run.supervisor.resize(3)
        report = run.supervisor.stop()
    assert report.ok and report.codes == (0, 0) and not report.retired, report


def test_another_process_asks_a_running_fleet_by_its_folder(tmp_path):
    config = RankConfig(run_folder=str(tmp_path), **{**SMALL, "steps": 0, "min_step_s": 0.01})
    with pytest.raises(InvalidInput, match="no fleet runs"):
        ask_to_resize(tmp_path, 3, (), 1.0, 1.0)
    answers = []

    def ask():
        try:
            wait_until(
                lambda: all(lines(tmp_path, rank, "step") for rank in (0, 1)),
                within_s=60,
                what="steps",
            )
            answers.append(ask_to_resize(tmp_path, 3, (7,), 1.0, deadline(30)))
            answers.append(ask_to_resize(tmp_path, 3, (), 1.0, deadline(60)))
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    asking = threading.Thread(target=ask)
    asking.start()
    report = run_fleet(config, start_rank=fork_rank)
    asking.join()
    refused, resized = answers
    assert refused == (False, "ranks [7] do not exist: the group has 0..1")
    assert resized[0] and resized[1].startswith("resized from 2 to 3 ranks: serving paused for 0.")
    assert report.ok and report.codes == (0, 0, 0)
    assert [path.name for path in tmp_path.glob("resize-*")] == []
