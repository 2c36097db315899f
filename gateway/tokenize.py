"""Prompts to token ids, with the tokenizer that the workers published. No model files, and no torch.

``ModelTokenizer`` is synchronous; ``TokenizerPool`` runs it in a few threads, because encoding a long prompt takes tens
of milliseconds and must not hold up anyone's stream. A short one takes less time than the way to a thread and back.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from gateway.chats import masked
from gateway.errors import AdmissionError
from gateway.text_bound import bound_of
from gateway.token_bytes import TokenBytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import TypeVar

    from tokenizers import Tokenizer

    from kvstore.registry import ModelCard

    Message = Mapping[str, Any]
    T = TypeVar("T")

SHORT: Final = 1024
"""Characters of a prompt that is encoded at once, without a thread: a few tenths of a millisecond."""

FEW: Final = 16
"""Messages of a short chat, and control tokens in them."""

_SPECIAL_NAMES: Final = ("bos_token", "eos_token", "unk_token", "pad_token")


class ModelTokenizer:
    """Tokenizer and chat template of one model. Safe to use from several threads."""

    def __init__(self, card: ModelCard) -> None:
        # Only a gateway that has met a model pays for these, in a thread.
        from tokenizers import Tokenizer

        from gateway.chat_template import ChatTemplate

        text = card.tokenizer_json.decode()
        config: dict[str, Any] = json.loads(card.tokenizer_config)
        self._fast = Tokenizer.from_str(text)
        self._bound = bound_of(card.tokenizer_json)
        # The same tokenizer for text that must not give control tokens, whatever it contains.
        self._plain = Tokenizer.from_str(text)
        self._plain.encode_special_tokens = True
        specials = {name: content for name in _SPECIAL_NAMES if (content := _content(config.get(name)))}
        added = self._fast.get_added_tokens_decoder().values()
        # The longest first, and in one pass: some names of control tokens contain others.
        control = sorted({token.content for token in added if token.special}, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, control)) or "(?!)")
        template = _template(config.get("chat_template"))
        self._template = ChatTemplate(template, specials) if template else None
        self.bytes = TokenBytes(self._fast)
        self._bos: int | None = self._fast.token_to_id(specials["bos_token"]) if "bos_token" in specials else None
        self._adds_bos = self._bos is not None and self._fast.encode("a").ids[:1] == [self._bos]

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a raw prompt. Control tokens written out in it count; one BOS where the tokenizer adds one."""
        ids = _ids(self._fast, text, add_special_tokens=True)
        return ids[1:] if self._adds_bos and ids[1:2] == [self._bos] else ids

    def check_size(self, field: str, text: str, context_length: int) -> None:
        """Refuses, with AdmissionError, text that can't fit into so many tokens, however it is tokenized: of four
        megabytes that takes seconds."""
        bound, data = self._bound, text.encode()
        if bound is not None and not bound.allows(data, context_length):
            reason = f"the context of {context_length} tokens holds at most {bound.per_token} bytes in each"
            limit = f"must be at most {context_length * bound.per_token}, as {reason}; shorten it"
            raise AdmissionError(field, f"{len(data)} bytes", limit)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these token ids, control tokens written out."""
        text: str = self._fast.decode(ids, skip_special_tokens=False)
        return text

    def encode_chat(self, messages: Sequence[Message], context_length: int, tools: Sequence[Any] = ()) -> list[int]:
        """Token ids of messages, as the template takes them (``gateway.chats``), and the opening of the answer. What
        they and the tools say never gives control tokens.

        Raises AdmissionError when the template refuses them or there is none, where it knows of no tools, and as
        ``check_size``: for the rendered prompt, because a template may leave out any part of what it is given.
        """
        if tools:
            self.check_tools()
        # Unguessable, so that no message has it. Ordinary prompts stay in one piece and encode as ever.
        mark = f"\ue000{secrets.token_hex(8)}\ue000"

        def mask(text: str) -> str:
            return self._control.sub(rf"{mark}\g<0>{mark}", text)

        # Roles are checked, and templates compare them.
        safe = [{**masked(message, mask), "role": message["role"]} for message in messages]
        pieces = self._render(safe, masked(tools, mask)).split(mark)
        self.check_size("chat.messages", "".join(pieces), context_length)
        ids: list[int] = []
        for index, piece in enumerate(pieces):
            # Every second piece is a control token's text that some message contained.
            tokenizer = self._plain if index % 2 else self._fast
            ids += _ids(tokenizer, piece, add_special_tokens=False)
        return [self._bos, *ids] if self._adds_bos and self._bos is not None and ids[:1] != [self._bos] else ids

    def check_tools(self) -> None:
        """Refuses, with AdmissionError, tools that the template would pass over."""
        try:
            takes = self._template is not None and self._template.takes_tools
        except Exception:
            takes = True  # what is wrong with its text is told by whoever renders it
        if not takes:
            raise AdmissionError("chat.tools", "set", "the model's chat template takes none; leave them out")

    def template_says(self, text: str) -> bool:
        """Whether the template for chats with tools has this text."""
        return self._template is not None and self._template.says(text)

    def warm(self) -> None:
        """Compiles the template. Raises AdmissionError as ``encode_chat``."""
        self._render([{"role": "user", "content": "a"}])

    def is_quick(self, messages: Sequence[Message]) -> bool:
        """Whether ``encode_chat`` takes no longer than a short prompt. Each control token in a message makes two pieces
        more."""
        contents = [str(message["content"]) for message in messages]
        if len(messages) > FEW or sum(map(len, contents)) > SHORT or any("tool_calls" in each for each in messages):
            return False
        return sum(len(self._control.findall(content)) for content in contents) <= FEW

    def _render(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> str:
        if self._template is None:
            raise AdmissionError("chat", "set", "the model has no chat template; send text or token_ids")
        try:
            return self._template.render(messages, tools)
        except Exception as error:
            # The template is a program that came with the model; whatever it raises is about these messages.
            reason = str(error).strip() or type(error).__name__
            limit = f"refused by the model's template: {reason}"
            raise AdmissionError("chat.messages", f"{len(messages)} messages", limit) from error


def _ids(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """A batch of one: unlike ``encode`` that lets other Python threads run meanwhile, the event loop's among them."""
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    ids: list[int] = encoding.ids
    return ids


