"""From one GGUF file to a directory of safetensors and a tokenizer, with nothing lost on the way.

transformers does the reading. It is lenient: tensors it has no name for are dropped, scaled rotary embeddings are read
as plain ones, a byte-level vocabulary is cut into words like GPT-2's unless its kind is known, and one of SentencePiece
marks the beginning of a text in its own way. Each of those would serve a model that is almost right, so each is checked
here and refused, or put right.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from tokenizers import decoders, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, modeling_gguf_pytorch_utils
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS, GGUF_SENTENCEPIECE_BUILDERS
from transformers.integrations.gguf.reader import read_gguf_metadata
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from worker.model.errors import ModelDamaged, ModelUnsupported
from worker.model.library import checked, quiet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    import torch
    from tokenizers import Tokenizer
    from transformers import PreTrainedModel

CONVERTER = "octavo-gguf/2"
"""Changes whenever the same file may be converted to something else."""

_GPT2_WORDS = frozenset({"gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jais"})
"""Kinds of byte-level vocabulary that cut text into words as GPT-2 does."""

_UNSTATED_WORDS = frozenset({"", "default"})

_SINGLE_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell"})
"""Kinds that also cut numbers into single digits, which transformers does not do for them."""

_COMPOSED = frozenset({"qwen2", "qwen35"})
"""Kinds whose text is brought into Unicode's composed form first."""

_WHOLE_WORDS = frozenset(
    {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "tekken"}
)
"""Kinds in which a word that is a token is that token, whether merges lead to it or not."""

_SPACE = "\u2581"
"""How SentencePiece writes a space."""


def convert(source: Path, target: Path, dtype: torch.dtype, progress: Callable[[str], None]) -> None:
    """Writes ``source`` into the directory ``target`` with its weights in ``dtype``.

    Raises:
        ModelDamaged: cut short, or tensors missing, unknown or of another shape.
        ModelUnsupported: an architecture, a rotary scaling or a vocabulary that would be read wrong.
    """
    try:
        metadata, names = read_gguf_metadata(str(source))
    except Exception as error:
        raise ModelDamaged(f"{source} is not a whole GGUF file: {error}") from error
    _refuse_lost_settings(source, metadata)
    try:
        with quiet(), _reported(progress):
            tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, local_files_only=True)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source.parent,
                gguf_file=source.name,
                quantization_config=GgufConfig(dequantize=True),
                dtype=dtype,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # so that the report has them
            )
    except NotImplementedError as error:
        raise ModelUnsupported(f"{source}: {error}") from error
    except Exception as error:
        raise ModelDamaged(f"{source} can't be read: {error}") from error
    model: PreTrainedModel = loaded[0]
    checked(loaded[1], source)
    _refuse_lost_tensors(source, model, metadata["general.architecture"], names)
    match metadata.get("tokenizer.ggml.model"):
        case "gpt2":
            _cut_words(source, tokenizer.backend_tokenizer, metadata.get("tokenizer.ggml.pre", ""))
        case "llama" if metadata["general.architecture"] not in GGUF_SENTENCEPIECE_BUILDERS:
            _mark_spaces(tokenizer.backend_tokenizer, prefix=metadata.get("tokenizer.ggml.add_space_prefix", True))
    with quiet():
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)


def _refuse_lost_settings(source: Path, metadata: dict[str, Any]) -> None:
    architecture = metadata["general.architecture"]
    scaling = metadata.get(f"{architecture}.rope.scaling.type", "none")
    if scaling != "none":
        raise ModelUnsupported(f"{source}: rotary embedding scaled as {scaling!r} is lost in reading GGUF files")


def _refuse_lost_tensors(source: Path, model: PreTrainedModel, architecture: str, names: tuple[str, ...]) -> None:
    """Tensors without a counterpart in the model: the library would not have mentioned them."""
    kind: Any = TENSOR_PROCESSORS.get(architecture, TensorProcessor)
    processor = kind(config=model.config.to_dict())
    known = get_gguf_hf_weights_map(model, processor)
    lost = sorted(set(names) - set(known))
    if lost:
        raise ModelDamaged(f"{source} has tensors that the model would not use: {', '.join(lost[:5])}")


def _cut_words(source: Path, tokenizer: Tokenizer, kind: str) -> None:
    """Sets how a byte-level vocabulary cuts text into words and tokens, as the file's ``tokenizer.ggml.pre`` asks."""
    if kind in _SINGLE_DIGITS:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif kind not in _GPT2_WORDS | _UNSTATED_WORDS and kind not in GGUF_PRE_TOKENIZER_SPLITS:
        raise ModelUnsupported(f"{source}: text would be tokenized wrong, vocabularies of kind {kind!r} are not known")
    if kind in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    if kind in _WHOLE_WORDS:
        tokenizer.model.ignore_merges = True


def _mark_spaces(tokenizer: Tokenizer, *, prefix: bool) -> None:
    """As SentencePiece does it: one more space before the text, also before one that begins with a space, or never.
    The library adds one unless there is one, and does not look whether the file wants it."""
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    tokenizer.pre_tokenizer = None
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)


@contextlib.contextmanager
def _reported(progress: Callable[[str], None]) -> Iterator[None]:
    """Sends the reading of tensors to ``progress``; the library would draw a bar of its own, whatever it was told."""
    module: Any = modeling_gguf_pytorch_utils

    def counted(tensors: Sequence[Any], **_: Any) -> Iterator[Any]:
        for index, tensor in enumerate(tensors):
            if index % 50 == 0:
                progress(f"tensor {index} of {len(tensors)}")
            yield tensor

    bar, module.tqdm = module.tqdm, counted
    try:
        yield
    finally:
        module.tqdm = bar
