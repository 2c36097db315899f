"""The vocabulary of simulated models: a token for each byte, and two control tokens."""

from __future__ import annotations

import json
from typing import Final

from worker.detokenize import byte_alphabet

END: Final = 256
"""Ends a message, and an answer."""
START: Final = 257
"""Begins a message."""
VOCAB_SIZE: Final = 258

_CONTROL: Final = {END: "<|end|>", START: "<|start|>"}
_TEMPLATE: Final = (
    "{% for message in messages %}{{ '<|start|>' + message['role'] + '\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)


def tokenizer_json() -> bytes:
    """A byte-level BPE without merges, as ``tokenizer.json``: byte ``b`` is token ``b``."""
    letters = dict(sorted(byte_alphabet().items(), key=lambda pair: pair[1]))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [{"id": token, "content": name, **flags} for token, name in _CONTROL.items()],
            "pre_tokenizer": byte_level,
            "decoder": byte_level,
            "model": {"type": "BPE", "vocab": letters, "merges": []},
        }
    ).encode()


def tokenizer_config() -> bytes:
    """``tokenizer_config.json``: the end token and a chat template."""
    return json.dumps({"eos_token": _CONTROL[END], "chat_template": _TEMPLATE}).encode()
