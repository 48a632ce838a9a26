from evenkeel_moe.v1 import common_pb2 as _common_pb2
from evenkeel_moe.v1 import telemetry_pb2 as _telemetry_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WaveOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WAVE_OUTCOME_UNSPECIFIED: _ClassVar[WaveOutcome]
    WAVE_OUTCOME_SWAPPED: _ClassVar[WaveOutcome]
    WAVE_OUTCOME_REFUSED: _ClassVar[WaveOutcome]
    WAVE_OUTCOME_DROPPED: _ClassVar[WaveOutcome]

class ParticipantState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PARTICIPANT_STATE_UNSPECIFIED: _ClassVar[ParticipantState]
    PARTICIPANT_STATE_IDLE: _ClassVar[ParticipantState]
    PARTICIPANT_STATE_STAGING: _ClassVar[ParticipantState]
    PARTICIPANT_STATE_PREPARED: _ClassVar[ParticipantState]
    PARTICIPANT_STATE_ARMED: _ClassVar[ParticipantState]
    PARTICIPANT_STATE_SWAPPING: _ClassVar[ParticipantState]
    PARTICIPANT_STATE_ABORTED: _ClassVar[ParticipantState]
WAVE_OUTCOME_UNSPECIFIED: WaveOutcome
WAVE_OUTCOME_SWAPPED: WaveOutcome
WAVE_OUTCOME_REFUSED: WaveOutcome
WAVE_OUTCOME_DROPPED: WaveOutcome
PARTICIPANT_STATE_UNSPECIFIED: ParticipantState
PARTICIPANT_STATE_IDLE: ParticipantState
PARTICIPANT_STATE_STAGING: ParticipantState
PARTICIPANT_STATE_PREPARED: ParticipantState
PARTICIPANT_STATE_ARMED: ParticipantState
PARTICIPANT_STATE_SWAPPING: ParticipantState
PARTICIPANT_STATE_ABORTED: ParticipantState

