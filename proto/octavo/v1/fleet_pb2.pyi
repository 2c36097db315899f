from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LedgerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LedgerResponse(_message.Message):
    __slots__ = ("accepted", "finished", "failed", "cancelled", "expired", "dead", "in_flight")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_FIELD_NUMBER: _ClassVar[int]
    DEAD_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    accepted: int
    finished: int
    failed: int
    cancelled: int
    expired: int
    dead: int
    in_flight: int
    def __init__(self, accepted: _Optional[int] = ..., finished: _Optional[int] = ..., failed: _Optional[int] = ..., cancelled: _Optional[int] = ..., expired: _Optional[int] = ..., dead: _Optional[int] = ..., in_flight: _Optional[int] = ...) -> None: ...

class ListDeadRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ListDeadResponse(_message.Message):
    __slots__ = ("jobs",)
    JOBS_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[Dead]
    def __init__(self, jobs: _Optional[_Iterable[_Union[Dead, _Mapping]]] = ...) -> None: ...

class Dead(_message.Message):
    __slots__ = ("request_id", "model", "reason", "worker", "attempts", "died_unix_ms", "prompt_token_ids", "payload", "prompt_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    DIED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    reason: str
    worker: str
    attempts: int
    died_unix_ms: int
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    payload: str
    prompt_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., reason: _Optional[str] = ..., worker: _Optional[str] = ..., attempts: _Optional[int] = ..., died_unix_ms: _Optional[int] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., payload: _Optional[str] = ..., prompt_tokens: _Optional[int] = ...) -> None: ...

class RetryDeadRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class RetryDeadResponse(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class DropDeadRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class DropDeadResponse(_message.Message):
    __slots__ = ("dropped",)
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    dropped: int
    def __init__(self, dropped: _Optional[int] = ...) -> None: ...

class ListWorkersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListWorkersResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[Worker]
    def __init__(self, workers: _Optional[_Iterable[_Union[Worker, _Mapping]]] = ...) -> None: ...

class Worker(_message.Message):
    __slots__ = ("id", "incarnation", "model", "fingerprint", "state", "device", "dtype", "block_size", "context_length", "kv_tokens", "max_running", "running", "waiting", "blocks_free", "blocks_cached", "blocks_used", "metrics", "heartbeat_age_ms", "prefill_tokens_per_s", "step_ms", "sequence_ms", "fetch_tokens_per_s", "index", "heartbeat_unix_ms", "steps", "busy_s", "computed_tokens", "output_tokens", "prefix_queried_tokens", "prefix_hit_tokens", "circuit")
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
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    STEP_MS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_MS_FIELD_NUMBER: _ClassVar[int]
    FETCH_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERIED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CIRCUIT_FIELD_NUMBER: _ClassVar[int]
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
    prefill_tokens_per_s: float
    step_ms: float
    sequence_ms: float
    fetch_tokens_per_s: float
    index: str
    heartbeat_unix_ms: int
    steps: int
    busy_s: float
    computed_tokens: int
    output_tokens: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    circuit: str
    def __init__(self, id: _Optional[str] = ..., incarnation: _Optional[str] = ..., model: _Optional[str] = ..., fingerprint: _Optional[str] = ..., state: _Optional[str] = ..., device: _Optional[str] = ..., dtype: _Optional[str] = ..., block_size: _Optional[int] = ..., context_length: _Optional[int] = ..., kv_tokens: _Optional[int] = ..., max_running: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., blocks_free: _Optional[int] = ..., blocks_cached: _Optional[int] = ..., blocks_used: _Optional[int] = ..., metrics: _Optional[str] = ..., heartbeat_age_ms: _Optional[int] = ..., prefill_tokens_per_s: _Optional[float] = ..., step_ms: _Optional[float] = ..., sequence_ms: _Optional[float] = ..., fetch_tokens_per_s: _Optional[float] = ..., index: _Optional[str] = ..., heartbeat_unix_ms: _Optional[int] = ..., steps: _Optional[int] = ..., busy_s: _Optional[float] = ..., computed_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., prefix_queried_tokens: _Optional[int] = ..., prefix_hit_tokens: _Optional[int] = ..., circuit: _Optional[str] = ...) -> None: ...

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

class ExplainRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("route", "worker", "stolen_from", "state", "attempt", "prompt_tokens", "cached_tokens", "started", "fetched_tokens", "predicted_cached_tokens")
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    STOLEN_FROM_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    FETCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    route: RouteRecord
    worker: str
    stolen_from: str
    state: str
    attempt: int
    prompt_tokens: int
    cached_tokens: int
    started: bool
    fetched_tokens: int
    predicted_cached_tokens: int
    def __init__(self, route: _Optional[_Union[RouteRecord, _Mapping]] = ..., worker: _Optional[str] = ..., stolen_from: _Optional[str] = ..., state: _Optional[str] = ..., attempt: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., started: _Optional[bool] = ..., fetched_tokens: _Optional[int] = ..., predicted_cached_tokens: _Optional[int] = ...) -> None: ...

class RouteRecord(_message.Message):
    __slots__ = ("request_id", "policy", "index", "prompt_tokens", "answer_tokens", "candidates", "chosen", "decided_unix_ms", "choices", "mean_answer_tokens", "predicted_cached_tokens", "repeats_per_s")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ANSWER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    DECIDED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    MEAN_ANSWER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REPEATS_PER_S_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    policy: str
    index: str
    prompt_tokens: int
    answer_tokens: int
    candidates: _containers.RepeatedCompositeFieldContainer[Candidate]
    chosen: int
    decided_unix_ms: int
    choices: int
    mean_answer_tokens: int
    predicted_cached_tokens: int
    repeats_per_s: float
    def __init__(self, request_id: _Optional[str] = ..., policy: _Optional[str] = ..., index: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., answer_tokens: _Optional[int] = ..., candidates: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ..., chosen: _Optional[int] = ..., decided_unix_ms: _Optional[int] = ..., choices: _Optional[int] = ..., mean_answer_tokens: _Optional[int] = ..., predicted_cached_tokens: _Optional[int] = ..., repeats_per_s: _Optional[float] = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("worker", "incarnation", "held_tokens", "stored_tokens", "jobs", "tokens", "prefill_tokens", "prefill_tokens_per_s", "step_ms", "sequence_ms", "fetch_tokens_per_s", "max_running", "kv_tokens", "wait_s", "prefill_s", "fetch_s", "decode_s", "verdict", "used_tokens", "sequences", "saved_s")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STORED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    STEP_MS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_MS_FIELD_NUMBER: _ClassVar[int]
    FETCH_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    FETCH_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    USED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    SAVED_S_FIELD_NUMBER: _ClassVar[int]
    worker: str
    incarnation: str
    held_tokens: int
    stored_tokens: int
    jobs: int
    tokens: int
    prefill_tokens: int
    prefill_tokens_per_s: float
    step_ms: float
    sequence_ms: float
    fetch_tokens_per_s: float
    max_running: int
    kv_tokens: int
    wait_s: float
    prefill_s: float
    fetch_s: float
    decode_s: float
    verdict: str
    used_tokens: int
    sequences: int
    saved_s: float
    def __init__(self, worker: _Optional[str] = ..., incarnation: _Optional[str] = ..., held_tokens: _Optional[int] = ..., stored_tokens: _Optional[int] = ..., jobs: _Optional[int] = ..., tokens: _Optional[int] = ..., prefill_tokens: _Optional[int] = ..., prefill_tokens_per_s: _Optional[float] = ..., step_ms: _Optional[float] = ..., sequence_ms: _Optional[float] = ..., fetch_tokens_per_s: _Optional[float] = ..., max_running: _Optional[int] = ..., kv_tokens: _Optional[int] = ..., wait_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., fetch_s: _Optional[float] = ..., decode_s: _Optional[float] = ..., verdict: _Optional[str] = ..., used_tokens: _Optional[int] = ..., sequences: _Optional[int] = ..., saved_s: _Optional[float] = ...) -> None: ...
