"""Digests of several texts in one."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def joined_digest(parts: Iterable[str]) -> str:
    """SHA-256 (hex) of several texts, no two lists of which collide."""
    return hashlib.sha256(json.dumps(list(parts)).encode()).hexdigest()
