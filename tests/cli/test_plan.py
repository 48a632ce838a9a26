"""What `evenkeel plan create` takes: files to move to, policies by name."""

import json
import re

from evenkeel_moe.cli.client import Exit
from evenkeel_moe.model.placement import Placement
from evenkeel_moe.planning.policies.registry import FORMS, POLICIES
from tests.api.fakes import SHAPE, FakeView, make_status
from tests.cli.test_commands import command, operations, run, url

__all__ = ["command", "operations", "run", "url"]  # fixtures


def test_a_target_file_becomes_the_plan(run, operations, tmp_path):
    path = tmp_path / "target.json"
    want = Placement.initial(SHAPE)
    path.write_text(json.dumps({"physical_to_logical": want.phy2log.tolist(), "epoch": 1}))
    assert run("plan", "create", "-d", "demo", "--target", str(path))[0] == 0
    assert operations.calls[0][2].target == want
    for unusable in (
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"physical_to_logical": ' + b"9" * 5000 + b"}",
    ):
        path.write_bytes(unusable)
        code, _, err = run("plan", "create", "-d", "demo", "--target", str(path))
        assert code == Exit.USAGE
        assert "physical_to_logical" in err
        assert len(err.splitlines()) == 1


def test_a_target_file_of_other_ranks_is_refused(run, operations, tmp_path):
    """Slots and experts may be as many, on other ranks: the same rows are then another placement."""
    path = tmp_path / "target.json"
    want = Placement.initial(SHAPE)
    document = {"physical_to_logical": want.phy2log.tolist(), "num_ranks": SHAPE.num_ranks}
    create = ("plan", "create", "-d", "demo", "--target", str(path))
    for ranks in (2 * SHAPE.num_ranks, 1, str(SHAPE.num_ranks), True):
        path.write_text(json.dumps({**document, "num_ranks": ranks}))
        assert run(*create) == (
            Exit.REFUSED,
            "",
            f"evenkeel: {path} is for {ranks} ranks, demo has {SHAPE.num_ranks} ranks x {SHAPE.slots_per_rank} slots\n",
        )
    assert operations.calls == []
    path.write_text(json.dumps(document))
    assert run(*create)[0] == 0
    assert operations.calls[0][2].target == want
    path.write_text(json.dumps({**document, "num_ranks": 1}))
    for unproven in ({"generation": ""}, {"state": "follower"}):
        operations.views["demo"] = FakeView(make_status(**unproven), {}, None)
        assert run(*create)[0] == Exit.UNAVAILABLE


def test_help_names_every_policy_a_plan_may_ask_for(command):
    code, out, _ = command("plan", "create", "--help")
    assert code == 0
    words = set(re.findall(r"[a-z]+(?:-[a-z]+)*", out))
    assert {*POLICIES, *FORMS} <= words
