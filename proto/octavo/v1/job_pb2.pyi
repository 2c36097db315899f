from octavo.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Failure(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAILURE_NONE: _ClassVar[Failure]
    FAILURE_INVALID: _ClassVar[Failure]
    FAILURE_EXHAUSTED: _ClassVar[Failure]
    FAILURE_UNAVAILABLE: _ClassVar[Failure]
    FAILURE_DEADLINE: _ClassVar[Failure]
    FAILURE_INTERNAL: _ClassVar[Failure]
    FAILURE_DEAD: _ClassVar[Failure]
FAILURE_NONE: Failure
FAILURE_INVALID: Failure
FAILURE_EXHAUSTED: Failure
FAILURE_UNAVAILABLE: Failure
FAILURE_DEADLINE: Failure
FAILURE_INTERNAL: Failure
FAILURE_DEAD: Failure

class Job(_message.Message):
    __slots__ = ("request_id", "model", "prompt_token_ids", "sampling", "stopping", "n", "priority", "cache_salt", "logprobs", "prompt_logprobs", "detached", "traceparent", "structure")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    DETACHED_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    STRUCTURE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _inference_pb2.Sampling
    stopping: _inference_pb2.Stopping
    n: int
    priority: int
    cache_salt: str
    logprobs: int
    prompt_logprobs: int
    detached: bool
    traceparent: str
    structure: _inference_pb2.Structure
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_inference_pb2.Sampling, _Mapping]] = ..., stopping: _Optional[_Union[_inference_pb2.Stopping, _Mapping]] = ..., n: _Optional[int] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., detached: _Optional[bool] = ..., traceparent: _Optional[str] = ..., structure: _Optional[_Union[_inference_pb2.Structure, _Mapping]] = ...) -> None: ...

class DeadJob(_message.Message):
    __slots__ = ("job", "reason", "attempts", "worker", "died_unix_ms")
    JOB_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    DIED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    job: Job
    reason: str
    attempts: int
    worker: str
    died_unix_ms: int
    def __init__(self, job: _Optional[_Union[Job, _Mapping]] = ..., reason: _Optional[str] = ..., attempts: _Optional[int] = ..., worker: _Optional[str] = ..., died_unix_ms: _Optional[int] = ...) -> None: ...

class Delivery(_message.Message):
    __slots__ = ("request_id", "attempt", "chunk", "failure", "route", "usage")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    chunk: _inference_pb2.Chunk
    failure: Failure
    route: _inference_pb2.Route
    usage: _inference_pb2.Usage
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., chunk: _Optional[_Union[_inference_pb2.Chunk, _Mapping]] = ..., failure: _Optional[_Union[Failure, str]] = ..., route: _Optional[_Union[_inference_pb2.Route, _Mapping]] = ..., usage: _Optional[_Union[_inference_pb2.Usage, _Mapping]] = ...) -> None: ...

class Deliveries(_message.Message):
    __slots__ = ("deliveries",)
    DELIVERIES_FIELD_NUMBER: _ClassVar[int]
    deliveries: _containers.RepeatedCompositeFieldContainer[Delivery]
    def __init__(self, deliveries: _Optional[_Iterable[_Union[Delivery, _Mapping]]] = ...) -> None: ...
