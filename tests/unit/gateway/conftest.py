"""What several tests of the product's client need."""

from __future__ import annotations

import pytest

from gateway import asking


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client asks again at once, nearly."""
    monkeypatch.setattr(asking, "PAUSE_S", (0.001, 0.01))
