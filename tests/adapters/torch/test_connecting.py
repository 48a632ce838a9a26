"""The connector alone: errors, the first exchanges, and aborts at any time."""

import threading

import pytest
import torch

from evenkeel_moe.adapters.threads import SYSTEM_THREADS
from evenkeel_moe.adapters.torch import connecting
from evenkeel_moe.adapters.torch.connecting import Connector
from evenkeel_moe.adapters.torch.groups import Communicator
from evenkeel_moe.adapters.torch.streams import OwnStream
from evenkeel_moe.errors import Reason, Unavailable
from tests.adapters.torch.test_transport import Backend, Operation
from tests.agent.ranks import CPU
from tests.waiting import deadline, wait_until


class Noting(Backend):
    """A backend that notes what it exchanges, and runs a thread to its end before it goes on."""

    def start(self, run, name):
        run()
        self.after_the_attempt()
        return None

    def after_the_attempt(self):
        """Nothing, unless the test sets it."""

    def allgather(self, gathered, sent):
        self.events.append(("gather", len(gathered[0]), sent[0].nbytes))
        return Operation(self, None)

    def send(self, tensors, peer, tag):
        return self._start(f"send {tensors[0].nbytes}", peer, tag)

    def recv(self, tensors, peer, tag):
        return self._start(f"recv {tensors[0].nbytes}", peer, tag)


def connector_over(backend, *, rank=0, size=2, threads=None):
    return Connector(
        lambda _serial: Communicator(backend, rank, size, CPU),
        CPU,
        OwnStream(CPU),
        backend if threads is None else threads,
    )


def test_the_first_exchanges_are_between_all_pairs_within_a_minute():
    backend = Noting(takes=iter([1.0, 58.0, 0.9995, 1.0, 0.0, 0.0]))
    fresh = connector_over(backend, rank=1, size=4).connect(5)
    assert fresh._backend is backend
    assert backend.events == [
        ("gather", 4, 4),
        ("recv 1", 0, 1),
        ("send 1", 2, 1),
        ("wait", 1, 60.0),
        ("wait", 1, 59.0),
        ("recv 1", 3, 2),
        ("send 1", 3, 2),
        ("wait", 2, 1.0),
        ("wait", 2, 0.001),
        ("recv 1", 2, 3),
        ("send 1", 0, 3),
        ("wait", 3, 0.001),
        ("wait", 3, 0.001),
    ]


@pytest.mark.parametrize("error", [RuntimeError("no route"), OSError("too many open files")])
def test_errors_of_a_backend_are_unavailable_and_others_are_raised_as_they_are(error):
    def connect(serial):
        raise error

    connector = Connector(connect, CPU, OwnStream(CPU), Noting())
    with pytest.raises(Unavailable if isinstance(error, RuntimeError) else OSError) as caught:
        connector.connect(3)
    if isinstance(caught.value, Unavailable):
        assert str(caught.value) == "transfer communicator 3: no route"
        assert caught.value.reason is Reason.TRANSFER_FAILED
    else:
        assert caught.value is error


def test_a_communicator_whose_first_exchanges_fail_is_aborted():
    backend = Noting(failing=(1,))
    with pytest.raises(Unavailable, match="no route to the peer"):
        connector_over(backend).connect(3)
    assert backend.events[-1] == ("abort",)


def test_exchanges_that_hang_on_a_device_fail(monkeypatch):
    monkeypatch.setattr(connecting, "wait_for_device", lambda device, until: until != 160.0)
    backend = Noting()
    with pytest.raises(Unavailable, match="the first exchanges took longer than 60 s"):
        connector_over(backend).connect(3)
    assert backend.events[-1] == ("abort",)


def test_an_abort_after_the_attempt_leaves_the_communicator_to_the_caller():
    backend = Noting()
    connector = connector_over(backend)
    backend.after_the_attempt = connector.abort  # type: ignore[method-assign]
    assert connector.connect(3)._backend is backend
    assert ("abort",) not in backend.events


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("doing", ["connecting", "exchanging"])
def test_an_abort_ends_the_first_exchanges_of_a_device_at_once(kind, doing):
    """Gloo's abort would wait for them. On a device nothing else ends them."""
    began, go_on = threading.Event(), threading.Event()

    class Silent(Noting):
        def allgather(self, gathered, sent):
            if doing == "exchanging":
                hold()
            raise RuntimeError("a peer went away")

    def hold():
        began.set()
        assert go_on.wait(deadline(20))

    def connect(serial):
        if doing == "connecting":
            hold()
        return Communicator(backend, 0, 2, CPU)

    backend, errors = Silent(), []
    connector = Connector(connect, CPU, OwnStream(CPU), SYSTEM_THREADS)

    def wait():
        try:
            connector.connect(1)
        except Unavailable as error:
            errors.append(str(error))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    assert began.wait(deadline(20))
    connector._device = torch.device(kind)
    connector.abort()
    at_once = list(backend.events)
    connector._device = CPU
    thread.join(deadline(20))
    assert errors == ["transfer communicator 1: connecting was aborted"]
    assert at_once == ([("abort",)] if (kind, doing) == ("cuda", "exchanging") else [])
    go_on.set()
    wait_until(lambda: backend.events == [("abort",)])
