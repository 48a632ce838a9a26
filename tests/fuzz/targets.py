"""The parsers: for each a few right inputs, and a call that may raise only what it promises."""

import io
import json
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import zstandard
from google.protobuf.message import DecodeError
from pydantic import ValidationError
from safetensors.numpy import save

from evenkeel_moe.adapters.redis import encoding
from evenkeel_moe.adapters.redis.encoding import Unreadable
from evenkeel_moe.api.schemas import FreezeIn, PlanIn, RollbackIn
from evenkeel_moe.errors import EvenkeelError, InvalidInput, PeerViolation, Reason
from evenkeel_moe.formats import parse_placement, read_trace, render_placement, write_trace
from evenkeel_moe.model.ids import EpRank
from evenkeel_moe.model.load import CountingSide, LoadReport, Phase, StepMeta, step_table
from evenkeel_moe.model.plan import PlanPhase, PlanRecord
from evenkeel_moe.protocol import messages as m
from evenkeel_moe.settings_sources import load_settings
from evenkeel_moe.v1 import agent_pb2
from evenkeel_moe.wire import link
from evenkeel_moe.wire.from_rank import decode_rank_message, encode_rank_message
from evenkeel_moe.wire.to_rank import decode_controller_message, encode_controller_message
from evenkeel_moe.wire.trace import trace_id_or_new
from tests.contracts.test_stores import make_window
from tests.formats.samples import make_trace, two_layers
from tests.formats.test_engine_records import stats
from tests.formats.test_placements import BY_LAYER
from tests.protocol.machines import BASE, LEADER, key_of, plan_of, prepare_of, state_of
from tests.wire.strategies import IDENTITY, SHAPE
from tests.wire.wires import HELLO

Parse = Callable[[bytes], object]


@dataclass(frozen=True)
class Target:
    """One parser."""

    name: str
    parse: Parse
    refusals: tuple[type[Exception], ...]
    """What it raises for input that is wrong."""
    seeds: tuple[bytes, ...]


def _report() -> LoadReport:
    steps = step_table(StepMeta(step, HELLO.epoch, Phase.DECODE, 4) for step in range(2))
    counts = np.ones((2, SHAPE.num_layers, SHAPE.slots_per_rank), np.int64)
    deployment, generation = IDENTITY.deployment, IDENTITY.generation
    side = CountingSide.DESTINATION
    return LoadReport(deployment, generation, EpRank(1), 1, side, steps, counts)


def _wire(messages: Iterable[object], encode: Callable[..., object]) -> tuple[bytes, ...]:
    return tuple(encode(message).SerializeToString() for message in messages)  # type: ignore[attr-defined]


def _from_rank(data: bytes) -> object:
    return decode_rank_message(agent_pb2.RankMessage.FromString(data), HELLO)


def _hello(data: bytes) -> object:
    return decode_rank_message(agent_pb2.RankMessage.FromString(data), None)


def _to_rank(data: bytes) -> object:
    return decode_controller_message(agent_pb2.ControllerMessage.FromString(data))


def _trace_file(suffix: str) -> Parse:
    def parse(data: bytes) -> object:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"trace{suffix}"
            path.write_bytes(data)
            return read_trace(path)

    return parse


_RECORD = PlanRecord(
    plan_of(2), PlanPhase.PROPOSED, Reason.PLAN_PROPOSED, 0, 1.0, story=({"event": "created"},)
)
_SMALL, _MAPS = encoding.pack_plan_record(_RECORD), encoding.pack_plan_maps(_RECORD.plan)


def _stored_plan(data: bytes) -> object:
    """Read a stored plan with these bytes in place of each of its parts."""
    whole = (_SMALL, _MAPS, encoding.pack_story_row({"event": "created"}))
    for parts in ((data, *whole[1:]), (whole[0], data, whole[2]), (*whole[:2], data)):
        try:
            found = encoding.unpack_plan_record(*parts)
        except Unreadable as error:
            fault = error
        else:
            return found
    raise fault


def _stored_plan_text(data: bytes) -> object:
    """Read a stored plan whose compression is right: otherwise few inputs reach the reader."""
    return _stored_plan(zstandard.ZstdCompressor().compress(data))


def _placement(data: bytes) -> object:
    return parse_placement(data.decode("utf-8", "replace"), num_ranks=2, num_logical_experts=3)


def _settings_file(suffix: str) -> Parse:
    def parse(data: bytes) -> object:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"settings{suffix}"
            path.write_bytes(data)
            return load_settings(path)

    return parse


def _npz() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.npz"
        write_trace(path, make_trace())
        return path.read_bytes()


def _dump() -> bytes:
    file = io.BytesIO()
    torch.save({"logical_count": torch.ones(3, 2, 4, dtype=torch.int32)}, file)
    return file.getvalue()


