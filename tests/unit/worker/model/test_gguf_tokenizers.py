"""A tokenizer out of a GGUF file gives the ids of the one that went in: K02.

What went in is put together here from what the families publish, or is SentencePiece itself.
"""

from __future__ import annotations

import io
import random
from typing import TYPE_CHECKING, Any

import gguf as format_library
import pytest
import sentencepiece
import torch
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.tiny_model import TEXT, tiny_tokenizer
from tests.unit.worker.model import tiny_gguf
from worker.detokenize import TokenBytes
from worker.model import gguf
from worker.params import StopParams

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PIECES = [
    *("the quick", " brown fox", "jumps", " over", " it's", " WE'LL", " don't", "x = f(a, b)[0];", "\tif n != 0:\n"),
    *(" 1,234.56", "007", " 3rd", "2024-11-30", "e=mc²", " naïve", " cafe\u0301", "A\u030angstro\u0308m", "ﬁ", " ½"),
    *("日本語のテキスト", "语", " 한국어", "привет, мир", " שלום", "🙂", "👩‍👩‍👧‍👦", "🇫🇷", "\u200d", "\ufeff"),
    *(" ", "  ", "    ", "\n", "\n\n", "\r\n", "\t\t", "\u00a0", "\u3000", " \n ", "</s>x", "…", "—", "``", "''"),
    *(" octavos", "octavos", " leaves", "\x00", "\x7f", "▁", "\U0010ffff", "https://example.org/a?b=c&d=%20"),
]
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_WORDS = LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
CONTROL = ("<|end|>", "<|start|>", "<s>", "</s>", "<unk>")


def texts(pieces: list[str]) -> list[str]:
    """Each piece alone, and pieces joined at random: 200 strings in all."""
    chance = random.Random(1)
    return [*pieces, *("".join(chance.choices(pieces, k=chance.randint(2, 6))) for _ in range(200 - len(pieces)))]


def by_words(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def gpt2(tokenizer: Tokenizer) -> None:
    """As it is."""


def smollm(tokenizer: Tokenizer) -> None:
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])


def llama3(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = by_words(LLAMA3_WORDS)
    tokenizer.model.ignore_merges = True


def qwen2(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = by_words(QWEN2_WORDS)


def with_a_word_that_no_merge_makes() -> Tokenizer:
    tokenizer = tiny_tokenizer()
    vocabulary, merges = tokenizer.get_vocab(), [tuple(merge.split(" ")) for merge in tiny_gguf._merges(tokenizer)]
    tokenizer.model = BPE({**vocabulary, "Ġoctavos": len(vocabulary)}, merges)
    return tokenizer


def converted(path: Path, target: Path) -> Tokenizer:
    target.mkdir()
    gguf.convert(path, target, torch.float32, lambda _: None)
    return Tokenizer.from_file(str(target / "tokenizer.json"))


@pytest.mark.parametrize(
    ("kind", "make"), [("gpt-2", gpt2), ("smollm", smollm), ("llama-bpe", llama3), ("qwen2", qwen2)]
)
def test_byte_level_vocabularies(
    kind: str, make: Callable[[Tokenizer], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = with_a_word_that_no_merge_makes()
    monkeypatch.setattr(tiny_gguf, "tiny_tokenizer", lambda: original)
    tiny_gguf.write(tmp_path / "tiny.gguf", words=kind)
    make(original)
    found = converted(tmp_path / "tiny.gguf", tmp_path / "converted")
    for text in texts([*PIECES, "<|start|>user\n", "<|end|>"]):
        assert found.encode(text).ids == original.encode(text).ids, repr(text)


def train() -> sentencepiece.SentencePieceProcessor:
    """As Llama's: BPE, bytes for what is not in the vocabulary, every space kept."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*TEXT * 20, "naïve café 1,234.56", "  two  spaces"]),
        model_writer=model,
        model_type="bpe",
        vocab_size=340,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def write(path: Path, original: Any, **flags: bool) -> None:
    size = original.get_piece_size()
    config = LlamaConfig(vocab_size=size, hidden_size=64, intermediate_size=64, num_hidden_layers=1, **HEADS)
    writer = format_library.GGUFWriter(path, "llama")
    tiny_gguf._describe(writer, config, tiny_tokenizer(), "default")
    # The words of this vocabulary, instead of those of the byte-level one.
    for key in [key for key in writer.kv_data[0] if key.startswith("tokenizer.")]:
        del writer.kv_data[0][key]
    kinds = [(original.is_unknown, 2), (original.is_control, 3), (original.is_byte, 6)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([original.id_to_piece(token) for token in range(size)])
    writer.add_token_scores([original.get_score(token) for token in range(size)])
    writer.add_token_types([next((kind for has, kind in kinds if has(token)), 1) for token in range(size)])
    writer.add_bos_token_id(original.bos_id())
    writer.add_eos_token_id(original.eos_id())
    writer.add_unk_token_id(original.unk_id())
    for key, value in flags.items():
        writer.add_bool(f"tokenizer.ggml.{key}", value)
    for name, weight in LlamaForCausalLM(config).state_dict().items():
        writer.add_tensor(tiny_gguf._name(name), tiny_gguf._order(name, weight).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


HEADS: dict[str, Any] = {
    "num_attention_heads": tiny_gguf.HEADS,
    "num_key_value_heads": tiny_gguf.KV_HEADS,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("prefix", [None, True, False])
def test_a_vocabulary_of_sentencepiece(prefix: bool | None, tmp_path: Path) -> None:
    """A space more before the text, also before one that begins with spaces, unless the file says otherwise."""
    original = train()
    write(tmp_path / "tiny.gguf", original, **({} if prefix is None else {"add_space_prefix": prefix}))
    found = converted(tmp_path / "tiny.gguf", tmp_path / "converted")
    # SentencePiece alone gives no control tokens for what looks like them.
    pieces = [piece for piece in PIECES if not any(name in piece for name in CONTROL)]
    for text in texts(pieces):
        expected = original.encode(text)
        if prefix is False:
            whole = original.encode("\n" + text)
            expected = whole[whole.index(original.piece_to_id("<0x0A>")) + 1 :]
        assert found.encode(text).ids == [original.bos_id(), *expected], repr(text)
        stream = TokenBytes.from_json(found.to_str()).stream(StopParams(max_tokens=1))
        assert "".join([*(stream.push([token]) for token in expected), stream.finish()]) == text.replace("▁", " ")
