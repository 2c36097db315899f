"""What an engine refuses, and the figures that it gives of itself."""

from __future__ import annotations

import pytest

from tests.unit.worker.engine_run import BS, engine_of, finish_all, prompt_of, request, run, step
from tests.unit.worker.paged_model import TABLE, VOCAB, PagedModel
from worker.engine import Engine
from worker.params import AdmissionError, SamplingParams
from worker.sampling.sampler import TorchSampler
from worker.scheduling.block_pool import BlockPool
from worker.scheduling.scheduler import Scheduler
from worker.sequence import Finish, Request

# Admission


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (request("a", []), "the prompt is empty"),
        (request("a", [5, VOCAB]), f"token id {VOCAB}; ids are below {VOCAB}"),
        (request("a", [-1, 5]), "token id -1"),
        (request("a", prompt_of(200)), "has 200 tokens; at most 199 fit"),
        (request("a", [5], max_tokens=0), "max_tokens is 0; it must be at least 1"),  # B03, B04
        (request("a", [5], stop=("x", "")), "a stop string is empty"),  # A11
        (request("a", [5], sampling=SamplingParams(temperature=-1.0)), "temperature is -1.0"),
        (request("a", [5], sampling=SamplingParams(temperature=float("nan"))), "temperature is nan"),
        (request("a", [5], sampling=SamplingParams(temperature=float("inf"))), "temperature is inf"),
        (request("a", [5], sampling=SamplingParams(top_p=0.0)), "top_p is 0.0"),
        (request("a", [5], sampling=SamplingParams(top_p=float("nan"))), "top_p is nan"),
        (request("a", [5], sampling=SamplingParams(top_p=1.1)), "top_p is 1.1"),
        (request("a", [5], sampling=SamplingParams(top_k=-1)), "top_k is -1"),
        (request("a", [5], sampling=SamplingParams(seed=-1)), "seed is -1"),
        (request("a", [5], sampling=SamplingParams(seed=2**64)), "seed is 18446744073709551616"),
        (request("a", [5], sampling=SamplingParams(logit_bias=((64, 1.0),))), "logit_bias has token id 64"),
        (request("a", [5], stop_token_ids=(64,)), "stop_token_ids has token id 64"),
        (request("a", [5], min_tokens=9), "min_tokens is 9; it must be 0 to max_tokens, 8"),
        (request("a", [5], n=0), "n is 0"),
        (request("a", [5], priority=101), "priority is 101"),
        (request("a", [5], logprobs=65), "logprobs is 65"),
        (request("a", [5], prompt_logprobs=-1), "prompt_logprobs is -1"),
    ],
)
def test_what_can_never_run_is_refused_and_leaves_no_trace(asked: Request, message: str) -> None:
    engine, _ = engine_of()
    with pytest.raises(AdmissionError, match=message):
        engine.add(asked)
    assert not engine.has_work
    assert not engine.abort("a")
    assert run(engine, request("a", [5]))[0].finish is Finish.LENGTH


def test_a_request_that_is_running_is_not_taken_in_twice() -> None:
    engine, _ = engine_of()
    engine.add(request("a", prompt_of(3)))
    with pytest.raises(AdmissionError, match="running already"):
        engine.add(request("a", prompt_of(5)))
    assert set(finish_all(engine)) == {("a", 0)}


def test_model_and_pool_must_have_the_same_blocks() -> None:
    scheduler = Scheduler(BlockPool(8, BS), max_running=1, token_budget=1, context_length=9)
    with pytest.raises(ValueError, match="the model has 9 blocks of 4 tokens, the pool 8 of 4"):
        Engine(
            PagedModel(9, BS),
            scheduler,
            sampler=TorchSampler(),
            text_stream=TABLE.stream,
            eos_token_ids=[],
            fingerprint="x",
        )


# Figures


def test_the_figures_of_steps() -> None:
    engine, _ = engine_of(num_blocks=8, max_running=2)
    for name in "abc":
        engine.add(request(name, prompt_of(6, seed=ord(name)), max_tokens=2))
    before = engine.stats()
    assert (before.running, before.waiting, before.blocks_free) == (0, 3, 8)
    first = step(engine).stats
    assert (first.tokens, first.sequences, first.running, first.waiting) == (12, 2, 2, 1)
    assert (first.blocks_free, first.blocks_cached, first.blocks_used) == (4, 0, 4)
    assert (first.prefix_queried, first.prefix_hit, first.evictions, first.preemptions) == (12, 0, 0, 0)
    second = step(engine).stats
    assert (second.tokens, second.sequences, second.running, second.waiting) == (2, 2, 0, 1)
    assert (second.blocks_free, second.blocks_cached, second.blocks_used) == (6, 2, 0)
    finish_all(engine)
    assert engine.stats().blocks_cached == 3


def test_a_step_without_work_does_nothing() -> None:
    engine, model = engine_of()
    result = step(engine)
    assert (result.outputs, result.stats.tokens, result.stats.sequences, result.failures) == ((), 0, 0, ())
    assert model.steps == []
