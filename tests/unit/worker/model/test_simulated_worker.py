"""A whole worker's engine on a simulated model: what it says, what it brings along, and how gateways read its card."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from gateway.tokenize import ModelTokenizer
from kvstore.client import BrokerConfig
from tests.unit.worker.engine_run import finish_all, prompt_of, request, run
from tests.unit.worker.kernels.native import NATIVE
from worker import assemble
from worker.config import WorkerConfig
from worker.detokenize import TokenBytes
from worker.model import simulated_text
from worker.model.errors import ModelUnsupported
from worker.model.simulated_text import END, START, VOCAB_SIZE
from worker.params import SamplingParams

if TYPE_CHECKING:
    from worker.assemble import Assembled
    from worker.engine import Engine
    from worker.sequence import Request

QUICK = "simulated:1e9,0"


def built(model: str = QUICK, **settings: object) -> Assembled:
    given = {"kv_tokens": 4096, "threads": 1, **settings}
    config = WorkerConfig(id="w0", broker=BrokerConfig("redis://127.0.0.1:1"), model=model, **given)  # type: ignore[arg-type]
    return assemble.build(config, "i0", "", lambda _: None)


def asked() -> list[Request]:
    """Ten requests with common prefixes, greedy and not."""
    shared = prompt_of(50, seed=9)
    sampled = SamplingParams(temperature=1.0, seed=5)
    return [
        request(f"r{index}", [*shared[: 5 * index], *prompt_of(20 + index, seed=index)], max_tokens=40, n=1 + index % 2)
        if index % 3
        else request(f"r{index}", [*shared, index], max_tokens=40, sampling=sampled)
        for index in range(10)
    ]


def said(engine: Engine, *requests: Request) -> dict[tuple[str, int], list[int]]:
    """The tokens of every choice."""
    for one in requests:
        engine.add(one)
    return {choice: answer.token_ids for choice, answer in finish_all(engine).items()}


def test_one_text_in_whatever_pool_and_company() -> None:
    """Tight pools preempt, evict and share; the answers are those of each request alone in a fresh worker."""
    alone = {choice: tokens for one in asked() for choice, tokens in said(built().engine, one).items()}
    assert len(alone) == 13
    wide = built().engine
    tight = built(kv_tokens=256, block_size=4).engine
    narrow = built(max_running=3, step_tokens=32, block_size=8).engine
    for engine in (wide, tight, narrow):
        for _ in range(2):  # the second time on what the first has left behind
            assert said(engine, *asked()) == alone
        assert engine.stats().prefix_hit > 0
    assert tight.stats().preemptions > 0
    assert tight.stats().evictions > 0


def test_a_temperature_and_a_seed_choose_among_likely_letters() -> None:
    def sampled(seed: int) -> str:
        sampling = SamplingParams(temperature=1.0, seed=seed)
        return run(built().engine, request("r", prompt_of(9), max_tokens=60, sampling=sampling))[0].text

    assert sampled(1) == sampled(1) != sampled(2)
    assert set(sampled(1)) <= set("abcdefghijklmnopqrstuvwxyz ")


def test_timing_does_not_decide_what_is_said_nor_its_name() -> None:
    quick, slow = built(), built("simulated:500000,0.01,0.01")
    assert quick.info.fingerprint == slow.info.fingerprint
    assert quick.card == slow.card
    assert quick.info.model == "simulated"
    assert (quick.info.context_length, quick.info.vocab_size) == (4096, VOCAB_SIZE)


def test_settings_that_it_cannot_have() -> None:
    with pytest.raises(ModelUnsupported, match="--kv-dtype auto"):
        built(kv_dtype="int8")
    with pytest.raises(ModelUnsupported, match="--dtype and --device auto"):
        built(dtype="bfloat16")


@pytest.mark.skipif(not NATIVE, reason="no compiler was found when the package was installed")
def test_it_brings_neither_torch_nor_transformers_along() -> None:
    code = f"""if True:
        import sys
        import worker.__main__, worker.loop, worker.metrics, kvstore.registry
        from pathlib import Path
        from kvstore.client import BrokerConfig
        from worker import assemble
        from worker.config import WorkerConfig
        config = WorkerConfig(id="w", broker=BrokerConfig("redis://127.0.0.1:1"), model={QUICK!r})
        assemble.build(config, "i", "", print)
        print(json.dumps(sorted({{name.partition(".")[0] for name in sys.modules}})))
    """.replace("import sys\n", "import json, sys\n")
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=50)
    loaded = set(json.loads(ran.stdout.splitlines()[-1]))
    assert not loaded & {"torch", "transformers", "grpc", "gguf", "accelerate", "safetensors", "rich"}


def test_without_native_kernels_torch_samples() -> None:
    plain = built(kernels="none").engine
    usual = built().engine
    one = request("r", prompt_of(30), max_tokens=40)
    assert said(plain, one) == said(usual, one)


def test_tokens_are_bytes() -> None:
    card = built().card
    texts = TokenBytes.from_json(card.tokenizer_json)
    assert [texts[token] for token in range(VOCAB_SIZE)] == [*(bytes([byte]) for byte in range(256)), b"", b""]
    tokenizer = ModelTokenizer(card)
    text = "Où est l'☃, a\tb\n\n 123?"
    assert tokenizer.encode_text(text) == list(text.encode())
    assert tokenizer.encode_text("a<|end|>") == [97, END]
    messages = [{"role": "system", "content": "be <|end|>"}, {"role": "user", "content": "hi"}]
    chat = tokenizer.encode_chat(messages, 1000)
    assert chat == [
        *(START, *b"system\nbe <|end|>", END, *b"\n"),
        *(START, *b"user\nhi", END, *b"\n"),
        *(START, *b"assistant\n"),
    ]
    assert simulated_text.tokenizer_json() == card.tokenizer_json
