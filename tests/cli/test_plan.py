import json
import re
from types import SimpleNamespace
from typing import Any

import pytest

from evenkeel_moe.cli.exits import Exit
from evenkeel_moe.errors import Conflict, Unavailable
from evenkeel_moe.model.ids import Epoch
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.ports.operations import RecordedEpoch
from tests.api.fakes import SHAPE, make_plan


def test_a_plan_from_proposal_to_its_end(run, operations):
    options = ("-d", "demo")
    create = "plan create --id mine --policy keel --max-moves 8"
    more = "--replica-budget 4 --option craft.rule=knee --phase decode --phase prefill"
    code, out, _ = run(*create.split(), *options, *more.split())
    assert code == 0
    assert "proposed" in out
    _, _, request = operations.calls[0]
    assert (request.dry_run, request.approve, request.policy) == (False, False, "keel")
    assert request.limits.max_moves == 8
    told = {"policy_options": {"craft": {"rule": "knee"}}, "replica_budget": 4}
    assert request.changes == told
    assert [str(phase) for phase in request.phases] == ["decode", "prefill"]
    assert "approved" in run("plan", "approve", "mine", "--yes", *options)[1]
    assert "mine" in run("plan", "list", *options)[1]
    assert "0.600 -> 0.900" in run("plan", "show", "mine", *options)[1]
    assert "Created by test" in run("plan", "story", "mine", *options)[1]
    assert "cancelled" in run("plan", "cancel", "mine", *options)[1]
    code, out, err = run("plan", "approve", "mine", "--yes", *options)
    assert (code, out) == (Exit.REFUSED, "")
    problem = "The request does not fit the current state: plan mine is cancelled (wrong_phase)"
    assert err == f"evenkeel: {problem}\n"


def test_a_dry_run_shows_a_plan_and_keeps_nothing(run, operations):
    code, out, _ = run("plan", "create", "--dry-run", "-d", "demo")
    assert (code, "0.600 -> 0.900" in out) == (0, True)
    assert re.search(r"^phase +dry run: Nothing was kept\.$", out, re.MULTILINE)
    assert "waits for approval" not in out.replace("wait for approval", "")
    assert operations.records["demo"] == []
    code, _, err = run("plan", "create", "--dry-run", "--start", "-d", "demo")
    assert (code, "give one of them" in err) == (Exit.USAGE, True)


@pytest.mark.parametrize(
    ("arguments", "kind"), [(("rollback",), "rollback"), (("create", "--policy", "keel"), "manual")]
)
def test_a_plan_that_may_have_been_accepted_can_be_repeated_by_its_id(
    run, operations, arguments, kind
):
    words = "the store did not take it; it is tried again while this replica leads"
    operations.error = Unavailable(words)
    code, out, err = run("plan", *arguments, "--yes", "-d", "demo")
    assert (code, out, len(err.splitlines())) == (Exit.UNAVAILABLE, "", 1)
    assert words in err
    repeat = re.search(rf"--id ({kind}-[0-9a-f]{{12}})$", err.strip())
    assert repeat
    operations.error = None
    for _ in range(2):
        code, out, _ = run("plan", *arguments, "--yes", "-d", "demo", "--id", repeat[1])
        assert (code, repeat[1] in out) == (0, True)
    assert [record.plan.plan_id for record in operations.records["demo"]] == [repeat[1]]


@pytest.mark.parametrize("arguments", ["create", "rollback", "rollback --to-epoch 2"])
def test_a_plan_that_no_controller_took_was_not_sent(run, arguments):
    away = ("--address", "http://127.0.0.1:9")
    code, out, err = run("plan", *arguments.split(), "--yes", "-d", "demo", *away)
    assert (code, out) == (Exit.UNAVAILABLE, "")
    assert err.endswith("; nothing was sent\n")
    assert "accepted" not in err and "--id" not in err


def test_a_rollback_to_an_epoch_is_repeated_to_the_same_epoch(run, operations):
    operations.error = Unavailable("the store did not take it")
    err = run("plan", "rollback", "-d", "demo", "--yes", "--to-epoch", "2")[2]
    assert re.search(r"--id rollback-[0-9a-f]{12} --to-epoch 2$", err.strip())
    digest = "0" * 32
    err = run("plan", "rollback", "-d", "demo", "--yes", "--to-placement", digest)[2]
    assert err.strip().endswith(f" --to-placement {digest}")


