"""Labels, selectors and names of the chart's objects."""

import copy
import re

import kubernetes_validate
import pytest

from tests.deploy.chart import (
    CUSTOM,
    every_values,
    only,
    rendered,
    rendered_with,
)

pytestmark = pytest.mark.deploy


@every_values
def test_every_object_has_the_common_labels(name):
    for one in rendered(name):
        labels = one["metadata"]["labels"]
        for label in ("name", "instance", "version", "managed-by"):
            assert labels[f"app.kubernetes.io/{label}"], (one["kind"], label)
        assert labels["helm.sh/chart"] == "evenkeel-0.1.0"


@every_values
def test_selectors_hold_name_and_instance_only_and_find_their_pods(name):
    names = {"app.kubernetes.io/name", "app.kubernetes.io/instance"}
    for one in rendered(name):
        if one["kind"] in ("StatefulSet", "Deployment"):
            selector = one["spec"]["selector"]["matchLabels"]
            assert selector.items() <= one["spec"]["template"]["metadata"]["labels"].items()
        elif one["kind"] == "Service":
            selector = one["spec"]["selector"]
        elif one["kind"] in ("PodDisruptionBudget", "ServiceMonitor"):
            selector = one["spec"]["selector"]["matchLabels"]
        elif one["kind"] == "NetworkPolicy":
            selector = one["spec"]["podSelector"]["matchLabels"]
        else:
            continue
        assert set(selector) == names, one["kind"]


def test_controllers_do_not_select_other_pods_of_the_release():
    ours = only("all-on", "StatefulSet")["spec"]["selector"]["matchLabels"]
    others = [
        only("all-on", "Deployment")["spec"]["template"]["metadata"],
        only("all-on", "Pod")["metadata"],
    ]
    for other in others:
        assert not ours.items() <= other["labels"].items()


def test_own_labels_reach_every_object():
    assert all(one["metadata"]["labels"]["team"] == "serving" for one in rendered("all-on"))


EVERYTHING = {
    "devValkey": {"enabled": True},
    "networkPolicy": {"enabled": True},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus", "team": "metrics"}},
    "prometheusRule": {"enabled": True, "labels": {"release": "prometheus", "team": "metrics"}},
    "dashboards": {"enabled": True, "label": "team", "labelValue": "drawn"},
}


def labels_of(objects):
    """Every map of labels, and every selector of a workload or service."""
    for one in objects:
        yield one["metadata"]["labels"]
        spec = one.get("spec", {})
        yield from (spec[key] for key in ("selector",) if one["kind"] == "Service")
        if "template" in spec:
            yield spec["selector"]["matchLabels"]
            yield spec["template"]["metadata"]["labels"]


def test_names_that_look_like_numbers_stay_names():
    values = {
        **EVERYTHING,
        "nameOverride": "1e5",
        "commonLabels": {"team": 7},
        "podLabels": {"shard": 8, "canary": True},
        "priorityClassName": "1000",
        "serviceAccount": {"create": False, "name": "77"},
        "imagePullSecrets": [{"name": "12"}],
        "api": {"tokens": {"existingSecret": "123", "key": "1"}},
        "grpc": {"tls": {"existingSecret": "124", "certKey": "2", "keyKey": "3"}},
        "redis": {"tls": {"existingSecret": "1e3"}, "sentinel": {"tls": {"existingSecret": "126"}}},
        "persistence": {"enabled": True, "existingClaim": "31", "storageClass": "32"},
    }
    objects = rendered_with(values, release="123", namespace="456")
    for labels in labels_of(objects):
        assert all(isinstance(value, str) for value in labels.values()), labels
    for one in objects:
        assert one["metadata"]["namespace"] == "456"
        if one["kind"] not in CUSTOM:
            kubernetes_validate.validate(copy.deepcopy(one), "1.37", strict=True)
    external = {"existingSecret": "1e5", "usernameKey": "4", "passwordKey": "5", "urlKey": "6"}
    more = {"redis": external, "persistence": {"enabled": True, "storageClass": "32"}}
    for one in rendered_with(more, release="123", namespace="456"):
        kubernetes_validate.validate(copy.deepcopy(one), "1.37", strict=True)


def test_a_label_given_twice_is_written_once_and_selectors_are_not_the_users():
    wanted = {
        "team": "serving",
        "app.kubernetes.io/managed-by": "argocd",
        "app.kubernetes.io/name": "mine",
    }
    values = {
        **EVERYTHING,
        "commonLabels": wanted,
        "podLabels": {"team": "night", "app.kubernetes.io/instance": "x"},
    }
    objects = rendered_with(values)
    by_kind = {one["kind"]: one for one in objects}
    assert by_kind["ServiceMonitor"]["metadata"]["labels"]["team"] == "metrics"
    assert by_kind["PrometheusRule"]["metadata"]["labels"]["release"] == "prometheus"
    assert by_kind["ConfigMap"]["metadata"]["labels"]["team"] == "drawn"
    state = by_kind["StatefulSet"]
    assert state["metadata"]["labels"]["team"] == "serving"
    assert state["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "argocd"
    pods = state["spec"]["template"]["metadata"]["labels"]
    assert pods["team"] == "night"
    assert state["spec"]["selector"]["matchLabels"].items() <= pods.items()
    assert pods["app.kubernetes.io/instance"] == "r"


def test_names_of_any_length_give_labels_that_fit():
    for override in ("a" * 63, "a" * 70, "a" * 55 + "-" + "b" * 7):
        values = {**EVERYTHING, "nameOverride": override}
        for labels in labels_of(rendered_with(values)):
            for value in labels.values():
                assert re.fullmatch(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?", value), (
                    value
                )
