from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListWorkersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListWorkersResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[Worker]
    def __init__(self, workers: _Optional[_Iterable[_Union[Worker, _Mapping]]] = ...) -> None: ...

class Worker(_message.Message):
    __slots__ = ("id", "incarnation", "model", "fingerprint", "state", "device", "dtype", "block_size", "context_length", "kv_tokens", "max_running", "running", "waiting", "blocks_free", "blocks_cached", "blocks_used", "metrics", "heartbeat_age_ms")
    ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    id: str
    incarnation: str
    model: str
    fingerprint: str
    state: str
    device: str
    dtype: str
    block_size: int
    context_length: int
    kv_tokens: int
    max_running: int
    running: int
    waiting: int
    blocks_free: int
    blocks_cached: int
    blocks_used: int
    metrics: str
    heartbeat_age_ms: int
    def __init__(self, id: _Optional[str] = ..., incarnation: _Optional[str] = ..., model: _Optional[str] = ..., fingerprint: _Optional[str] = ..., state: _Optional[str] = ..., device: _Optional[str] = ..., dtype: _Optional[str] = ..., block_size: _Optional[int] = ..., context_length: _Optional[int] = ..., kv_tokens: _Optional[int] = ..., max_running: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., blocks_free: _Optional[int] = ..., blocks_cached: _Optional[int] = ..., blocks_used: _Optional[int] = ..., metrics: _Optional[str] = ..., heartbeat_age_ms: _Optional[int] = ...) -> None: ...

class GetQueuesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetQueuesResponse(_message.Message):
    __slots__ = ("queues",)
    QUEUES_FIELD_NUMBER: _ClassVar[int]
    queues: _containers.RepeatedCompositeFieldContainer[Queue]
    def __init__(self, queues: _Optional[_Iterable[_Union[Queue, _Mapping]]] = ...) -> None: ...

class Queue(_message.Message):
    __slots__ = ("worker", "undelivered", "pending", "oldest_age_ms", "stream")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    UNDELIVERED_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    OLDEST_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    worker: str
    undelivered: int
    pending: int
    oldest_age_ms: int
    stream: str
    def __init__(self, worker: _Optional[str] = ..., undelivered: _Optional[int] = ..., pending: _Optional[int] = ..., oldest_age_ms: _Optional[int] = ..., stream: _Optional[str] = ...) -> None: ...
