"""The comparison of what the ranks hold, and the map they go to."""

import random
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from evenkeel_moe.engines.guest.plan_agreement import ROW, PlanAgreement, find_disagreement


def table(**changes):
    """Return rows of four ranks that agree, except for column -> (rank, value)."""
    rows = np.tile(np.array([7, 1, 11, 22, 33, 100], np.int64), (4, 1))
    for name, (rank, value) in changes.items():
        rows[rank, ROW.index(name)] = value
    return rows


def test_equal_rows_have_no_disagreement():
    assert find_disagreement(table()) == ""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layout": (2, 8)}, "ranks [2] of 4 have another version of this plugin"),
        ({"ordered": (1, 0)}, "ranks [1] of 4 have no plan where others have one"),
        ({"plan": (0, 12)}, "ranks [0] of 4 have another plan"),
        ({"target": (3, 0)}, "ranks [3] of 4 have another target map"),
        ({"base": (3, 0)}, "ranks [3] of 4 have another map now"),
        ({"step": (2, 99)}, "ranks {2: 99} of 4 have another step, the others 100"),
    ],
)
def test_any_difference_is_named_with_its_ranks(changes, words):
    assert find_disagreement(table(**changes)) == words


def test_ranks_without_a_plan_are_named_also_if_they_are_the_majority():
    rows = table()
    rows[1:, ROW.index("ordered")] = 0
    assert find_disagreement(rows) == "ranks [1, 2, 3] of 4 have no plan where others have one"


def test_without_a_plan_the_map_stays_and_nothing_is_refused():
    agreement, now = PlanAgreement(), np.arange(12).reshape(2, 6)
    assert np.array_equal(agreement.agree(now, lambda row: np.stack([row, row])), now)
    assert agreement.refused == ""


MAP = np.arange(12).reshape(2, 6)
PLANS = 40


def move(plan: int, target: Any) -> Any:
    return SimpleNamespace(
        wave=SimpleNamespace(fingerprint=plan), placement=SimpleNamespace(phy2log=target)
    )


class Rank:
    """One rank whose engine takes steps while a worker thread asks for the plan."""

    def __init__(self, number: int, rows: list[Any], together: threading.Barrier):
        self.agreement, self.step = PlanAgreement(), 0
        self.number, self.rows, self.together = number, rows, together
        self.answers: list[Any] = []

    def gather(self, row):
        self.rows[self.number] = row
        self.together.wait(60)
        table = np.stack(self.rows)
        self.together.wait(60)
        return table

    def ask(self, delay_s):
        time.sleep(delay_s)
        self.answers.append(self.agreement.agree(MAP, self.gather))


def test_workers_that_ask_at_different_steps_get_every_plan():
    jitter = random.Random(5)
    together, rows = threading.Barrier(2), [None, None]
    ranks = [Rank(number, rows, together) for number in range(2)]
    for number in range(PLANS):
        target = np.roll(MAP, number + 1, axis=1)
        workers = []
        for rank in ranks:
            rank.step += 1
            rank.agreement.begin(move(number, target), rank.step)
            late = jitter.uniform(0.002, 0.02) if number % 2 == rank.number else 0.0
            workers.append(threading.Thread(target=rank.ask, args=(late,)))
        for worker in workers:
            worker.start()
        while any(worker.is_alive() for worker in workers):
            # The engine takes steps of some milliseconds on both ranks in the meantime.
            for rank in ranks:
                rank.step += 1
            time.sleep(0.002)
        for rank in ranks:
            assert rank.agreement.refused == ""
            assert np.array_equal(rank.answers[-1], target)
            rank.agreement.end()
            assert rank.agreement.move is None
    assert [len(rank.answers) for rank in ranks] == [PLANS, PLANS]


def holding(plan, target, step):
    """Return the agreement of a rank to which the gate gave a plan."""
    agreement = PlanAgreement()
    agreement.begin(move(plan, target), step)
    return agreement


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (PlanAgreement(), "ranks [1] of 2 have no plan where others have one"),
        (holding(1, MAP + 1, 8), "ranks {1: 8} of 2 have another step, the others 7"),
        (holding(2, MAP + 1, 7), "have another plan"),
        (holding(1, MAP + 2, 7), "have another target map"),
    ],
)
def test_ranks_that_differ_keep_the_map_and_are_told_in_what(second, words):
    ranks = [holding(1, MAP + 1, 7), second]
    rows: list[Any] = []

    def note(row):
        rows.append(row)
        return np.stack([row])

    for rank in ranks:
        rank.agree(MAP, note)
    for rank in ranks:
        assert np.array_equal(rank.agree(MAP, lambda _: np.stack(rows)), MAP)
        assert words in rank.refused


def test_a_plan_of_another_size_leaves_the_map():
    agreement = holding(1, MAP[:1], 7)
    assert np.array_equal(agreement.agree(MAP, lambda row: np.stack([row, row])), MAP)
    assert agreement.refused == ("the plan is for (1, 6) layers and slots, the engine has (2, 6)")
