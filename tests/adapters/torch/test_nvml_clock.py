"""Readings of NVML, and a machine without it."""

import pytest

from evenkeel_moe.adapters.torch.nvml_clock import NvmlClock, clock_of
from evenkeel_moe.wire.link import DeviceClock


@pytest.mark.parametrize(
    ("present", "highest", "reasons", "wanted"),
    [
        (1980, 1980, 0, DeviceClock(1.0)),
        (1485, 1980, 0x04, DeviceClock(0.75, "power")),
        (990, 1980, 0x20 | 0x08, DeviceClock(0.5, "heat, hardware")),
        (990, 1980, 0x80 | 0x40, DeviceClock(0.5, "power, heat")),
        (1980, 300, 0x02, DeviceClock(2.0)),
        (345, 1980, 0x01, None),
        (0, 1980, 0, None),
        (1980, 0, 0, None),
    ],
)
def test_a_reading_tells_the_clock_and_its_limit_unless_the_device_is_idle(
    present, highest, reasons, wanted
):
    assert clock_of(present, highest, reasons) == wanted


def test_without_a_driver_the_clock_is_unknown_and_the_log_says_so_once(caplog, capsys):
    clock = NvmlClock("00000000-0000-0000-0000-000000000000")
    assert [clock.read(), clock.read()] == [None, None]
    assert (capsys.readouterr().out + caplog.text).count("clock_unknown") == 1
