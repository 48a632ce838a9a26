import pytest

from evenkeel_moe.cli.console import work_bars


def test_interrupts_come_out_of_compiled_code_as_interrupts():
    inner = SystemError("unpickle returned a result with an exception set")
    inner.__cause__ = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt), work_bars():
        raise SystemError("CPUDispatcher returned a result with an exception set") from inner
    with pytest.raises(SystemError, match="of its own"), work_bars():
        raise SystemError("of its own")
