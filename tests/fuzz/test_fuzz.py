"""A short run of the fuzzer: the corpus, if there is one, the seeds, and changed input."""

import pytest

from tests.fuzz.__main__ import failure, fuzz, kept
from tests.fuzz.targets import TARGETS, Target


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_a_parser_refuses_wrong_input_only_as_it_promises(target):
    tried, _, failures = fuzz(target, 0.3, seed=1)
    assert not failures
    assert tried > len(kept(target)) + len(target.seeds)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_the_seeds_reach_the_parser(target):
    outcomes = [failure(target, seed) for seed in target.seeds]
    assert all(how == "" for _, how in outcomes)
    assert any(outcome == "taken" for outcome, _ in outcomes), outcomes


def test_a_parser_that_fails_is_found_and_its_input_is_told():
    def parse(data: bytes) -> object:
        return data[:4].decode()

    target = Target("none", parse, (), (b"word",))
    _, taken, failures = fuzz(target, 0.2, seed=1)
    assert taken and set(failures) == {"UnicodeDecodeError"}
    assert failure(target, failures["UnicodeDecodeError"])[1]
