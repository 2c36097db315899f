"""transformers' continuous batching over pages (torch's own attention), bfloat16."""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any

import torch

PAGE = 256
"""Tokens: its default."""
STEP = 512
"""Tokens in one step, at most: what ours takes."""


class Peer:
    """Keeps one manager, whose thread runs the batch."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

        torch.set_num_threads(settings["threads"])
        self.versions = {name: version(name) for name in ("transformers", "torch")}
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            settings["model"], dtype=torch.bfloat16, attn_implementation="sdpa"
        )
        config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=64)
        # Left to itself it takes most of the machine's memory for pages, and keeps that resident.
        tokens = settings["max_running"] * settings["context"]
        batching = ContinuousBatchingConfig(
            num_blocks=tokens // PAGE + 1, page_size=PAGE, max_batch_tokens=STEP, auto_switch_to_flash=False
        )
        self._manager = self._model.init_continuous_batching(config, batching)
        self._manager.start()
        self._added = 0

    def answer(self, prompts: list[list[int]], new: int) -> tuple[list[list[int]], list[list[float]]]:
        names = [f"r{self._added + index}" for index in range(len(prompts))]
        self._added += len(prompts)
        tokens: dict[str, list[int]] = {name: [] for name in names}
        times: dict[str, list[float]] = {name: [] for name in names}
        begin = time.perf_counter()
        for name, prompt in zip(names, prompts, strict=True):
            self._manager.add_request(prompt, request_id=name, max_new_tokens=new, streaming=True)
        unfinished = set(names)
        while unfinished:
            output = self._manager.get_result(timeout=5)
            if output is None:
                if not self._manager.is_running():
                    raise RuntimeError("its thread has ended")
                continue
            now = time.perf_counter() - begin
            if output.error:
                raise RuntimeError(output.error)
            fresh = list(output.generated_tokens)[len(tokens[output.request_id]) :]
            tokens[output.request_id] += fresh
            times[output.request_id] += [now] * len(fresh)
            if len(tokens[output.request_id]) >= new:
                unfinished.discard(output.request_id)
        return [*tokens.values()], [*times.values()]

    def close(self) -> None:
        self._manager.stop(block=True, timeout=5)


def start(settings: dict[str, Any]) -> Peer:
    return Peer(settings)
