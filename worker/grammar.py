"""Structures compiled by llguidance: which tokens keep an answer in its form. See ``worker.matching``."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np

from kvstore.structure import StructureRefused, grammar_of, limits, said
from octavo.v1 import inference_pb2
from worker.matching import MatchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llguidance import LLMatcher, LLTokenizer

    from kvstore.model_card import ModelCard
    from worker.matching import Mask

COMPILE_S: Final = 10.0
"""For one structure, its wait for others included. Gateways let none through that takes more than a second."""
TOKEN_S: Final = 0.05
"""Processor time for one token's mask, and for following it: all that run beside it wait for that. Masks mostly take
some hundred microseconds at most; an answer that needs more than this once ends."""
KNOWN: Final = 8
"""Structures that are kept compiled: most programs ask for the same few again and again, and a large one takes a second
and megabytes."""
LARGE: Final = 8192
"""Tokens of a vocabulary that takes long to prepare: half a second for 49,152."""


class LibraryMatcher:
    """Implements ``worker.matching.Matcher``."""

    def __init__(self, matcher: LLMatcher, words: int) -> None:
        self._matcher = matcher
        self._words = words
        self._slowest = 0.0
        """Of the times for one token."""

    def mask(self) -> Mask:
        """As the protocol says."""
        began = time.thread_time()
        mask = np.empty(self._words, dtype=np.uint32)
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._slowest = max(self._slowest, time.thread_time() - began)
        if self._matcher.is_error():  # the mask is the end token's then
            raise MatchError(f"the answer can't keep to its structure: {said(self._matcher.get_error())}")
        if self._slowest > TOKEN_S:
            raise MatchError(f"the structure takes more than {TOKEN_S * 1000:g} ms for one token; make it simpler")
        return mask

    def accept(self, token_ids: Sequence[int]) -> bool:
        """As the protocol says. What can't be is told by the next ``mask``."""
        began = time.thread_time()
        self._matcher.consume_tokens(list(token_ids))
        self._slowest = max(self._slowest, (time.thread_time() - began) / max(len(token_ids), 1))
        return self._matcher.is_stopped() and not self._matcher.is_error()


class LibraryGrammar:
    """Implements ``worker.matching.Grammar``."""

    def __init__(self, matcher: LLMatcher, words: int) -> None:
        """``matcher`` has accepted nothing; a mask has so many words."""
        self._matcher = matcher
        self._words = words

    def start(self) -> LibraryMatcher:
        """As the protocol says."""
        return LibraryMatcher(self._matcher.deep_copy(), self._words)


class Compiler:
    """Compiles structures for the tokens of one model. One caller at a time."""

    def __init__(self, card: ModelCard) -> None:
        self._card = card
        self._compiled = lru_cache(maxsize=KNOWN)(self._compile)

    def warm(self) -> None:
        """Prepares the vocabulary, which holds up all other threads. Raises StructureRefused as ``compile``."""
        _ = self._tokenizer

    def compile(self, structure: inference_pb2.Structure) -> LibraryGrammar:
        """Raises StructureRefused for what can't be compiled, or not for this model's tokens."""
        return self._compiled(structure.SerializeToString(deterministic=True))

    def _compile(self, data: bytes) -> LibraryGrammar:
        from llguidance import LLMatcher

        grammar, tokenizer = grammar_of(inference_pb2.Structure.FromString(data)), self._tokenizer
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
        if matcher.is_error():
            raise StructureRefused(said(matcher.get_error()))
        compiled = LibraryGrammar(matcher, -(-tokenizer.vocab_size // 32))
        try:
            compiled.start().mask()  # what is found out for it is kept, and the engine's is quick
        except MatchError as error:
            raise StructureRefused(str(error)) from error
        return compiled

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        card, ends = self._card, list(self._card.eos_token_ids)
        if not ends:
            raise StructureRefused("this model has no end token, with which an answer could end in form")
        size = max(card.vocab_size, max(ends) + 1)
        try:
            return LLTokenizer(card.tokenizer_json.decode(), n_vocab=size, eos_token=ends)
        except ValueError as error:
            raise StructureRefused(f"this model's tokens can't be matched: {said(str(error))}") from error


class Grammars:
    """A worker's compiler, in a thread of its own."""

    def __init__(self, card: ModelCard) -> None:
        """A large vocabulary is prepared at once, while nobody is served yet."""
        self._compiler = Compiler(card)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        if card.vocab_size >= LARGE:
            self._thread.submit(self._compiler.warm)

    async def compile(self, structure: inference_pb2.Structure) -> LibraryGrammar:
        """As ``Compiler.compile``. Raises TimeoutError when it takes too long: others' structures may be why."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(COMPILE_S):
                return await loop.run_in_executor(self._thread, self._compiler.compile, structure)
        except TimeoutError:
            raise TimeoutError(f"was not compiled within {COMPILE_S:g} s; try again later") from None

    def close(self) -> None:
        """Begins no more. What is being compiled comes to its end by itself."""
        self._thread.shutdown(wait=False, cancel_futures=True)
