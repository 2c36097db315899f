"""The edge to gRPC, as far as it needs no server."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, duration_pb2, message_factory

from gateway.auth import Doorman
from gateway.config import MAX_REQUEST_BYTES
from gateway.dispatch import milliseconds
from gateway.errors import AdmissionError, DeadlinePassed, Status
from gateway.rpc import Method, abort, parse, retry_details, service_handler
from gateway.service import digest_of
from octavo.v1 import fleet_pb2, inference_pb2
from octavo.v1.inference_pb2 import GenerateRequest


def google_rpc() -> tuple[type[Any], type[Any]]:
    """google.rpc.Status and RetryInfo, as their public definitions have them."""
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(duration_pb2.DESCRIPTOR.serialized_pb)
    any_file = descriptor_pb2.FileDescriptorProto(name="any.proto", package="google.protobuf", syntax="proto3")
    file = descriptor_pb2.FileDescriptorProto(
        name="rpc.proto",
        package="google.rpc",
        syntax="proto3",
        dependency=["google/protobuf/duration.proto", "any.proto"],
    )
    field = descriptor_pb2.FieldDescriptorProto
    any_message = any_file.message_type.add(name="Any")
    any_message.field.add(name="type_url", number=1, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
    any_message.field.add(name="value", number=2, type=field.TYPE_BYTES, label=field.LABEL_OPTIONAL)
    status = file.message_type.add(name="Status")
    status.field.add(name="code", number=1, type=field.TYPE_INT32, label=field.LABEL_OPTIONAL)
    status.field.add(name="message", number=2, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
    status.field.add(
        name="details",
        number=3,
        type=field.TYPE_MESSAGE,
        type_name=".google.protobuf.Any",
        label=field.LABEL_REPEATED,
    )
    file.message_type.add(name="RetryInfo").field.add(
        name="retry_delay",
        number=1,
        type=field.TYPE_MESSAGE,
        type_name=".google.protobuf.Duration",
        label=field.LABEL_OPTIONAL,
    )
    for each in (any_file, file):
        pool.Add(each)  # type: ignore[no-untyped-call]
    get = pool.FindMessageTypeByName
    return tuple(message_factory.GetMessageClass(get(f"google.rpc.{name}")) for name in ("Status", "RetryInfo"))  # type: ignore[return-value]


def test_a_request_may_have_four_mebibytes() -> None:
    text = "x" * (4 * 2**20 - 5)
    data = GenerateRequest(text=text).SerializeToString()
    assert len(data) == MAX_REQUEST_BYTES == 4194304
    assert parse(GenerateRequest, data).text == text
    longer = GenerateRequest(text=text + "x").SerializeToString()
    with pytest.raises(AdmissionError, match=r"^request is 4194305 bytes: must be at most 4194304 \(4 MiB\); send a "):
        parse(GenerateRequest, longer)


@pytest.mark.parametrize("message", ["full", "", "ü" * 500])
def test_retry_details_are_a_google_rpc_status(message: str) -> None:
    status_class, retry_class = google_rpc()
    status = status_class.FromString(retry_details(grpc.StatusCode.RESOURCE_EXHAUSTED, message, 1500))
    assert (status.code, status.message) == (8, message)
    (detail,) = status.details
    assert detail.type_url == "type.googleapis.com/google.rpc.RetryInfo"
    delay = retry_class.FromString(detail.value).retry_delay
    assert (delay.seconds, delay.nanos) == (1, 500_000_000)


class Context:
    """Remembers how the call was ended."""

    ended: tuple[Any, ...] = ()

    async def abort(self, *ended: Any) -> None:
        self.ended = ended


async def test_a_long_message_is_cut_to_what_a_header_holds() -> None:
    context: Any = Context()
    await abort(context, Status(grpc.StatusCode.NOT_FOUND, "x" * 5000))
    code, message, trailing = context.ended
    assert (code, len(message), message[-3:], trailing) == (grpc.StatusCode.NOT_FOUND, 1024, "...", ())


def test_parse() -> None:
    assert parse(GenerateRequest, GenerateRequest(text="a").SerializeToString()).text == "a"
    with pytest.raises(AdmissionError, match=r"^request is 1 bytes: must be a octavo\.v1\.GenerateRequest$"):
        parse(GenerateRequest, b"\xff")


def test_a_service_must_have_all_its_methods() -> None:
    service = fleet_pb2.DESCRIPTOR.services_by_name["Fleet"]
    with pytest.raises(ValueError, match=r"octavo.v1.Fleet has methods \['DropDead', .*'RetryDead'\], not"):
        service_handler(service, {"ListWorkers": Method(fleet_pb2.ListWorkersRequest, Context().abort)}, Doorman())


def test_the_digest_is_of_all_but_the_id_and_the_caller() -> None:
    sampling = inference_pb2.Sampling(temperature=1.0)
    request = GenerateRequest(request_id="a", text="x", sampling=sampling, caller="c")
    same = GenerateRequest(request_id="b", text="x", sampling=inference_pb2.Sampling(temperature=1.0))
    assert digest_of(request) == digest_of(same)
    assert (request.request_id, request.caller) == ("a", "c")
    for other in (
        GenerateRequest(text="x"),  # unset is not the same as set to the default
        GenerateRequest(text="y", sampling=inference_pb2.Sampling(temperature=1.0)),
        GenerateRequest(text="x", sampling=inference_pb2.Sampling(temperature=1.0), cache_salt="s"),
    ):
        assert digest_of(request) != digest_of(other)


def test_time_left() -> None:
    assert milliseconds(None) is None
    assert milliseconds(1.2345) == 1234
    assert milliseconds(0.001) == 1
    for late in (0.0009, 0.0, -1.0):
        with pytest.raises(DeadlinePassed):
            milliseconds(late)
