"""docs/openapi.json is the served document. `python -m tests.api.test_document` writes it."""

import json
import re
from pathlib import Path

from deploy.json_text import json_text
from evenkeel_moe.api import create_app
from evenkeel_moe.api.auth import OPEN_PATHS, needed_role
from evenkeel_moe.controller.policy_document import policy_document
from evenkeel_moe.model.policy import DeploymentPolicy
from tests.api.conftest import TOKENS
from tests.api.fakes import make_operations

FILE = Path(__file__).parents[2] / "docs" / "openapi.json"
PAGE = FILE.with_name("api.md")
ENGINES = FILE.with_name("engines.md")


def document() -> str:
    return json_text(create_app(make_operations(), TOKENS).openapi())


def test_the_checked_in_document_is_the_served_one():
    assert FILE.read_text(encoding="utf-8") == document()


def test_every_route_documents_its_refusals_and_its_token():
    whole = json.loads(document())
    for path, item in whole["paths"].items():
        for method, operation in item.items():
            if not path.startswith("/v1/"):
                continue
            assert {"401", "404", "422"} <= operation["responses"].keys(), (method, path)
            assert operation["security"], (method, path)
            assert operation.get("description"), (method, path)
            name = operation["responses"]["401"]["$ref"].removeprefix("#/components/responses/")
            problem = whole["components"]["responses"][name]["content"]
            assert list(problem) == ["application/problem+json"]


def test_a_change_of_the_policy_has_no_defaults_that_a_generated_client_could_send():
    schemas = json.loads(document())["components"]["schemas"]
    for name in ("PolicyDocument", "LimitsIn", "ScheduleIn"):
        assert not any("default" in one for one in schemas[name]["properties"].values()), name


def test_the_page_lists_every_route_with_its_least_role():
    listed = set(
        re.findall(r"^\| ([A-Z]+) \| `(/\S+)` \| (\w+) \|$", PAGE.read_text(), re.MULTILINE)
    )
    assert listed == {
        (
            method.upper(),
            path,
            "none" if path in OPEN_PATHS else needed_role(method.upper(), path).value,
        )
        for path, item in json.loads(document())["paths"].items()
        for method in item
    }


def test_the_page_names_the_policys_fields_there_are():
    text = PAGE.read_text()
    fields = text.split("| Field | Meaning |")[1].split("\n\n")[0]
    names = re.findall(r"`(\w+)`", "".join(line.split("|")[1] for line in fields.splitlines()[2:]))
    assert set(names) == set(policy_document(DeploymentPolicy()))


def test_the_page_has_a_counterpart_for_each_field_of_eplb_config():
    """Source: vllm/config/parallel.py, EPLBConfig, 0.33.0."""
    rows = ENGINES.read_text().split("| vLLM | Default there | Here |")[1].split("\n\n")[0]
    assert re.findall(r"^\| `(\w+)`", rows, re.MULTILINE) == [
        "window_size",
        "step_interval",
        "num_redundant_experts",
        "log_balancedness",
        "log_balancedness_interval",
        "use_async",
        "policy",
        "communicator",
        "enable_migration_batching",
    ]


if __name__ == "__main__":
    FILE.write_text(document(), encoding="utf-8")
