"""A server for jobs and pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.embedded import find_server
from tests.integration.deploy.roles import running_server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.integration.deploy.roles import Server


@pytest.fixture(scope="session")
def broker_binary() -> Path:
    """One kind of server is enough here: what differs between them is tested with kvstore."""
    return find_server()


@pytest.fixture
async def server(broker_binary: Path, tmp_path: Path) -> AsyncIterator[Server]:
    """With a user for each role."""
    async with running_server(broker_binary, tmp_path) as server:
        yield server
