"""Devices are found by the names that drivers give them, and nothing is guessed."""

import pytest

from evenkeel_moe.errors import InvalidInput
from evenkeel_moe.model.devices import BYTES_PER_WEIGHT, DEVICES, find_device


@pytest.mark.parametrize(
    ("told", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA H800", "H800"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA H20-3e", "H20-3e"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "GB200"),
        ("AMD Instinct MI300X", "MI300X"),
        ("AMD Instinct MI355X OAM", "MI355X"),
        ("h100", "H100"),
    ],
)
def test_a_device_is_found_by_its_drivers_name(told, name):
    assert find_device(told).name == name


@pytest.mark.parametrize(
    "told", ["NVIDIA H2000", "NVIDIA L4", "Ascend910B2", "AMD Radeon Graphics"]
)
def test_an_unknown_device_is_no_other_device(told):
    with pytest.raises(InvalidInput, match="not in the table"):
        find_device(told)


def test_no_name_and_a_slice_of_a_device_are_refused():
    with pytest.raises(InvalidInput, match="the ranks name no device"):
        find_device("")
    with pytest.raises(InvalidInput, match="slice"):
        find_device("NVIDIA H100 80GB HBM3 MIG 1g.10gb")


def test_every_row_is_found_by_its_own_name_and_has_known_number_types():
    for device in DEVICES:
        assert find_device(device.name) is device
        assert set(device.flops) <= set(BYTES_PER_WEIGHT)
        assert 1e12 < device.bytes_per_s < 1e13
        assert device.flops["bf16"] > 1e14
