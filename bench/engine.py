"""`octavo bench engine`: our engine on a real model, in this process; no gateway, no broker."""

from __future__ import annotations

import gc
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from bench.machine import describe_machine
from bench.offline import Answer, BadAnswerError, rate, shown, summary
from kvstore.client import BrokerConfig
from worker.assemble import build
from worker.config import WorkerConfig
from worker.params import AdmissionError, SamplingParams, StopParams
from worker.sequence import Request

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench.offline import Load
    from worker.engine import Engine

ENGINE_COLUMNS: Final = ("workload", "prompts", "tokens", "new", "tok/s", "least", "most", "per step")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How the engine is built; as a worker's options. Sizes are in tokens."""

    model: str = "smollm2-135m"
    dtype: str = "auto"
    kv_dtype: str = "auto"
    device: str = "auto"
    kernels: str = "auto"
    threads: int = 0
    """0: one per core."""
    cache_dir: Path = Path("~/.cache/octavo")
    kv_tokens: int = 32768
    block_size: int = 16
    block_run: int = 1
    cache_tokens: int | None = None
    max_running: int = 32
    step_tokens: int = 512
    chunk_tokens: int = 256


class OurEngine:
    """A worker's engine, and what it makes of prompts that are all given at once."""

    def __init__(self, config: EngineConfig, note: Callable[[str], None]) -> None:
        """Loads the model, which takes seconds. Raises ModelError."""
        nowhere = BrokerConfig(url="redis://127.0.0.1:1")  # a worker's configuration has one; nothing here uses it
        worker = WorkerConfig(id="bench", broker=nowhere, **asdict(config))
        built = build(worker, "bench", "", note)
        self.engine: Engine = built.engine
        self.vocab_size = built.card.vocab_size
        self.context_length = built.info.context_length
        self.dtype = built.info.dtype
        self._added = 0
        gc.collect()
        gc.freeze()  # as a worker does when it is loaded

    def answer(self, prompts: Sequence[Sequence[int]], new: int) -> Answer:
        """Runs them to their ends, greedy, ignoring the end of text.

        Raises:
            BadAnswerError: a request failed.
        """
        requests = [self._request(prompt, new) for prompt in prompts]
        tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
        times: dict[str, list[float]] = {request.request_id: [] for request in requests}
        begin = time.perf_counter()
        for request in requests:
            self.engine.add(request)
        while self.engine.has_work:
            stepped = self.engine.step()
            now = time.perf_counter() - begin
            for output in stepped.outputs:
                if output.error:
                    raise BadAnswerError(output.error)
                tokens[output.request_id] += output.token_ids
                times[output.request_id] += [now] * len(output.token_ids)
        return Answer([*tokens.values()], [*times.values()])

    def _request(self, prompt: Sequence[int], new: int) -> Request:
        self._added += 1
        stopping = StopParams(max_tokens=new, ignore_eos=True)
        return Request(str(self._added), tuple(prompt), SamplingParams(temperature=0.0), stopping)


def run_engine(
    config: EngineConfig, loads: Sequence[Load], rounds: int, seed: int, note: Callable[[str], None]
) -> dict[str, Any]:
    """Measures all `loads` in each of `rounds`, after a warm-up; returns what is printed as JSON.

    Raises:
        ModelError: the model can't be found, read or run.
        BadAnswerError: a request failed.
        AdmissionError: a workload's sequences have no room in the pool or the model's context.
    """
    threads = config.threads or torch.get_num_threads()
    check_lengths(loads, config.kv_tokens // config.block_size * config.block_size)  # before loading takes its time
    ours = OurEngine(replace(config, threads=threads), note)
    check_lengths(loads, ours.context_length)
    rates: dict[str, list[float]] = {load.name: [] for load in loads}
    for turn in range(rounds + 1):
        for load in loads:
            answer = ours.answer(load.prompts(turn, ours.vocab_size, seed), load.new)
            answer.check(load)
            if turn:
                rates[load.name].append(rate(load, answer))
                note(f"round {turn}, {load.name}: {rates[load.name][-1]:,.0f} tokens/s")
    return {
        "machine": describe_machine(),
        "config": {**asdict(config), "cache_dir": str(config.cache_dir), "threads": threads, "dtype": ours.dtype},
        "rounds": rounds,
        "seed": seed,
        "workloads": [
            {**asdict(load), "tokens_per_s": rates[load.name], **summary(rates[load.name])} for load in loads
        ],
    }


def check_lengths(loads: Sequence[Load], most: int) -> None:
    """Raises AdmissionError for a workload whose sequences have more than ``most`` tokens."""
    for load in loads:
        if load.longest > most:
            raise AdmissionError(
                f"workload {load.name} has sequences of {load.longest} tokens; the pool and the model's context have "
                f"room for {most}"
            )


def engine_cells(workload: dict[str, Any]) -> tuple[Any, ...]:
    """A workload's line of the table; `per step` is the time in which each of the sequences decodes one token."""
    step = 1000 * workload["count"] / workload["median"]
    return (
        workload["name"],
        workload["count"],
        workload["shared"] + workload["own"],
        workload["new"],
        *(shown(workload[name]) for name in ("median", "least", "most")),
        f"{step:.2f} ms" if workload["decoding"] else "-",
    )
