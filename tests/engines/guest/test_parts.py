"""The parts all plugins share: the verdict over what ranks hold, guards, settings, counts."""

import importlib
import inspect
import threading
import tomllib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import structlog
import torch

from evenkeel_moe.engines.guest.collective_start import all_or_none, roll_call
from evenkeel_moe.engines.guest.counts import StepCounts, StepNote
from evenkeel_moe.engines.guest.guards import (
    Unsupported,
    check_fields,
    check_signatures,
    check_version,
)
from evenkeel_moe.engines.guest.plan_agreement import ROW, Orders, judge
from evenkeel_moe.engines.guest.settings import GuestMode, load_guest_settings
from evenkeel_moe.engines.sglang.state import Rows
from evenkeel_moe.errors import InvalidInput, ShapeMismatch, Unavailable


def table(**changes):
    """Four ranks that agree, but for (column, rank) -> value."""
    rows = np.tile(np.array([7, 1, 11, 22, 33, 100], np.int64), (4, 1))
    for name, (rank, value) in changes.items():
        rows[rank, ROW.index(name)] = value
    return rows


def test_ranks_that_hold_the_same_go_on():
    assert judge(table()) == ""


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
    assert judge(table(**changes)) == words


def test_one_plan_among_many_without_is_named_by_those_without():
    rows = table()
    rows[1:, ROW.index("ordered")] = 0
    assert judge(rows) == "ranks [1, 2, 3] of 4 have no plan where others have one"


def test_without_a_plan_the_map_stays_and_nothing_is_said_to_be_wrong():
    orders, now = Orders(), np.arange(12).reshape(2, 6)
    assert np.array_equal(orders.answer(now, lambda row: np.stack([row, row])), now)
    assert orders.refused == ""


def test_guards_say_what_differs():
    class Engine:
        @classmethod
        def plan(cls, weight, ranks):
            return weight

        @staticmethod
        def free(one):
            return one

        number = 3

    check_version("engine", "1.0", ("1.0", "1.1"))
    with pytest.raises(Unsupported, match=r"engine is 1.2; this plugin knows 1.0, 1.1"):
        check_version("engine", "1.2", ("1.0", "1.1"))
    check_signatures(Engine, {"plan": ("cls", "weight", "ranks"), "free": ("one",)})
    with pytest.raises(
        Unsupported, match=r"plan takes \(cls, weight, ranks\), not \(cls, weight\)"
    ):
        check_signatures(Engine, {"plan": ("cls", "weight")})
    for name in ("gone", "number"):
        with pytest.raises(Unsupported, match="is not there"):
            check_signatures(Engine, {name: ()})

    @dataclass
    class State:
        here: int

    check_fields(State, ("here",))
    with pytest.raises(Unsupported, match="State has no away"):
        check_fields(State, ("here", "away"))
    with pytest.raises(Unsupported):
        check_fields(Engine, ("number",))


