"""The model of the switch judges the real machines, and finds what breaks a rule."""

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.quint.judge import FAULTS, QUINT, TREE, broken_invariant, judge, record_seed
from tests.quint.translate import load
from tests.quint.values import Record, Walk
from tests.sim.mutants import BY_NAME
from tests.waiting import deadline

pytestmark = pytest.mark.quint
MODEL = Path(__file__).with_name("switch.qnt")


@pytest.fixture(scope="module")
def model() -> SimpleNamespace:
    return load(TREE, Walk(0))


def test_model_accepts_runs_of_the_machines(model: SimpleNamespace) -> None:
    switched = 0
    # In the last one another group takes the place of the first.
    for seed in (*range(20), 408):
        trace = record_seed(seed)
        if trace is not None:
            verdict = judge(model, *trace)
            assert verdict.refused == "", f"seed {seed}, event {verdict.accepted}"
            switched += len(verdict.state["switched"])
    assert switched > 20


@pytest.mark.parametrize(
    ("mutant", "seed"),
    [("R3", 137), ("R3c", 1), ("R5", 1), ("R6", 5), ("R7", 53), ("R7b", 1), ("R9", 1), ("R14", 3)],
)
def test_model_refuses_a_run_of_a_mutant(model: SimpleNamespace, mutant: str, seed: int) -> None:
    trace = record_seed(seed, BY_NAME[mutant].kit)
    assert trace is not None
    assert judge(model, *trace).refused


@pytest.mark.parametrize(("init", "invariant"), sorted(FAULTS.items()))
def test_walk_finds_a_rule_broken_in_the_model(init: str, invariant: str) -> None:
    for seed in range(80):
        walk = Walk(seed)
        model = load(TREE, walk)
        walk.step(getattr(model, init))
        for _ in range(1000):
            assert walk.step(model.step)
            if broken := broken_invariant(model, walk.state):
                assert broken == invariant
                return
    pytest.fail("no run broke an invariant")


def test_rank_takes_no_message_of_a_rank(model: SimpleNamespace) -> None:
    start = model.started(frozenset({0, 1}), frozenset({0}), Record(every=2, delay=1, fault=""))
    state = model.apply(start, ("LeaseTaken", Record(leader=0, term=1)))["state"]
    query = next(message for message in state["net"] if message["rank"] == 0)
    state = model.apply(state, ("RankGot", _arrives(query)))["state"]
    state = model.apply(state, ("Tells", Record(rank=0, about=0)))["state"]
    [answer] = (message for message in state["net"] if message["body"][0] == "RankState")
    assert model.apply(state, ("LeaderGot", Record(message=answer, again=True)))["ok"]
    assert not model.apply(state, ("RankGot", _arrives(answer)))["ok"]


def _arrives(message: Record) -> Record:
    return Record(message=message, again=True, refuses=False)


def test_quint_judges_a_trace_as_its_translation_does(
    model: SimpleNamespace, tmp_path: Path
) -> None:
    trace = record_seed(1)
    assert trace is not None
    start, events = trace[0], trace[1][:120]
    verdict = judge(model, start, events)
    models = f"./{os.path.relpath(MODEL.parent, tmp_path)}"
    source = f"""module trace {{
  import switch.* from "{models}/switch"
  import state.* from "{models}/state"
  pure val events = [{", ".join(_quint(event) for event in events)}]
  pure val after = events.foldl(goes(started({_quint(start["ranks"])}, Set(0, 1),
    {_quint(start["config"])})), (a, event) => if (a.ok) apply(a.state, event) else a)
  var same: bool
  action begin = same' = (after.ok and after.state == {_quint(verdict.state)})
  action stay = same' = same
}}
"""
    file = tmp_path / "trace.qnt"
    file.write_text(source)
    options = ["--backend=typescript", "--init=begin", "--step=stay", "--invariant=same"]
    command = [str(QUINT), "run", str(file), *options, "--max-samples=1", "--max-steps=1"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=deadline(100.0))
    assert run.returncode == 0, run.stdout + run.stderr


def _quint(value: Any) -> str:
    """Write a value as a Quint expression."""
    match value:
        case bool():
            return str(value).lower()
        case int():
            return str(value)
        case str():
            return f'"{value}"'
        case frozenset():
            return f"Set({', '.join(map(_quint, value))})"
        case (str(label), content):
            return label if content == () else f"{label}({_quint(content)})"
        case Record() if value and all(isinstance(key, str) for key in value):
            return "{ " + ", ".join(f"{key}: {_quint(held)}" for key, held in value.items()) + " }"
        case Record():
            pairs = (f"{_quint(key)} -> {_quint(held)}" for key, held in value.items())
            return f"Map({', '.join(pairs)})"
    raise TypeError(value)
