"""docs/openapi.json is what the service serves. `python -m tests.api.test_document` writes it anew."""

import json
from pathlib import Path

from evenkeel.api import create_app
from tests.api.conftest import TOKENS
from tests.api.fakes import make_operations

FILE = Path(__file__).parents[2] / "docs" / "openapi.json"


def document() -> str:
    return json.dumps(create_app(make_operations(), TOKENS).openapi(), indent=1, sort_keys=True) + "\n"


def test_the_checked_in_document_is_the_served_one():
    assert FILE.read_text(encoding="utf-8") == document()


def test_every_route_documents_its_refusals_and_its_token():
    for path, item in json.loads(document())["paths"].items():
        for method, operation in item.items():
            if not path.startswith("/v1/"):
                continue
            assert {"401", "404", "422"} <= operation["responses"].keys(), (method, path)
            assert operation["security"], (method, path)
            assert operation.get("description"), (method, path)
            problem = operation["responses"]["401"]["content"]
            assert list(problem) == ["application/problem+json"]


if __name__ == "__main__":
    FILE.write_text(document(), encoding="utf-8")
