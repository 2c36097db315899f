"""Recorded decisions, from the broker and from files: one octavo.v1.RouteRecord a line, as JSON."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from google.protobuf import json_format
from google.protobuf.message import DecodeError

from kvstore.client import BrokerConfig, connect
from octavo.v1 import fleet_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from kvstore.client import Broker

MOST: Final = 20_000
"""More than a broker keeps."""

logger = logging.getLogger(__name__)


class NoRecords(Exception):  # noqa: N818 - a finding, not a kind of error
    """What was given holds no decisions; the message says where and why."""


async def last_route(url: str, namespace: str) -> str:
    """The id of the last decision that a fleet's broker keeps; `0-0` where it has none.

    Raises:
        KvError: it does not answer.
    """
    broker = await connect(BrokerConfig(url, namespace))
    try:
        found = await broker.call("XREVRANGE", broker.keys.routes, "+", "-", "COUNT", 1)
        return found[0][0].decode() if found else "0-0"
    finally:
        await broker.close()


async def records_from_redis(
    url: str, namespace: str, most: int = MOST, after: str = ""
) -> list[fleet_pb2.RouteRecord]:
    """What a fleet's broker keeps, oldest first; with `after`, an id, what came later.

    Raises:
        KvError: it does not answer.
    """
    broker = await connect(BrokerConfig(url, namespace))
    try:
        return await records_of(broker, most, after)
    finally:
        await broker.close()


async def records_of(broker: Broker, most: int = MOST, after: str = "") -> list[fleet_pb2.RouteRecord]:
    """The last ones that the broker keeps, at most so many, oldest first, with `after` those behind that id; what does
    not parse is left out.

    Raises:
        BrokerError: it does not answer.
    """
    records = []
    first = f"({after}" if after else "-"
    for _, values in await broker.call("XREVRANGE", broker.keys.routes, "+", first, "COUNT", most):
        try:
            records.append(fleet_pb2.RouteRecord.FromString(values[b"d"]))
        except (DecodeError, KeyError):
            logger.warning("a recorded decision does not parse; it is left out")
    return records[::-1]


def read_records(path: Path) -> list[fleet_pb2.RouteRecord]:
    """A file that ``write_records`` wrote.

    Raises:
        NoRecords: a line is none.
        OSError: it can't be read.
    """
    records = []
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
        try:
            # The library takes an empty list for a message without fields.
            if not line.lstrip().startswith("{"):
                raise ValueError("no object")
            records.append(json_format.Parse(line, fleet_pb2.RouteRecord()))
        # Numbers out of range and deep nesting fail in ways of their own.
        except (json_format.ParseError, TypeError, ValueError, RecursionError) as error:
            # The library's message may have many lines, and quotes what is there.
            raise NoRecords(
                f"{path}, line {number}, is no recorded decision: octavo bench routing --routes writes such files"
            ) from error
    return records


def write_records(records: Iterable[fleet_pb2.RouteRecord], path: Path) -> None:
    """One a line.

    Raises:
        OSError: it can't be written.
    """
    with path.open("w") as file:
        for record in records:
            file.write(json_format.MessageToJson(record, preserving_proto_field_name=True, indent=None) + "\n")