def test_the_environment_is_read_once_and_checked(monkeypatch):
    assert load_guest_settings().addresses == ()
    monkeypatch.setenv("EVENKEEL_RANK__CONTROLLERS", "a:1, [fd00::2]:2,")
    monkeypatch.setenv("EVENKEEL_RANK__MODE", "place")
    settings = load_guest_settings()
    assert settings.addresses == ("a:1", "[fd00::2]:2")
    assert settings.mode is GuestMode.PLACE


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("MODE", "move", "EVENKEEL_RANK__MODE"),
        ("DEPLOYMENT", "Not One", "is no deployment name"),
        ("POLL_EVERY", "1", "EVENKEEL_RANK__POLL_EVERY"),
        ("RESOLVE_AFTER", "40", "exceeds EVENKEEL_RANK__POLL_EVERY"),
        ("GATE_TIMEOUT_S", "inf", "EVENKEEL_RANK__GATE_TIMEOUT_S"),
        ("GROUP_TIMEOUT_S", "1e300", "EVENKEEL_RANK__GROUP_TIMEOUT_S"),
        ("WEIGHTS_VERSION", str(2**64), "EVENKEEL_RANK__WEIGHTS_VERSION"),
        ("CONTROLLERS", "a:1,controller", "'controller' is not host:port"),
        ("CONTROLLERS", "http://controller:50051", "is not host:port"),
        ("CONTROLLERS", "fd00::2:50051", "IPv6 addresses stand in brackets"),
        ("TLS_KEY_FILE", "/key", "TLS_CERT_FILE and EVENKEEL_RANK__TLS_KEY_FILE need each other"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(monkeypatch, name, value, words):
    monkeypatch.setenv(f"EVENKEEL_RANK__{name}", value)
    with pytest.raises(InvalidInput, match=words):
        load_guest_settings()


def test_a_certificate_without_a_ca_is_refused(monkeypatch):
    monkeypatch.setenv("EVENKEEL_RANK__TLS_CERT_FILE", "/cert")
    monkeypatch.setenv("EVENKEEL_RANK__TLS_KEY_FILE", "/key")
    with pytest.raises(InvalidInput, match="needs EVENKEEL_RANK__TLS_CA_FILE"):
        load_guest_settings()
    monkeypatch.setenv("EVENKEEL_RANK__TLS_CA_FILE", "/ca")
    assert load_guest_settings().tls_ca_file == Path("/ca")


def test_an_empty_variable_is_one_that_was_not_set(monkeypatch):
    for name in (
        "CONTROLLERS",
        "DEPLOYMENT",
        "POLL_EVERY",
        "TLS_CA_FILE",
        "TLS_CERT_FILE",
        "TLS_KEY_FILE",
    ):
        monkeypatch.setenv(f"EVENKEEL_RANK__{name}", "")
    settings = load_guest_settings()
    assert settings.tls_ca_file is None, (
        "a path of no letters would ask for TLS, with a folder as the CA"
    )
    assert (settings.addresses, settings.deployment, settings.poll_every) == ((), "default", 16)


def test_a_rank_without_the_plugin_is_missed_before_any_collective():
    store = torch.distributed.HashStore()
    all_there = [
        threading.Thread(target=roll_call, args=(store, "a", rank, 3, 20.0)) for rank in (1, 2)
    ]
    for thread in all_there:
        thread.start()
    roll_call(store, "a", 0, 3, 20.0)
    for thread in all_there:
        thread.join(20)
    errors = {}

    def asks(rank):
        try:
            roll_call(store, "b", rank, 3, 0.2)
        except Unavailable as error:
            errors[rank] = str(error)

    late = threading.Thread(target=asks, args=(2,))
    late.start()
    asks(0)
    late.join(20)
    assert errors == dict.fromkeys(
        (0, 2), "no plugin came on ranks [1] of 3 within 0.2 s: it must be on all of them"
    )
    asks(1)
    assert 1 in errors, "one that comes when the others have gone on does not begin alone"


def test_a_start_that_fails_anywhere_fails_everywhere_and_is_taken_back():
    undone = []

    def among(*others):
        return lambda row: np.array([[int(row[0])], *([other] for other in others)])

    assert all_or_none("begin", lambda: 7, among(0, 0), undone.append) == 7
    with pytest.raises(Unavailable, match=r"ranks \[2\] could not begin: their logs say why"):
        all_or_none("begin", lambda: 7, among(0, 1), undone.append)
    assert undone == [7]
    rows = []

    def fails():
        raise RuntimeError("no more threads")

    with pytest.raises(RuntimeError, match="no more threads"):
        all_or_none("begin", fails, lambda row: among(0)(rows.append(row) or row), undone.append)
    assert [row.tolist() for row in rows] == [[1]], (
        "the others wait for a word also of a rank that failed"
    )
    assert undone == [7]


def test_an_error_of_every_step_does_not_fill_the_log():
    counts = StepCounts(3, lambda note, values: None)
    with structlog.testing.capture_logs() as said:
        for step in range(1000):
            try:
                counts.take(StepNote(step, 0, False, None), torch.zeros(1, 4), torch.zeros(2, 5))
            except RuntimeError:
                counts.failed(step)
    assert [line["times"] for line in said] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]


def test_counts_become_logical_by_the_map_of_their_own_step():
    seen = []
    counts = StepCounts(3, lambda note, values: seen.append((note.step, values.tolist())))
    by_slot = torch.tensor([[5, 1, 2, 4]], dtype=torch.int32)
    counts.take(StepNote(0, 0, False, None), by_slot, torch.tensor([[0, 1, 2, 0]]))
    counts.take(StepNote(1, 1, False, None), by_slot, torch.tensor([[2, 1, -1, 0]]))
    counts.take(StepNote(2, 1, False, None), by_slot, None)
    assert seen == [(0, [[9, 1, 2]]), (1, [[4, 1, 5]]), (2, [[5, 1, 2, 4]])]


def test_the_engine_may_fill_its_own_counter_again():
    seen = []
    counts = StepCounts(3, lambda note, values: seen.append(values))
    own = torch.tensor([[5, 1, 2, 4]])
    for view in (own, own[:, 1:3]):
        counts.take(StepNote(0, 0, False, None), view, None)
    own.zero_()
    assert [values.tolist() for values in seen] == [[[5, 1, 2, 4]], [[1, 2]]]


def test_dense_layers_keep_their_rows():
    rows = Rows((1, 3))
    hidden = np.arange(16).reshape(4, 4)
    assert np.array_equal(rows.moe(hidden), hidden[[1, 3]])
    new = rows.hidden(np.zeros((2, 4)), hidden)
    assert not new[[1, 3]].any()
    assert np.array_equal(new[[0, 2]], hidden[[0, 2]])
    with pytest.raises(ShapeMismatch, match=r"\(3, 4\) layers and slots, SGLang has \(2, 4\)"):
        rows.hidden(np.zeros((3, 4)), hidden)


def test_engines_find_the_plugins():
    """The names under which the package offers them; each must be there and take nothing."""
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    groups = tomllib.loads(text)["project"]["entry-points"]
    assert set(groups) == {"vllm.general_plugins", "sglang.srt.plugins"}
    for names in groups.values():
        module, _, name = names["evenkeel"].partition(":")
        offered = getattr(importlib.import_module(module), name)
        assert not inspect.signature(offered).parameters
        offered()  # off without an address: no engine is here, and nothing is raised