def test_a_rollback_takes_the_first_digits_of_a_placement(run, operations):
    def back(digits):
        return run("plan", "rollback", "-d", "demo", "--yes", "--to-placement", digits)

    digest = make_plan().plan.base.digest
    for digits in (digest[:6], digest[:31], digest, digest[:8].upper()):
        assert back(digits)[0] == Exit.DONE
        assert operations.calls.pop()[2] == digest
    code, _, err = back(digest[:5])
    assert code == Exit.USAGE and err.startswith(f"evenkeel: {digest[:5]} is not a placement: ")
    assert back(digest + "0")[0] == back("ghijkl")[0] == Exit.USAGE
    other = "f" * 6 if digest[0] != "f" else "e" * 6
    code, _, err = back(other)
    lists = "`evenkeel placement list -d demo` lists them"
    none = f"evenkeel: no recorded placement begins with {other}; {lists}\n"
    assert (code, err) == (Exit.REFUSED, none)
    assert not operations.calls


def test_digits_of_several_placements_are_refused_and_those_of_one_in_two_epochs_are_not(
    run, operations
):
    one, two = ("abcdef1".ljust(32, "0"), "abcdef2".ljust(32, "0"))

    async def epochs(_deployment):
        placements: list[Any] = [SimpleNamespace(digest=digest) for digest in (one, two, two)]
        return [RecordedEpoch(Epoch(n), at, False) for n, at in enumerate(placements)]

    operations.epochs = epochs
    back = ("plan", "rollback", "-d", "demo", "--yes", "--to-placement")
    assert run(*back, "abcdef2")[0] == Exit.DONE
    assert operations.calls.pop()[2] == two
    code, _, err = run(*back, "abcdef")
    words = f"2 recorded placements begin with abcdef, give more digits: {one}, {two}"
    assert (code, err) == (Exit.USAGE, f"evenkeel: {words}\n")
    assert not operations.calls


def test_a_refused_plan_is_not_to_be_repeated(run, operations):
    operations.error = Conflict("plan p is migrating")
    code, _, err = run("plan", "rollback", "-d", "demo", "--yes")
    assert (code, "--id" in err) == (Exit.REFUSED, False)


def test_each_rollback_has_an_id_of_its_own(run, operations):
    for _ in range(2):
        assert run("plan", "rollback", "-d", "demo", "--yes")[0] == 0
    first, second = (record.plan.plan_id for record in operations.records["demo"])
    assert first != second


def test_the_only_deployment_needs_no_name(run, operations):
    del operations.views["fresh"]
    assert run("plan", "list")[0] == 0
    operations.views.clear()
    assert run("plan", "list")[0] == Exit.REFUSED


def test_long_lists_are_fetched_whole(run, operations):
    operations.records["demo"] = [make_plan(f"p{number}") for number in range(230)]
    every = json.loads(run("plan", "list", "-d", "demo", "-o", "json")[1])
    assert len(every) == 230
    for limit in (3, 150):
        newest = json.loads(run("plan", "list", "-d", "demo", "-o", "json", "-n", str(limit))[1])
        assert newest == every[:limit]


def test_a_target_file_becomes_the_plan(run, operations, tmp_path):
    path = tmp_path / "target.json"
    want = Placement.initial(SHAPE)
    path.write_text(json.dumps({"physical_to_logical": want.phy2log.tolist(), "epoch": 1}))
    assert run("plan", "create", "--yes", "-d", "demo", "--target", str(path))[0] == 0
    assert operations.calls[0][2].target == want
    for unusable in (
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"physical_to_logical": ' + b"9" * 5000 + b"}",
    ):
        path.write_bytes(unusable)
        code, _, err = run("plan", "create", "--yes", "-d", "demo", "--target", str(path))
        assert code == Exit.USAGE
        assert "physical_to_logical" in err
        assert len(err.splitlines()) == 1


def test_a_target_file_of_other_ranks_is_refused(run, operations, tmp_path):
    """With as many slots and experts on other ranks, the same rows mean another placement."""
    path = tmp_path / "target.json"
    want = Placement.initial(SHAPE)
    document = {"physical_to_logical": want.phy2log.tolist(), "num_ranks": SHAPE.num_ranks}
    create = ("plan", "create", "-d", "demo", "--yes", "--target", str(path))
    for ranks in (2 * SHAPE.num_ranks, 1, str(SHAPE.num_ranks), True):
        path.write_text(json.dumps({**document, "num_ranks": ranks}))
        has = f"demo has {SHAPE.num_ranks} ranks x {SHAPE.slots_per_rank} slots"
        said = f"evenkeel: {path} is for {ranks} ranks, {has}\n"
        assert run(*create) == (Exit.REFUSED, "", said)
    assert operations.calls == []
    path.write_text(json.dumps(document))
    assert run(*create)[0] == 0
    assert operations.calls[0][2].target == want
    path.write_text(json.dumps({**document, "num_ranks": 1}))
    for unproven in ({"generation": ""}, {"state": "follower"}):
        operations.show(**unproven)
        assert run(*create)[0] == Exit.UNAVAILABLE
