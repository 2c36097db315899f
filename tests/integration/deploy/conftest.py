"""A server for jobs and pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.embedded import find_server

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def broker_binary() -> Path:
    """One kind of server is enough here: what differs between them is tested with kvstore."""
    return find_server()
