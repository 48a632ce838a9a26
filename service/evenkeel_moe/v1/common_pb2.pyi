from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Leader(_message.Message):
    __slots__ = ("leader_id", "term")
    LEADER_ID_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    leader_id: str
    term: int
    def __init__(self, leader_id: _Optional[str] = ..., term: _Optional[int] = ...) -> None: ...

class RankIdentity(_message.Message):
    __slots__ = ("deployment", "rank", "generation", "incarnation")
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    deployment: str
    rank: int
    generation: str
    incarnation: int
    def __init__(self, deployment: _Optional[str] = ..., rank: _Optional[int] = ..., generation: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class Lineage(_message.Message):
    __slots__ = ("generation", "rank")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    generation: str
    rank: int
    def __init__(self, generation: _Optional[str] = ..., rank: _Optional[int] = ...) -> None: ...

class ModelShape(_message.Message):
    __slots__ = ("num_layers", "num_logical_experts", "num_ranks", "slots_per_rank", "top_k", "bytes_per_expert", "num_expert_groups", "pool_slots_per_rank", "shared_experts")
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGICAL_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    NUM_RANKS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_PER_RANK_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_EXPERT_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPERT_GROUPS_FIELD_NUMBER: _ClassVar[int]
    POOL_SLOTS_PER_RANK_FIELD_NUMBER: _ClassVar[int]
    SHARED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    num_layers: int
    num_logical_experts: int
    num_ranks: int
    slots_per_rank: int
    top_k: int
    bytes_per_expert: int
    num_expert_groups: int
    pool_slots_per_rank: int
    shared_experts: float
    def __init__(self, num_layers: _Optional[int] = ..., num_logical_experts: _Optional[int] = ..., num_ranks: _Optional[int] = ..., slots_per_rank: _Optional[int] = ..., top_k: _Optional[int] = ..., bytes_per_expert: _Optional[int] = ..., num_expert_groups: _Optional[int] = ..., pool_slots_per_rank: _Optional[int] = ..., shared_experts: _Optional[float] = ...) -> None: ...

class PlacementMap(_message.Message):
    __slots__ = ("num_layers", "num_slots", "num_ranks", "num_logical_experts", "physical_to_logical")
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_RANKS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGICAL_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    PHYSICAL_TO_LOGICAL_FIELD_NUMBER: _ClassVar[int]
    num_layers: int
    num_slots: int
    num_ranks: int
    num_logical_experts: int
    physical_to_logical: bytes
    def __init__(self, num_layers: _Optional[int] = ..., num_slots: _Optional[int] = ..., num_ranks: _Optional[int] = ..., num_logical_experts: _Optional[int] = ..., physical_to_logical: _Optional[bytes] = ...) -> None: ...

class WaveKey(_message.Message):
    __slots__ = ("generation", "plan_id", "wave_index", "weights_version", "base_epoch")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    WAVE_INDEX_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    BASE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    generation: str
    plan_id: str
    wave_index: int
    weights_version: int
    base_epoch: int
    def __init__(self, generation: _Optional[str] = ..., plan_id: _Optional[str] = ..., wave_index: _Optional[int] = ..., weights_version: _Optional[int] = ..., base_epoch: _Optional[int] = ...) -> None: ...

class Transfer(_message.Message):
    __slots__ = ("layer", "logical_expert", "src_slot", "dst_slot", "nbytes")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    LOGICAL_EXPERT_FIELD_NUMBER: _ClassVar[int]
    SRC_SLOT_FIELD_NUMBER: _ClassVar[int]
    DST_SLOT_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    layer: int
    logical_expert: int
    src_slot: int
    dst_slot: int
    nbytes: int
    def __init__(self, layer: _Optional[int] = ..., logical_expert: _Optional[int] = ..., src_slot: _Optional[int] = ..., dst_slot: _Optional[int] = ..., nbytes: _Optional[int] = ...) -> None: ...

class Batch(_message.Message):
    __slots__ = ("transfers",)
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    transfers: _containers.RepeatedCompositeFieldContainer[Transfer]
    def __init__(self, transfers: _Optional[_Iterable[_Union[Transfer, _Mapping]]] = ...) -> None: ...

class Wave(_message.Message):
    __slots__ = ("index", "layers", "num_slots", "rows", "batches")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    index: int
    layers: _containers.RepeatedScalarFieldContainer[int]
    num_slots: int
    rows: bytes
    batches: _containers.RepeatedCompositeFieldContainer[Batch]
    def __init__(self, index: _Optional[int] = ..., layers: _Optional[_Iterable[int]] = ..., num_slots: _Optional[int] = ..., rows: _Optional[bytes] = ..., batches: _Optional[_Iterable[_Union[Batch, _Mapping]]] = ...) -> None: ...

class PlanMaps(_message.Message):
    __slots__ = ("base", "target", "waves")
    BASE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    WAVES_FIELD_NUMBER: _ClassVar[int]
    base: PlacementMap
    target: PlacementMap
    waves: _containers.RepeatedCompositeFieldContainer[Wave]
    def __init__(self, base: _Optional[_Union[PlacementMap, _Mapping]] = ..., target: _Optional[_Union[PlacementMap, _Mapping]] = ..., waves: _Optional[_Iterable[_Union[Wave, _Mapping]]] = ...) -> None: ...
