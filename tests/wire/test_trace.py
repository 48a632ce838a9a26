"""Valid and invalid headers of the W3C Trace Context."""

import pytest

from evenkeel_moe.wire.trace import read_trace_id, trace_id_or_new

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


def test_the_trace_id_of_a_valid_header_is_used():
    assert read_trace_id(f"00-{TRACE}-{PARENT}-01") == TRACE
    assert read_trace_id(f" 00-{TRACE}-{PARENT}-00 ") == TRACE
    # A later version may say more.
    assert read_trace_id(f"01-{TRACE}-{PARENT}-01-what-comes") == TRACE
    assert trace_id_or_new(f"00-{TRACE}-{PARENT}-01") == TRACE


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        TRACE,
        f"00-{TRACE}-{PARENT}",
        f"00-{TRACE}-{PARENT}-01-more",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"00-{TRACE[:-1]}g-{PARENT}-01",
        f'00-{TRACE}-{PARENT}-01\n"injected": 1',
    ],
)
def test_an_invalid_header_gives_a_new_trace_id(header):
    assert read_trace_id(header) is None
    one, other = trace_id_or_new(header), trace_id_or_new(header)
    assert one != other
    assert read_trace_id(f"00-{one}-{PARENT}-01") == one