class RankMessage(_message.Message):
    __slots__ = ("hello", "heartbeat", "load_report", "vote", "ack", "abort_answer", "rank_state", "term_refused", "staging_progress", "cost_curve", "replica_cost", "kv_cache", "device_clock", "moved_answers")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    LOAD_REPORT_FIELD_NUMBER: _ClassVar[int]
    VOTE_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    ABORT_ANSWER_FIELD_NUMBER: _ClassVar[int]
    RANK_STATE_FIELD_NUMBER: _ClassVar[int]
    TERM_REFUSED_FIELD_NUMBER: _ClassVar[int]
    STAGING_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    COST_CURVE_FIELD_NUMBER: _ClassVar[int]
    REPLICA_COST_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_CLOCK_FIELD_NUMBER: _ClassVar[int]
    MOVED_ANSWERS_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    heartbeat: Heartbeat
    load_report: _telemetry_pb2.LoadReport
    vote: Vote
    ack: Ack
    abort_answer: AbortAnswer
    rank_state: RankState
    term_refused: TermRefused
    staging_progress: StagingProgress
    cost_curve: CostCurve
    replica_cost: ReplicaCost
    kv_cache: KvCache
    device_clock: DeviceClock
    moved_answers: MovedAnswers
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., load_report: _Optional[_Union[_telemetry_pb2.LoadReport, _Mapping]] = ..., vote: _Optional[_Union[Vote, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., abort_answer: _Optional[_Union[AbortAnswer, _Mapping]] = ..., rank_state: _Optional[_Union[RankState, _Mapping]] = ..., term_refused: _Optional[_Union[TermRefused, _Mapping]] = ..., staging_progress: _Optional[_Union[StagingProgress, _Mapping]] = ..., cost_curve: _Optional[_Union[CostCurve, _Mapping]] = ..., replica_cost: _Optional[_Union[ReplicaCost, _Mapping]] = ..., kv_cache: _Optional[_Union[KvCache, _Mapping]] = ..., device_clock: _Optional[_Union[DeviceClock, _Mapping]] = ..., moved_answers: _Optional[_Union[MovedAnswers, _Mapping]] = ...) -> None: ...

class ControllerMessage(_message.Message):
    __slots__ = ("registration", "report_ack", "flow_control", "not_leader", "prepare", "commit", "abort", "query_state")
    REGISTRATION_FIELD_NUMBER: _ClassVar[int]
    REPORT_ACK_FIELD_NUMBER: _ClassVar[int]
    FLOW_CONTROL_FIELD_NUMBER: _ClassVar[int]
    NOT_LEADER_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    QUERY_STATE_FIELD_NUMBER: _ClassVar[int]
    registration: Registration
    report_ack: _telemetry_pb2.ReportAck
    flow_control: _telemetry_pb2.FlowControl
    not_leader: NotLeader
    prepare: Prepare
    commit: Commit
    abort: Abort
    query_state: QueryState
    def __init__(self, registration: _Optional[_Union[Registration, _Mapping]] = ..., report_ack: _Optional[_Union[_telemetry_pb2.ReportAck, _Mapping]] = ..., flow_control: _Optional[_Union[_telemetry_pb2.FlowControl, _Mapping]] = ..., not_leader: _Optional[_Union[NotLeader, _Mapping]] = ..., prepare: _Optional[_Union[Prepare, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., query_state: _Optional[_Union[QueryState, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("identity", "shape", "node", "gpu_uuid", "epoch", "placement_digest", "weights_version", "checksums_digest", "free_bytes", "staging_bytes", "gate_digest", "capabilities", "highest_term", "device", "weight_format", "dispatch", "slots_stay_filled", "lineage")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    GPU_UUID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    STAGING_BYTES_FIELD_NUMBER: _ClassVar[int]
    GATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_TERM_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FORMAT_FIELD_NUMBER: _ClassVar[int]
    DISPATCH_FIELD_NUMBER: _ClassVar[int]
    SLOTS_STAY_FILLED_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    identity: _common_pb2.RankIdentity
    shape: _common_pb2.ModelShape
    node: str
    gpu_uuid: str
    epoch: int
    placement_digest: str
    weights_version: int
    checksums_digest: str
    free_bytes: int
    staging_bytes: int
    gate_digest: str
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    highest_term: int
    device: str
    weight_format: str
    dispatch: str
    slots_stay_filled: bool
    lineage: _common_pb2.Lineage
    def __init__(self, identity: _Optional[_Union[_common_pb2.RankIdentity, _Mapping]] = ..., shape: _Optional[_Union[_common_pb2.ModelShape, _Mapping]] = ..., node: _Optional[str] = ..., gpu_uuid: _Optional[str] = ..., epoch: _Optional[int] = ..., placement_digest: _Optional[str] = ..., weights_version: _Optional[int] = ..., checksums_digest: _Optional[str] = ..., free_bytes: _Optional[int] = ..., staging_bytes: _Optional[int] = ..., gate_digest: _Optional[str] = ..., capabilities: _Optional[_Iterable[str]] = ..., highest_term: _Optional[int] = ..., device: _Optional[str] = ..., weight_format: _Optional[str] = ..., dispatch: _Optional[str] = ..., slots_stay_filled: _Optional[bool] = ..., lineage: _Optional[_Union[_common_pb2.Lineage, _Mapping]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("step", "free_bytes", "staging_bytes", "trouble", "stopping")
    STEP_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    STAGING_BYTES_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    step: int
    free_bytes: int
    staging_bytes: int
    trouble: str
    stopping: bool
    def __init__(self, step: _Optional[int] = ..., free_bytes: _Optional[int] = ..., staging_bytes: _Optional[int] = ..., trouble: _Optional[str] = ..., stopping: _Optional[bool] = ...) -> None: ...

class CostCurve(_message.Message):
    __slots__ = ("tile_tokens", "tile_seconds", "slope_s_per_token", "fit_error", "line_error")
    TILE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TILE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SLOPE_S_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FIT_ERROR_FIELD_NUMBER: _ClassVar[int]
    LINE_ERROR_FIELD_NUMBER: _ClassVar[int]
    tile_tokens: int
    tile_seconds: _containers.RepeatedScalarFieldContainer[float]
    slope_s_per_token: float
    fit_error: float
    line_error: float
    def __init__(self, tile_tokens: _Optional[int] = ..., tile_seconds: _Optional[_Iterable[float]] = ..., slope_s_per_token: _Optional[float] = ..., fit_error: _Optional[float] = ..., line_error: _Optional[float] = ...) -> None: ...

class ReplicaCost(_message.Message):
    __slots__ = ("fixed_s", "s_per_token", "s_per_replica", "read_s", "fit_error", "measured_unix_s")
    FIXED_S_FIELD_NUMBER: _ClassVar[int]
    S_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    S_PER_REPLICA_FIELD_NUMBER: _ClassVar[int]
    READ_S_FIELD_NUMBER: _ClassVar[int]
    FIT_ERROR_FIELD_NUMBER: _ClassVar[int]
    MEASURED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    fixed_s: float
    s_per_token: float
    s_per_replica: float
    read_s: float
    fit_error: float
    measured_unix_s: float
    def __init__(self, fixed_s: _Optional[float] = ..., s_per_token: _Optional[float] = ..., s_per_replica: _Optional[float] = ..., read_s: _Optional[float] = ..., fit_error: _Optional[float] = ..., measured_unix_s: _Optional[float] = ...) -> None: ...

class KvCache(_message.Message):
    __slots__ = ("bytes_per_token", "free_bytes")
    BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    bytes_per_token: int
    free_bytes: int
    def __init__(self, bytes_per_token: _Optional[int] = ..., free_bytes: _Optional[int] = ...) -> None: ...

class DeviceClock(_message.Message):
    __slots__ = ("ratio", "limited_by")
    RATIO_FIELD_NUMBER: _ClassVar[int]
    LIMITED_BY_FIELD_NUMBER: _ClassVar[int]
    ratio: float
    limited_by: str
    def __init__(self, ratio: _Optional[float] = ..., limited_by: _Optional[str] = ...) -> None: ...

class Vote(_message.Message):
    __slots__ = ("wave", "yes", "reason", "detail")
    WAVE_FIELD_NUMBER: _ClassVar[int]
    YES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    wave: _common_pb2.WaveKey
    yes: bool
    reason: str
    detail: str
    def __init__(self, wave: _Optional[_Union[_common_pb2.WaveKey, _Mapping]] = ..., yes: _Optional[bool] = ..., reason: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("wave", "epoch", "placement_digest", "swap_s")
    WAVE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SWAP_S_FIELD_NUMBER: _ClassVar[int]
    wave: _common_pb2.WaveKey
    epoch: int
    placement_digest: str
    swap_s: float
    def __init__(self, wave: _Optional[_Union[_common_pb2.WaveKey, _Mapping]] = ..., epoch: _Optional[int] = ..., placement_digest: _Optional[str] = ..., swap_s: _Optional[float] = ...) -> None: ...

class AbortAnswer(_message.Message):
    __slots__ = ("wave", "epoch", "outcome", "drained")
    WAVE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    wave: _common_pb2.WaveKey
    epoch: int
    outcome: WaveOutcome
    drained: bool
    def __init__(self, wave: _Optional[_Union[_common_pb2.WaveKey, _Mapping]] = ..., epoch: _Optional[int] = ..., outcome: _Optional[_Union[WaveOutcome, str]] = ..., drained: _Optional[bool] = ...) -> None: ...

class RankState(_message.Message):
    __slots__ = ("identity", "state", "wave", "epoch", "placement_digest", "weights_version", "drained", "last_wave", "last_outcome", "placement", "checksums", "highest_term", "step", "query")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    WAVE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    LAST_WAVE_FIELD_NUMBER: _ClassVar[int]
    LAST_OUTCOME_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_TERM_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    identity: _common_pb2.RankIdentity
    state: ParticipantState
    wave: _common_pb2.WaveKey
    epoch: int
    placement_digest: str
    weights_version: int
    drained: bool
    last_wave: _common_pb2.WaveKey
    last_outcome: WaveOutcome
    placement: _common_pb2.PlacementMap
    checksums: _containers.RepeatedScalarFieldContainer[int]
    highest_term: int
    step: int
    query: int
    def __init__(self, identity: _Optional[_Union[_common_pb2.RankIdentity, _Mapping]] = ..., state: _Optional[_Union[ParticipantState, str]] = ..., wave: _Optional[_Union[_common_pb2.WaveKey, _Mapping]] = ..., epoch: _Optional[int] = ..., placement_digest: _Optional[str] = ..., weights_version: _Optional[int] = ..., drained: _Optional[bool] = ..., last_wave: _Optional[_Union[_common_pb2.WaveKey, _Mapping]] = ..., last_outcome: _Optional[_Union[WaveOutcome, str]] = ..., placement: _Optional[_Union[_common_pb2.PlacementMap, _Mapping]] = ..., checksums: _Optional[_Iterable[int]] = ..., highest_term: _Optional[int] = ..., step: _Optional[int] = ..., query: _Optional[int] = ...) -> None: ...

class TermRefused(_message.Message):
    __slots__ = ("identity", "leader")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    identity: _common_pb2.RankIdentity
    leader: _common_pb2.Leader
    def __init__(self, identity: _Optional[_Union[_common_pb2.RankIdentity, _Mapping]] = ..., leader: _Optional[_Union[_common_pb2.Leader, _Mapping]] = ...) -> None: ...

class StagingProgress(_message.Message):
    __slots__ = ("wave", "bytes_done", "bytes_total")
    WAVE_FIELD_NUMBER: _ClassVar[int]
    BYTES_DONE_FIELD_NUMBER: _ClassVar[int]
    BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    wave: _common_pb2.WaveKey
    bytes_done: int
    bytes_total: int
    def __init__(self, wave: _Optional[_Union[_common_pb2.WaveKey, _Mapping]] = ..., bytes_done: _Optional[int] = ..., bytes_total: _Optional[int] = ...) -> None: ...

class MovedAnswers(_message.Message):
    __slots__ = ("wave", "moved", "same", "different", "blind")
    WAVE_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    SAME_FIELD_NUMBER: _ClassVar[int]
    DIFFERENT_FIELD_NUMBER: _ClassVar[int]
    BLIND_FIELD_NUMBER: _ClassVar[int]
    wave: _common_pb2.WaveKey
    moved: int
    same: int
    different: int
    blind: int
    def __init__(self, wave: _Optional[_Union[_common_pb2.WaveKey, _Mapping]] = ..., moved: _Optional[int] = ..., same: _Optional[int] = ..., different: _Optional[int] = ..., blind: _Optional[int] = ...) -> None: ...

class Registration(_message.Message):
    __slots__ = ("outcome", "reason", "detail", "leader", "heartbeat_interval_s", "lease_s", "flow", "highest_step")
    class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        OUTCOME_UNSPECIFIED: _ClassVar[Registration.Outcome]
        OUTCOME_ACCEPTED: _ClassVar[Registration.Outcome]
        OUTCOME_OBSERVE_ONLY: _ClassVar[Registration.Outcome]
        OUTCOME_REFUSED: _ClassVar[Registration.Outcome]
    OUTCOME_UNSPECIFIED: Registration.Outcome
    OUTCOME_ACCEPTED: Registration.Outcome
    OUTCOME_OBSERVE_ONLY: Registration.Outcome
    OUTCOME_REFUSED: Registration.Outcome
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    FLOW_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_STEP_FIELD_NUMBER: _ClassVar[int]
    outcome: Registration.Outcome
    reason: str
    detail: str
    leader: _common_pb2.Leader
    heartbeat_interval_s: float
    lease_s: float
    flow: _telemetry_pb2.FlowControl
    highest_step: int
    def __init__(self, outcome: _Optional[_Union[Registration.Outcome, str]] = ..., reason: _Optional[str] = ..., detail: _Optional[str] = ..., leader: _Optional[_Union[_common_pb2.Leader, _Mapping]] = ..., heartbeat_interval_s: _Optional[float] = ..., lease_s: _Optional[float] = ..., flow: _Optional[_Union[_telemetry_pb2.FlowControl, _Mapping]] = ..., highest_step: _Optional[int] = ...) -> None: ...

class NotLeader(_message.Message):
    __slots__ = ("leader_id", "address", "retry_after_s")
    LEADER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    leader_id: str
    address: str
    retry_after_s: float
    def __init__(self, leader_id: _Optional[str] = ..., address: _Optional[str] = ..., retry_after_s: _Optional[float] = ...) -> None: ...

class Prepare(_message.Message):
    __slots__ = ("leader", "wave", "base_epoch", "body", "checksums", "batch_deadline_s", "max_bytes_per_s")
    LEADER_FIELD_NUMBER: _ClassVar[int]
    WAVE_FIELD_NUMBER: _ClassVar[int]
    BASE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    BATCH_DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    leader: _common_pb2.Leader
    wave: _common_pb2.WaveKey
    base_epoch: int
    body: _common_pb2.Wave
    checksums: _containers.RepeatedScalarFieldContainer[int]
    batch_deadline_s: float
    max_bytes_per_s: float
    def __init__(self, leader: _Optional[_Union[_common_pb2.Leader, _Mapping]] = ..., wave: _Optional[_Union[_common_pb2.WaveKey, _Mapping]] = ..., base_epoch: _Optional[int] = ..., body: _Optional[_Union[_common_pb2.Wave, _Mapping]] = ..., checksums: _Optional[_Iterable[int]] = ..., batch_deadline_s: _Optional[float] = ..., max_bytes_per_s: _Optional[float] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("leader", "wave")
    LEADER_FIELD_NUMBER: _ClassVar[int]
    WAVE_FIELD_NUMBER: _ClassVar[int]
    leader: _common_pb2.Leader
    wave: _common_pb2.WaveKey
    def __init__(self, leader: _Optional[_Union[_common_pb2.Leader, _Mapping]] = ..., wave: _Optional[_Union[_common_pb2.WaveKey, _Mapping]] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("leader", "wave")
    LEADER_FIELD_NUMBER: _ClassVar[int]
    WAVE_FIELD_NUMBER: _ClassVar[int]
    leader: _common_pb2.Leader
    wave: _common_pb2.WaveKey
    def __init__(self, leader: _Optional[_Union[_common_pb2.Leader, _Mapping]] = ..., wave: _Optional[_Union[_common_pb2.WaveKey, _Mapping]] = ...) -> None: ...

class QueryState(_message.Message):
    __slots__ = ("leader", "want_placement", "want_checksums", "query")
    LEADER_FIELD_NUMBER: _ClassVar[int]
    WANT_PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    WANT_CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    leader: _common_pb2.Leader
    want_placement: bool
    want_checksums: bool
    query: int
    def __init__(self, leader: _Optional[_Union[_common_pb2.Leader, _Mapping]] = ..., want_placement: _Optional[bool] = ..., want_checksums: _Optional[bool] = ..., query: _Optional[int] = ...) -> None: ...
