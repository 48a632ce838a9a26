from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PHASE_UNSPECIFIED: _ClassVar[Phase]
    PHASE_PREFILL: _ClassVar[Phase]
    PHASE_DECODE: _ClassVar[Phase]
    PHASE_MIXED: _ClassVar[Phase]

class CountingSide(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COUNTING_SIDE_UNSPECIFIED: _ClassVar[CountingSide]
    COUNTING_SIDE_DESTINATION: _ClassVar[CountingSide]
    COUNTING_SIDE_SOURCE: _ClassVar[CountingSide]
PHASE_UNSPECIFIED: Phase
PHASE_PREFILL: Phase
PHASE_DECODE: Phase
PHASE_MIXED: Phase
COUNTING_SIDE_UNSPECIFIED: CountingSide
COUNTING_SIDE_DESTINATION: CountingSide
COUNTING_SIDE_SOURCE: CountingSide

class StepMeta(_message.Message):
    __slots__ = ("step", "epoch", "phase", "tokens", "dummy", "compute_s")
    STEP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DUMMY_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    step: int
    epoch: int
    phase: Phase
    tokens: int
    dummy: bool
    compute_s: float
    def __init__(self, step: _Optional[int] = ..., epoch: _Optional[int] = ..., phase: _Optional[_Union[Phase, str]] = ..., tokens: _Optional[int] = ..., dummy: _Optional[bool] = ..., compute_s: _Optional[float] = ...) -> None: ...

class LoadReport(_message.Message):
    __slots__ = ("side", "steps", "counts", "dropped_steps", "step_table")
    SIDE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_STEPS_FIELD_NUMBER: _ClassVar[int]
    STEP_TABLE_FIELD_NUMBER: _ClassVar[int]
    side: CountingSide
    steps: _containers.RepeatedCompositeFieldContainer[StepMeta]
    counts: bytes
    dropped_steps: int
    step_table: bytes
    def __init__(self, side: _Optional[_Union[CountingSide, str]] = ..., steps: _Optional[_Iterable[_Union[StepMeta, _Mapping]]] = ..., counts: _Optional[bytes] = ..., dropped_steps: _Optional[int] = ..., step_table: _Optional[bytes] = ...) -> None: ...

class ReportAck(_message.Message):
    __slots__ = ("highest_step", "rejected_steps", "reason")
    HIGHEST_STEP_FIELD_NUMBER: _ClassVar[int]
    REJECTED_STEPS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    highest_step: int
    rejected_steps: int
    reason: str
    def __init__(self, highest_step: _Optional[int] = ..., rejected_steps: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class FlowControl(_message.Message):
    __slots__ = ("report_interval_s", "stride", "from_step", "max_steps_per_report")
    REPORT_INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    STRIDE_FIELD_NUMBER: _ClassVar[int]
    FROM_STEP_FIELD_NUMBER: _ClassVar[int]
    MAX_STEPS_PER_REPORT_FIELD_NUMBER: _ClassVar[int]
    report_interval_s: float
    stride: int
    from_step: int
    max_steps_per_report: int
    def __init__(self, report_interval_s: _Optional[float] = ..., stride: _Optional[int] = ..., from_step: _Optional[int] = ..., max_steps_per_report: _Optional[int] = ...) -> None: ...
