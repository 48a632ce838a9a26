"""Which streams may stay open."""

from evenkeel_moe.adapters.grpc.stream_slots import StreamSlots, host_of


def test_a_host_is_a_peer_without_its_port():
    assert host_of("ipv4:10.0.0.1:5000") == "ipv4:10.0.0.1"
    assert host_of("ipv6:%5B::1%5D:5000") == "ipv6:%5B::1%5D"


def test_silent_streams_take_no_place_of_a_rank_and_the_oldest_of_the_busiest_host_gives_way():
    slots, ended = StreamSlots(2, 2, most_waiting=4), []

    def wait(stream, peer):
        return slots.wait(stream, peer, lambda: ended.append(stream))

    assert wait(1, "ipv4:10.0.0.9:1") is None
    assert [wait(stream, f"ipv4:10.0.0.1:{stream}") for stream in (2, 3, 4)] == [None] * 3
    assert wait(5, "ipv4:10.0.0.1:5") == 2
    assert wait(6, "ipv4:10.0.0.1:6") == 3 and ended == [2, 3]
    assert slots.take(1, "ipv4:10.0.0.9:1") == "" and len(slots) == 1


def test_the_places_of_ranks_are_limited_in_all_and_by_host():
    slots = StreamSlots(3, 2)
    assert slots.take(1, "ipv4:a:1") == slots.take(2, "ipv4:a:2") == ""
    assert slots.take(3, "ipv4:a:3") == "2 streams of ipv4:a are open, no more are taken"
    assert slots.take(4, "ipv4:b:1") == ""
    assert slots.take(5, "ipv4:c:1") == "3 streams are open, no more are taken"
    slots.free(1)
    slots.free(1)
    assert slots.take(6, "ipv4:a:4") == "" and len(slots) == 3