def _rank_statistics(data: bytes) -> object:
    with tempfile.TemporaryDirectory() as folder:
        meta = {"num_experts": 4, "num_experts_per_token": 2}
        (Path(folder) / "meta_info.json").write_text(json.dumps(meta))
        (Path(folder) / "rank0.safetensors").write_bytes(data)
        return read_trace(folder)


def _load_statistics() -> bytes:
    records = (
        {"record_type": "session_metadata", "host": "a"},
        stats(9, [[1, 2, 3, 4]], [[2, 1, 0, 2]]),
        stats(7, [[10, 1, 5, 2]], [[0, 1, 2, 0]]),
    )
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def _traceparent(data: bytes) -> object:
    return trace_id_or_new(data.decode("latin-1"))


def _targets() -> tuple[Target, ...]:
    state = state_of(identity=IDENTITY)
    wire_errors = (PeerViolation, DecodeError)
    rows = [[0, 1, 2, 0], [2, 1, 0, 2]]
    ours = {"target": {"physical_to_logical": rows}, "plan_id": "p", "approve": True}
    return (
        Target("hello", _hello, wire_errors, _wire([HELLO], encode_rank_message)),
        Target(
            "rank_message",
            _from_rank,
            wire_errors,
            _wire(
                [
                    link.Heartbeat(7, 1, 2, "trouble"),
                    link.KvCache(16, 64_000),
                    link.CostCurve(64, (1e-5, 2e-5), 1e-7),
                    m.Vote(key_of(), False, Reason.BUSY, "busy"),
                    m.Ack(key_of(), HELLO.epoch, BASE.digest, 0.1),
                    state,
                    _report(),
                ],
                encode_rank_message,
            ),
        ),
        Target(
            "controller_message",
            _to_rank,
            wire_errors,
            _wire(
                [prepare_of(), m.Commit(LEADER, key_of()), m.QueryState(LEADER, query=3)],
                encode_controller_message,
            ),
        ),
        Target(
            "stored_plan",
            _stored_plan,
            (Unreadable,),
            (_SMALL, _MAPS),
        ),
        Target(
            "stored_plan_text",
            _stored_plan_text,
            (Unreadable,),
            tuple(map(zstandard.ZstdDecompressor().decompress, (_SMALL, _MAPS))),
        ),
        Target(
            "stored_placement",
            encoding.unpack_placement,
            (Unreadable,),
            (encoding.pack_placement(BASE),),
        ),
        Target(
            "stored_window",
            lambda data: encoding.unpack_window(data, (2, 3, 2), 3),
            (Unreadable,),
            (encoding.pack_window(make_window(range(3))),),
        ),
        Target(
            "stored_source",
            lambda data: encoding.unpack_source(data, (2, 2, 4)),
            (Unreadable,),
            (encoding.pack_source(np.ones((2, 2, 4), np.uint32)),),
        ),
        Target(
            "stored_json",
            encoding.unpack_object,
            (Unreadable,),
            (b'{"held": false}', b'{"a": [1]}'),
        ),
        Target(
            "rest_plan",
            PlanIn.model_validate_json,
            (ValidationError,),
            (json.dumps(ours).encode(),),
        ),
        Target(
            "rest_rollback",
            RollbackIn.model_validate_json,
            (ValidationError,),
            (b'{"to_epoch": 2}',),
        ),
        Target(
            "rest_freeze", FreezeIn.model_validate_json, (ValidationError,), (b'{"seconds": 3}',)
        ),
        Target("traceparent", _traceparent, (), (b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01",)),
        Target(
            "placement_file",
            _placement,
            (EvenkeelError,),
            (
                *(render_placement(two_layers(), format_).encode() for format_ in BY_LAYER),
                b"num_slots: 4\ninitial_global_assignments:\n  3: &a [0, 1, 2, 0]\n  4: *a\n",
            ),
        ),
        Target(
            "settings_yaml",
            _settings_file(".yaml"),
            (InvalidInput,),
            (b"grpc: &a {host: 127.0.0.2, port: 7001}\nrest: {<<: *a, port: 7002}\n",),
        ),
        Target(
            "settings_toml",
            _settings_file(".toml"),
            (InvalidInput,),
            (b'grpc.host = "127.0.0.2"\n[planner.thresholds]\ncooldown_s = 0x10\n',),
        ),
        Target("trace_npz", _trace_file(".npz"), (InvalidInput,), (_npz(),)),
        Target("trace_pt", _trace_file(".pt"), (InvalidInput,), (_dump(),)),
        Target(
            "trace_safetensors",
            _rank_statistics,
            (InvalidInput,),
            (save({"1_3": np.ones(4, np.int32), "2_3": np.ones(4, np.int32)}),),
        ),
        Target(
            "trace_jsonl",
            _trace_file(".jsonl"),
            (InvalidInput,),
            (_load_statistics(),),
        ),
    )


TARGETS = _targets()
