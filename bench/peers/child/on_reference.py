"""The weights that all are given, computed in float32 by transformers: what greedy decoding should have said."""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any

import torch


class Peer:
    """Keeps the model."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(settings["threads"])
        self.versions = {name: version(name) for name in ("transformers", "torch")}
        self._model: Any = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0  # asked for, and never used: all prompts are equally long

    def answer(self, prompts: list[list[int]], new: int) -> tuple[list[list[int]], list[list[float]]]:
        """The times are all that of the end."""
        begin = time.perf_counter()
        given = torch.tensor(prompts)
        with torch.inference_mode():
            made = self._model.generate(
                given, attention_mask=torch.ones_like(given), max_new_tokens=new, do_sample=False
            )
        now = time.perf_counter() - begin
        return made[:, given.shape[1] :].tolist(), [[now] * new for _ in prompts]


def start(settings: dict[str, Any]) -> Peer:
    return Peer(settings)
