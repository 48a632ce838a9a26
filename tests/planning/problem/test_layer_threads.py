"""Layers in several threads."""

import threading
import time

import pytest

from evenkeel_moe.planning.problem.layer_threads import map_layers
from tests.waiting import deadline


@pytest.mark.parametrize("threads", [1, 2, 3, 50])
def test_results_come_in_the_order_of_the_layers(threads):
    layers = [4, 0, 9, 2, 7, 1]
    assert map_layers(lambda layer: 10 * layer, layers, threads) == [10 * one for one in layers]


def test_layers_that_may_share_memory_are_never_worked_on_at_the_same_time():
    busy = [threading.Lock() for _ in range(3)]

    def work(layer):
        assert busy[layer % 3].acquire(blocking=False)
        time.sleep(0.002)
        busy[layer % 3].release()
        return threading.get_ident()

    found = map_layers(work, range(12), 3)
    assert [found[layer] for layer in range(3)] == [found[layer] for layer in range(3, 6)]


def test_several_layers_are_worked_on_at_the_same_time():
    together = threading.Barrier(3, timeout=deadline(10))
    assert len(map_layers(lambda _layer: together.wait(), range(3), 3)) == 3


@pytest.mark.parametrize("threads", [1, 2])
def test_the_error_of_a_layer_is_raised(threads):
    with pytest.raises(ZeroDivisionError):
        map_layers(lambda layer: 1 // (layer - 3), range(6), threads)
