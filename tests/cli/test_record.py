"""`evenkeel record`."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
import torch

from evenkeel_moe.formats import read_trace
from evenkeel_moe.formats.recording import RecordedLoad, write_recorded


@pytest.fixture
def server(tmp_path):
    """Serve SGLang's routes; the last one writes `dump` to the folder, as SGLang does."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append((self.path, self.headers["Authorization"]))
            if self.path.startswith("/dump") and found.dump is not None:
                torch.save(found.dump, tmp_path / "expert_distribution_recorder_1.pt")
            self.send_response(found.status)
            self.end_headers()

        def log_message(self, *_):
            pass

    found: Any = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    asked: list[Any] = []
    found.asked, found.status = asked, 200
    found.dump = {"rank": 0, "logical_count": torch.ones(4, 3, 6, dtype=torch.int32)}
    thread = threading.Thread(target=found.serve_forever)
    thread.start()
    yield found
    found.shutdown()
    thread.join(10)
    found.server_close()


@pytest.fixture
def sglang(server, tmp_path, command):
    def call(*more):
        url = f"http://127.0.0.1:{server.server_address[1]}"
        where = ("--url", url, "--dumps", str(tmp_path), "-o", str(tmp_path / "t.npz"))
        return command("record", "sglang", "-s", "0.1", *where, *more)

    return call


def test_sglangs_recorder_is_started_stopped_and_dumped(sglang, server, tmp_path):
    code, out, err = sglang("--api-key", "secret", "--first-moe-layer", "1")
    assert code == 0, err
    names = ("start", "stop", "dump")
    assert server.asked == [
        (f"/{name}_expert_distribution_record", "Bearer secret") for name in names
    ]
    assert "4 steps, 2 MoE layers, 6 experts. Next: evenkeel offline" in out
    assert "recording for 0.1 s" in err
    assert read_trace(tmp_path / "t.npz").layer_ids == (1, 2)


def test_a_dump_without_a_token_is_refused_at_once(sglang, server):
    server.dump["logical_count"].zero_()
    code, _, err = sglang()
    assert code == 2 and "none of the 4 steps routed a token" in err


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (401, 4, "needs a key: give --api-key"),
        (500, 1, "start_expert_distribution_record answered"),
    ],
)
def test_a_server_that_refuses_is_named(sglang, server, status, code, words):
    server.status = status
    found, _, err = sglang()
    assert found == code and words in err


def test_no_server_and_no_folder_are_refused(command, tmp_path):
    out = ("-o", str(tmp_path / "t.npz"))
    code, _, err = command("record", "sglang", "--url", "http://127.0.0.1:9", *out)
    assert code == 3 and "no SGLang server at http://127.0.0.1:9" in err
    code, _, err = command("record", "sglang", "--dumps", str(tmp_path / "absent"), *out)
    assert code == 2 and "there is no such folder" in err
    code, _, err = command("record", "vllm", str(tmp_path), "-o", str(tmp_path / "t.json"))
    assert code == 2 and "a trace is written as *.npz" in err
    code, _, err = command("record", "vllm", str(tmp_path), "-s", "0.1", *out)
    assert code == 2 and "holds no file of a recording" in err


def record(folder, first, steps=4):
    for rank in (0, 1):
        counts = np.full((steps, 2, 3), 1 + rank, np.int64)
        load = RecordedLoad(rank, 2, 2, np.arange(first, first + steps), counts)
        write_recorded(folder, "a1b2c3d4", load)


def test_what_vllms_ranks_record_from_now_on_becomes_a_trace(command, tmp_path):
    folder = tmp_path / "loads"
    folder.mkdir()
    record(folder, 0)
    later = threading.Timer(0.3, record, (folder, 4))
    later.start()
    out = str(tmp_path / "t.npz")
    code, said, err = command("record", "vllm", str(folder), "-s", "0.1", "-o", out)
    later.join()
    assert code == 0, err
    assert "4 steps, 2 MoE layers, 3 experts" in said
    assert (read_trace(tmp_path / "t.npz").counts == 3).all()
