"""Runs in a peer's environment, where nothing of ours is: answers messages until there are no more.

    python -P main.py on_vllm.py

The first message has the settings (see `bench.peers.compare`); the answer to it comes when the model is loaded. Each
later one has ``prompts`` (token ids) and ``new``; the answer has ``tokens``, and ``times`` of each in seconds from
before the first prompt was handed over. The file that is named has ``start(settings)``, which returns an object with
``versions`` (a dict) and ``answer(prompts, new) -> (tokens, times)``. Of a tool that only tells how fast it was, it has
``rate(prompts, new, decoding)`` instead: tokens per second, or None for work that the tool can't do.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any


def main() -> None:
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)  # libraries print, and only messages may go where messages are read
        peer: Any = None
        for line in sys.stdin:
            message = json.loads(line)
            try:
                if peer is None:
                    peer = load(Path(__file__).parent / sys.argv[1]).start(message)
                    answer = {"versions": peer.versions}
                elif hasattr(peer, "rate"):
                    answer = {"rate": peer.rate(message["prompts"], message["new"], message["decoding"])}
                else:
                    tokens, times = peer.answer(message["prompts"], message["new"])
                    answer = {"tokens": tokens, "times": times}
            except BaseException as error:
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            out.write(json.dumps(answer) + "\n")
            out.flush()
            if "error" in answer:
                break
        close = getattr(peer, "close", None)
        if close is not None:
            close()
    sys.stderr.flush()
    os._exit(0)  # some libraries hang when the interpreter ends in order


def load(path: Path) -> Any:
    """A module by its file, since its folder must not be in the way of libraries with the same names."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"no module in {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