class TokenizerPool:
    """Runs tokenizer work in its own few threads."""

    def __init__(self, threads: int) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")
        self._loading = asyncio.Lock()

    async def load(self, card: ModelCard) -> ModelTokenizer:
        """Raises what a card that makes no tokenizer raises: ValueError, KeyError, Exception of tokenizers."""
        # One at a time: that leaves the other threads to prompts.
        async with self._loading:
            return await self.run(lambda: _warmed(ModelTokenizer(card)))

    async def text(self, tokenizer: ModelTokenizer, text: str, context_length: int) -> list[int]:
        """As ``ModelTokenizer.encode_text``. Raises AdmissionError at once for text that can't fit."""
        tokenizer.check_size("text", text, context_length)
        if len(text) <= SHORT:
            return tokenizer.encode_text(text)
        return await self.run(lambda: tokenizer.encode_text(text))

    async def chat(
        self, tokenizer: ModelTokenizer, messages: Sequence[Message], context_length: int, tools: Sequence[Any] = ()
    ) -> list[int]:
        """As ``ModelTokenizer.encode_chat``."""
        if not tools and tokenizer.is_quick(messages):
            return tokenizer.encode_chat(messages, context_length)
        return await self.run(lambda: tokenizer.encode_chat(messages, context_length, tools))

    async def run(self, work: Callable[[], T]) -> T:
        """What `work` gives, which takes longer than the event loop should be held up."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    async def close(self) -> None:
        """Waits for what runs; drops what has not begun."""
        await asyncio.to_thread(self._executor.shutdown, wait=True, cancel_futures=True)


def _warmed(tokenizer: ModelTokenizer) -> ModelTokenizer:
    """With its template compiled, which takes tens of milliseconds: short chats are rendered on the event loop."""
    with suppress(AdmissionError):  # there is none, or it refuses this chat
        tokenizer.warm()
    return tokenizer


def _content(token: object) -> str:
    """A special token as tokenizer_config.json has it: its text, or an object with its text."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _template(value: object) -> str | dict[str, str] | None:
    """A chat template: its text, or a list of named ones."""
    if isinstance(value, list):
        return {str(each["name"]): str(each["template"]) for each in value}
    return value if isinstance(value, str) else None
