"""`evenkeel record`."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
import torch

from evenkeel_moe.formats import read_trace
from evenkeel_moe.formats.recording import RecordedLoad, write_recorded
from tests.waiting import deadline

STARTED = {"expert_distribution_recorder_mode": "stat", "enable_eplb": False, "pp_size": 1}
"""What a server that can be recorded says of its start, among much more."""


@pytest.fixture
def server(tmp_path):
    """Serve SGLang's routes; the last one writes the `dumps` to the folder, as SGLang does."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append((self.path, self.headers["Authorization"]))
            there = self.path == f"/{found.info_route}"
            self.send_response(found.status if there else 404)
            self.end_headers()
            self.wfile.write(found.info.encode() if there else b"{}")

        def do_POST(self):
            asked.append((self.path, self.headers["Authorization"]))
            if self.path.startswith("/dump"):
                for number, dump in enumerate(found.dumps):
                    path = tmp_path / f"{found.name}_{number}.pt"
                    torch.save(dump, path)
                    if found.rests_s:
                        content = path.read_bytes()
                        path.write_bytes(content[:100])
                        whole = (content,)
                        found.rest = threading.Timer(found.rests_s, path.write_bytes, whole)
                        found.rest.start()
            self.send_response(found.status)
            self.end_headers()

        def log_message(self, *_):
            pass

    found: Any = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    asked: list[Any] = []
    found.asked, found.status = asked, 200
    found.name, found.rests_s = "expert_distribution_recorder", 0.0
    found.info, found.info_route = json.dumps({**STARTED, "ep_size": 4}), "server_info"
    found.dumps = [{"rank": 0, "logical_count": torch.ones(4, 3, 6, dtype=torch.int32)}]
    thread = threading.Thread(target=found.serve_forever, args=(0.01,))
    thread.start()
    yield found
    found.shutdown()
    thread.join(10)
    found.server_close()


@pytest.fixture
def sglang(server, tmp_path, command):
    def call(*more):
        url = f"http://127.0.0.1:{server.server_address[1]}"
        where = ("--address", url, "--dumps", str(tmp_path), "--out", str(tmp_path / "t.npz"))
        return command("record", "sglang", "-s", "0.1", *where, *more)

    return call


def test_sglangs_recorder_is_started_stopped_and_dumped(sglang, server, tmp_path):
    code, out, err = sglang("--api-key", "secret", "--first-moe-layer", "1")
    assert code == 0, err
    assert server.asked == [
        ("/server_info", "Bearer secret"),
        ("/start_expert_distribution_record", "Bearer secret"),
        ("/stop_expert_distribution_record", "Bearer secret"),
        ("/dump_expert_distribution_record", "Bearer secret"),
    ]
    assert "4 steps, 2 MoE layers, 6 experts. Next: evenkeel offline" in out
    assert "recording for 0.1 s" in err
    assert read_trace(tmp_path / "t.npz").layer_ids == (1, 2)


@pytest.mark.fault(
    "an operator who recorded an SGLang server", "a finding that was accepted refused the dump"
)
def test_a_finding_that_is_accepted_does_not_refuse_the_dump(sglang, server):
    server.dumps[0]["logical_count"][:, 1:] = 0
    code, _, err = sglang()
    assert code == 2 and "--accept mostly_idle_layers" in " ".join(err.split())
    server.name = "again"
    code, _, err = sglang("--accept", "mostly_idle_layers")
    assert code == 0, err


@pytest.mark.fault(
    "an operator who recorded an SGLang server", "a dump that was written slowly was refused"
)
def test_a_dump_whose_writing_rests_is_waited_for(sglang, server):
    server.rests_s = 2.0
    code, _, err = sglang()
    server.rest.join(10)
    assert code == 0, err


def test_a_dump_without_a_token_is_refused_at_once(sglang, server):
    server.dumps[0]["logical_count"].zero_()
    code, _, err = sglang()
    assert code == 2 and "none of the 4 steps routed a token" in err


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [(401, 4, "needs a key: give --api-key"), (500, 1, "/server_info answered 500")],
)
def test_a_server_that_refuses_is_named(sglang, server, status, code, words):
    server.status = status
    found, _, err = sglang()
    assert found == code and words in err


unprepared = pytest.mark.fault(
    "an operator who recorded an SGLang server that was not started for it",
    "the first request ended the server or stopped its balancer",
)


