"""The chart as the real helm renders it."""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.waiting import deadline

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "evenkeel"
HELM = Path(sys.executable).parent / "helm"
VALUES = {
    "default": None,
    **{p.stem.removesuffix("-values"): p for p in sorted((CHART / "ci").glob("*.yaml"))},
}
"""Name -> values file; None for the defaults."""
CUSTOM = {"ServiceMonitor", "PrometheusRule", "AlertmanagerConfig", "HTTPRoute"}
"""Kinds of the Prometheus operator and of the Gateway API: Kubernetes has no schema for them."""
every_values = pytest.mark.parametrize("name", sorted(VALUES))


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str


def helm(*words: object) -> Answer:
    done = subprocess.run(
        [HELM, *map(str, words)], capture_output=True, text=True, timeout=deadline(60), check=False
    )
    return Answer(done.returncode, done.stdout, done.stderr)


@cache
def rendered_text(name: str, *sets: str, chart: Path = CHART) -> str:
    values = VALUES[name]
    words = ["-f", values] if values is not None else []
    for one in sets:
        words += ["--set", one]
    answer = helm("template", "r", chart, "--namespace", "ek", *words)
    assert answer.code == 0, answer.err
    return answer.out


def rendered(name: str, *sets: str) -> list[dict[str, Any]]:
    """Every object of a rendering."""
    return [one for one in yaml.safe_load_all(rendered_text(name, *sets)) if one]


def rendered_with(
    values: dict[str, Any], release: str = "r", namespace: str = "ek"
) -> list[dict[str, Any]]:
    """Every object, as the API server reads it: a key once, and YAML's numbers for numbers."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump(values, file)
        file.flush()
        answer = helm("template", release, CHART, "--namespace", namespace, "-f", file.name)
    assert answer.code == 0, answer.err
    return [one for one in yaml.load_all(answer.out, _OnceLoader) if one]


class _OnceLoader(yaml.SafeLoader):
    """As helm's own reader takes it: no key twice, and 1e5 is a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep)
        assert len(mapping) == len(node.value), [key.value for key, _ in node.value]
        return mapping


_OnceLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[0-9]+[eE][0-9]+$"), list("0123456789")
)


def kind(name: str, wanted: str, *sets: str) -> list[dict[str, Any]]:
    return [one for one in rendered(name, *sets) if one["kind"] == wanted]


def only(name: str, wanted: str, *sets: str) -> dict[str, Any]:
    (one,) = kind(name, wanted, *sets)
    return one


def pod(name: str, *sets: str) -> dict[str, Any]:
    """Spec of the controllers' pods."""
    spec: dict[str, Any] = only(name, "StatefulSet", *sets)["spec"]["template"]["spec"]
    return spec


def container(name: str, *sets: str) -> dict[str, Any]:
    (one,) = pod(name, *sets)["containers"]
    assert isinstance(one, dict)
    return one


def refusal(*sets: str, name: str = "default") -> str:
    """Return helm's error message for values that it refuses."""
    values = VALUES[name]
    words = ["-f", str(values)] if values is not None else []
    words += [word for one in sets for word in ("--set", one)]
    answer = helm("template", "r", CHART, *words)
    assert answer.code != 0, answer.out
    return answer.err


def notes(folder: Path, name: str, *sets: str) -> str:
    """Return NOTES.txt as rendered with the values.

    `helm template` leaves it out, so a copy of the chart includes it in an object.
    """
    copy = folder / "evenkeel"
    if not copy.exists():
        shutil.copytree(CHART, copy)
        probe = 'text: |\n{{ include (print $.Template.BasePath "/NOTES.txt") . | indent 2 }}\n'
        (copy / "templates" / "notes-probe.yaml").write_text("kind: Notes\n" + probe)
    for one in yaml.safe_load_all(rendered_text(name, *sets, chart=copy)):
        if one and one["kind"] == "Notes":
            return str(one["text"])
    raise AssertionError("no notes")


def values_of(*path: str) -> Any:
    """A default of values.yaml."""
    value = yaml.safe_load((CHART / "values.yaml").read_text())
    for key in path:
        value = value[key]
    return value
