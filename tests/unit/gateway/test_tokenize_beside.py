"""Long prompts are tokenized beside the event loop, never on it: B10. No clocks here."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gateway.tokenize import FEW, SHORT, ModelTokenizer, TokenizerPool
from kvstore.registry import ModelCard

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LONG = "a book whose sheets are folded into eight leaves " * 10_000
CONTEXT = len(LONG)


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@pytest.fixture(scope="module")
def tokenizer() -> ModelTokenizer:
    vocabulary = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    plain = Tokenizer(models.BPE(vocabulary, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    plain.add_special_tokens(["<s>"])
    config = b'{"chat_template": "{{ messages[0].content }}"}'
    return ModelTokenizer(ModelCard("f", 256, (), plain.to_str().encode(), config))


@pytest.fixture
def no_turns() -> Iterator[None]:
    """A thread of Python runs until it lets go by itself: nobody takes the interpreter away from it."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("how", ["text", "chat"])
def test_python_goes_on_while_a_prompt_is_tokenized(tokenizer: ModelTokenizer, no_turns: None, how: str) -> None:
    """Between the two marks the other thread never lets go by itself: only the tokenizer's own code may, all the
    while that it works."""
    begun = ended = False
    length = seen = 0

    def work() -> None:
        nonlocal begun, ended, length
        begun = True
        ids = tokenizer.encode_text(LONG) if how == "text" else tokenizer.encode_chat([said("user", LONG)], CONTEXT)
        ended = True
        length = len(ids)

    thread = threading.Thread(target=work)
    thread.start()
    while not ended and thread.is_alive():
        seen += begun and not ended
        time.sleep(0)  # lets go
    thread.join(30)
    assert length == len(LONG)
    assert seen > 100


async def test_the_loop_turns_while_prompts_wait_for_their_tokens(tokenizer: ModelTokenizer) -> None:
    """Eight of them at once, in two threads. The loop itself opens the gate that they stand at."""
    gate, entered = threading.Event(), threading.Semaphore(0)

    class Gated(ModelTokenizer):
        def __init__(self) -> None:
            self.__dict__.update(tokenizer.__dict__)

        def encode_text(self, text: str) -> list[int]:
            entered.release()
            assert gate.wait(20), "the event loop stands still"
            return super().encode_text(text)

    pool, gated = TokenizerPool(2), Gated()
    waiting = [asyncio.create_task(pool.text(gated, LONG[:4000], CONTEXT)) for _ in range(8)]
    for _ in range(2):
        assert await asyncio.to_thread(entered.acquire, timeout=20)
    for _ in range(100):
        await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    gate.set()
    assert [len(ids) for ids in await asyncio.gather(*waiting)] == [4000] * 8
    await pool.close()


@pytest.mark.parametrize(("length", "beside"), [(SHORT, False), (SHORT + 1, True)])
async def test_only_long_prompts_take_the_way_to_a_thread(tokenizer: ModelTokenizer, length: int, beside: bool) -> None:
    threads: list[int] = []

    class Seen(ModelTokenizer):
        def __init__(self) -> None:
            self.__dict__.update(tokenizer.__dict__)

        def encode_text(self, text: str) -> list[int]:
            threads.append(threading.get_ident())
            return super().encode_text(text)

        def encode_chat(self, messages: Sequence[Any], context_length: int, tools: Sequence[Any] = ()) -> list[int]:
            threads.append(threading.get_ident())
            return super().encode_chat(messages, context_length, tools)

    pool, seen = TokenizerPool(1), Seen()
    assert len(await pool.text(seen, LONG[:length], CONTEXT)) == length
    assert len(await pool.chat(seen, [said("user", LONG[: length - 1]), said("user", "a")], CONTEXT)) == length - 1
    assert [thread != threading.get_ident() for thread in threads] == [beside] * 2
    await pool.chat(seen, [said("user", "a")] * (FEW + 1), CONTEXT)
    assert threads[-1] != threading.get_ident()
    for control_tokens, aside in ((FEW, False), (FEW + 1, True)):  # each is tokenized by itself
        await pool.chat(seen, [said("user", "<s>" * control_tokens)], CONTEXT)
        assert (threads[-1] != threading.get_ident()) == aside
    await pool.close()
