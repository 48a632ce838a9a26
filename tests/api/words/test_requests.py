"""What the audit says that a request asked for."""

import json

import pytest

from evenkeel_moe.api.words.requests import request_text


def asked(method, path, change=None):
    text = change if change is None or isinstance(change, str) else json.dumps(change)
    row = {"deployment": "demo", "method": method, "change": text}
    return request_text({**row, "path": f"/v1/deployments/demo{path}"})


@pytest.mark.parametrize(
    ("method", "path", "change", "words"),
    [
        ("POST", "/freeze", {"seconds": 3600}, "Pause for 60 min"),
        ("POST", "/freeze", {"seconds": 0}, "End of the pause"),
        ("POST", "/freeze", None, "Pause"),
        ("POST", "/resume", None, "Resume"),
        ("POST", "/rollback", {"to_epoch": 0}, "Roll back to epoch 0"),
        ("POST", "/rollback", {"plan_id": "back"}, "Roll back the last plan as plan back"),
        (
            "POST",
            "/rollback",
            {"to_placement": "00112233445566"},
            "Roll back to placement 001122334455",
        ),
        ("POST", "/plans", {"dry_run": True}, "Dry run of a plan"),
        ("POST", "/resize", {"to_ranks": 4}, "Take ranks out of the group: to_ranks=4"),
        ("PATCH", "/policy", None, "Change the policy"),
        (
            "POST",
            "/plans",
            {"approve": True, "policy": "eplb", "limits": {"max_moves": 3}, "plan_id": "mine"},
            "A plan that starts at once with the id mine: limits.max_moves=3, policy=eplb",
        ),
        ("POST", "/plans", {"target": "given"}, "A plan: target=given"),
        (
            "PATCH",
            "/policy",
            {"mode": "auto", "thresholds": {"plan_below": 0.85}, "limits": {"max_bytes": None}},
            "Change the policy: limits.max_bytes=null, mode=auto, thresholds.plan_below=0.85",
        ),
        ("DELETE", "/quarantine", None, "Reset the counts of reports that were not used"),
        ("DELETE", "", None, "Forget the deployment"),
        # What is not known, or was cut, is shown as it was sent.
        ("POST", "/new", '{"a":1}', 'POST /new {"a":1}'),
        ("PATCH", "/policy", '{"mode":"au', 'PATCH /policy {"mode":"au'),
        ("PUT", "/new", None, "PUT /new"),
        ("POST", "/freeze", '{"seconds":"x"}', 'POST /freeze {"seconds":"x"}'),
        ("POST", "/rollback", '{"to_placement":1}', 'POST /rollback {"to_placement":1}'),
        ("PATCH", "/policy", "[1]", "PATCH /policy [1]"),
    ],
)
def test_a_request_is_told_as_what_it_asked_for(method, path, change, words):
    assert asked(method, path, change) == words


@pytest.mark.fault("an operator with a plan `p` or `plan`", "the audit showed an empty action")
def test_a_plan_of_any_id_is_told_by_its_id():
    for plan in ("p", "pl", "plan", "plans", "approve", "cancel", "s", "plans.plans"):
        assert asked("POST", f"/plans/{plan}/approve") == f"Approve plan {plan}"
        assert asked("POST", f"/plans/{plan}/cancel") == f"Reject or cancel plan {plan}"
