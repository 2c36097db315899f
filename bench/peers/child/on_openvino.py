"""OpenVINO GenAI's continuous batching, stepped in this process."""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any

import numpy as np


class Peer:
    """Keeps one pipeline."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import openvino  # type: ignore[import-not-found]
        import openvino_genai  # type: ignore[import-not-found]

        self.versions = {name: version(name) for name in ("openvino", "openvino-genai")}
        self._tensor = openvino.Tensor
        self._config = openvino_genai.GenerationConfig
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = settings["kv_gib"]
        scheduler.max_num_seqs = settings["max_running"]
        scheduler.enable_prefix_caching = True
        properties = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": settings["threads"]}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(settings["model"], scheduler, "CPU", properties)
        self._added = 0

    def answer(self, prompts: list[list[int]], new: int) -> tuple[list[list[int]], list[list[float]]]:
        config = self._config()
        config.max_new_tokens = new
        config.ignore_eos = True
        config.do_sample = False
        tokens: list[list[int]] = [[] for _ in prompts]
        times: list[list[float]] = [[] for _ in prompts]
        begin = time.perf_counter()
        handles = []
        for prompt in prompts:
            ids = self._tensor(np.array([prompt], dtype=np.int64))
            handles.append(self._pipeline.add_request(self._added, ids, config))
            self._added += 1
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            now = time.perf_counter() - begin
            for index, handle in enumerate(handles):
                while handle.can_read():
                    for output in handle.read().values():
                        ids = list(output.generated_ids)
                        tokens[index] += ids
                        times[index] += [now] * len(ids)
        return tokens, times


def start(settings: dict[str, Any]) -> Peer:
    return Peer(settings)
