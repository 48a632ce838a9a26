"""The memory that this process may take."""

import os

from evenkeel_moe.adapters.memory_limit import memory_limit_bytes

MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_the_limit_of_the_container_counts(tmp_path):
    limit = tmp_path / "memory.max"
    limit.write_text("2147483648\n")
    assert memory_limit_bytes((tmp_path / "missing", limit)) == min(1 << 31, MACHINE)


def test_without_a_limit_the_memory_of_the_machine_counts(tmp_path):
    unlimited = tmp_path / "memory.max"
    unlimited.write_text("max\n")
    assert memory_limit_bytes((unlimited, tmp_path / "missing")) == MACHINE
    unlimited.write_text(f"{1 << 63}\n")
    assert memory_limit_bytes((unlimited,)) == MACHINE