@unprepared
@pytest.mark.parametrize(
    ("started", "words"),
    [
        (
            {"expert_distribution_recorder_mode": None},
            "can end it: start it with --expert-distribution-recorder-mode stat",
        ),
        (
            {"expert_distribution_recorder_mode": "per_pass"},
            "its recorder has the mode 'per_pass', which writes a dump for each rank: start it",
        ),
        ({"enable_eplb": True}, "and would stop with it: start it without --enable-eplb"),
        (
            {"enable_expert_distribution_metrics": True},
            "start it without --enable-expert-distribution-metrics",
        ),
        (
            {"expert_balancedness_report_mode": "prometheus"},
            "start it without --expert-balancedness-report-mode",
        ),
        ({"pp_size": 2}, "it has 2 pipeline stages, each with a buffer of its own"),
        (
            {"expert_distribution_recorder_mode": None, "pp_size": 4},
            "--expert-distribution-recorder-mode stat; it has 4 pipeline stages",
        ),
    ],
)
def test_a_server_that_was_not_started_for_it_is_only_asked_how_it_was(
    sglang, server, started, words
):
    server.info = json.dumps({**STARTED, **started})
    code, _, err = sglang()
    assert code == 1 and words in " ".join(err.split())
    assert [path for path, _ in server.asked] == ["/server_info"]


@unprepared
@pytest.mark.parametrize(
    ("info", "words"),
    [
        ({}, "it does not say expert_distribution_recorder_mode, enable_eplb, pp_size"),
        ({"pp_size": ...}, "it does not say pp_size"),
        ({"enable_eplb": "no"}, "it does not say enable_eplb"),
        ({"pp_size": 0}, "it does not say pp_size"),
        ("a page", "it does not say"),
        ([1], "it does not say"),
        (None, "it does not say"),
    ],
)
def test_a_server_that_does_not_say_how_it_was_started_is_not_asked_to_record(
    sglang, server, info, words
):
    if isinstance(info, dict) and info:
        info = {key: value for key, value in {**STARTED, **info}.items() if value is not ...}
    server.info = info if isinstance(info, str) else json.dumps(info)
    code, _, err = sglang()
    said = " ".join(err.split())
    assert code == 1 and words in said and "--address must be the address of SGLang itself" in said
    assert {path for path, _ in server.asked} <= {"/server_info", "/get_server_info"}


@unprepared
def test_an_older_server_says_it_under_the_older_route_and_one_without_any_is_refused(
    sglang, server
):
    server.info_route = "get_server_info"
    code, _, err = sglang()
    assert code == 0, err
    server.info_route = "absent"
    server.asked.clear()
    code, _, err = sglang()
    assert code == 1 and "it does not say" in err
    assert [path for path, _ in server.asked] == ["/server_info", "/get_server_info"]


@unprepared
def test_two_dumps_at_once_are_not_read_as_one(sglang, server, tmp_path):
    server.dumps *= 2
    code, _, err = sglang()
    said = " ".join(err.split())
    assert code == 1 and "2 new dumps" in said and "expert_distribution_recorder_0.pt" in said
    assert not (tmp_path / "t.npz").exists()


def test_no_server_and_no_folder_are_refused(command, tmp_path):
    out = ("--out", str(tmp_path / "t.npz"))
    code, _, err = command("record", "sglang", "--address", "http://127.0.0.1:9", *out)
    assert code == 3 and "no SGLang server at http://127.0.0.1:9" in err
    code, _, err = command("record", "sglang", "--address", "http://[::1", *out)
    assert code == 2 and "http://[::1 is not a valid URL" in err
    code, _, err = command("record", "sglang", "--dumps", str(tmp_path / "absent"), *out)
    assert code == 2 and "there is no such folder" in err
    code, _, err = command("record", "vllm", str(tmp_path), "--out", str(tmp_path / "t.json"))
    assert code == 2 and "a trace is written as *.npz" in err
    code, _, err = command("record", "vllm", str(tmp_path), "-s", "0.1", *out)
    assert code == 2 and "holds no file of a recording" in err


def record(folder, first, start="a1b2c3d4", began=1.0, steps=4):
    for rank in (0, 1):
        counts = np.full((steps, 2, 3), 1 + rank, np.int64)
        load = RecordedLoad(rank, 2, 2, np.arange(first, first + steps), counts, began)
        write_recorded(folder, start, load)


@pytest.mark.fault(
    "an operator whose vLLM server was started again while it was recorded",
    "the steps of the new start were compared with those of the old one, and none was left",
)
@pytest.mark.parametrize("again", [(4,), (0, "0000000b", 2.0)])
def test_what_vllms_ranks_record_from_now_on_becomes_a_trace(command, tmp_path, again):
    folder = tmp_path / "loads"
    folder.mkdir()
    record(folder, 0)
    # After the command has looked at the folder.
    later = threading.Timer(min(deadline(0.5), 10.0), record, (folder, *again))
    later.start()
    out = str(tmp_path / "t.npz")
    code, said, err = command("record", "vllm", str(folder), "-s", "0.1", "--out", out)
    later.join()
    assert code == 0, err
    assert "4 steps, 2 MoE layers, 3 experts" in said
    assert (read_trace(tmp_path / "t.npz").counts == 3).all()
