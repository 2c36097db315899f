"""The Lua scripts of this package, as they are sent."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources
from typing import Final

SHARED: Final = ("common.lua", "lives.lua")
"""Parts of every script."""


@dataclass(frozen=True, slots=True)
class Script:
    """A script's text and the name that the server gives it."""

    source: str
    sha1: str
    reads: bool
    """It writes nothing, so that users may run it who may only read its keys."""


def load_scripts() -> dict[str, Script]:
    """All scripts by name.

    What several share goes in after each script's first line, as that line must stay first: it tells the server the
    script's flags.
    """
    folder = resources.files(__package__) / "lua"
    shared = "\n".join((folder / name).read_text(encoding="utf-8") for name in SHARED)
    scripts: dict[str, Script] = {}
    for file in folder.iterdir():
        if file.name in SHARED or not file.name.endswith(".lua"):
            continue
        flags, _, body = file.read_text(encoding="utf-8").partition("\n")
        source = f"{flags}\n{shared}\n{body}"
        # SHA-1 is how the server names scripts; nothing depends on its strength.
        sha1 = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
        scripts[file.name.removesuffix(".lua")] = Script(source, sha1, "no-writes" in flags)
    return scripts
