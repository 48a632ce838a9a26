"""The chart as the real helm renders it."""

import copy
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

import kubernetes_validate
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


def given(name: str, *sets: str) -> list[object]:
    """Return helm's words for a file of values and changes of it."""
    values = VALUES[name]
    file = ["-f", values] if values is not None else []
    return [*file, *(word for one in sets for word in ("--set", one))]


@cache
def rendered_text(name: str, *sets: str, chart: Path = CHART) -> str:
    answer = helm("template", "r", chart, "--namespace", "ek", *given(name, *sets))
    assert answer.code == 0, answer.err
    return answer.out


def rendered_by(
    *words: object, release: str = "r", loader: type[yaml.CSafeLoader] = yaml.CSafeLoader
) -> list[dict[str, Any]]:
    """Every object that `helm template` renders with these words."""
    answer = helm("template", release, CHART, *words)
    assert answer.code == 0, answer.err
    return [one for one in yaml.load_all(answer.out, loader) if one]


def rendered(name: str, *sets: str) -> list[dict[str, Any]]:
    """Every object of a rendering."""
    return [one for one in yaml.load_all(rendered_text(name, *sets), yaml.CSafeLoader) if one]


def rendered_with(
    values: dict[str, Any], release: str = "r", namespace: str = "ek"
) -> list[dict[str, Any]]:
    """Every object, as the API server reads it: a key once, and YAML's numbers for numbers."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump(values, file)
        file.flush()
        words = ("--namespace", namespace, "-f", file.name)
        return rendered_by(*words, release=release, loader=_OnceLoader)


class _OnceLoader(yaml.CSafeLoader):
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


def environment(name: str, *sets: str) -> dict[str, Any]:
    """The controllers' variables by name, None for those with a source."""
    return {one["name"]: one.get("value") for one in container(name, *sets)["env"]}


def settings_file(folder: Path, objects: list[dict[str, Any]]) -> Path:
    """Write the controllers' settings of a rendering to a file, and return it."""
    (data,) = (one["data"] for one in objects if "settings.yaml" in one.get("data", {}))
    file = folder / "settings.yaml"
    file.write_text(data["settings.yaml"])
    return file


def check_object(one: dict[str, Any], version: str = "1.37") -> None:
    """Check an object as the API server of a version of Kubernetes does."""
    kubernetes_validate.validate(copy.deepcopy(one), version, strict=True)


def check_pod(template: dict[str, Any]) -> None:
    """Check a template of a pod."""
    named = {"metadata": {**template["metadata"], "name": "x"}}
    check_object({"apiVersion": "v1", "kind": "Pod", **template, **named})


def refusal(*sets: str, name: str = "default") -> str:
    """Return helm's error message for values that it refuses."""
    answer = helm("template", "r", CHART, *given(name, *sets))
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
