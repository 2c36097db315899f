"""`octavo bench quality`: what a dtype costs in likeness, on a text: float32 is what all are compared with.

The text is cut into windows, and each token's log-probability is taken after those before it in its window; then
prompts are cut from it at many places, and continued greedily. Both are done by the worker's own runner.
"""

from __future__ import annotations

import gc
import hashlib
import math
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from tokenizers import Tokenizer

from bench.kernels_model import BLOCK_SIZE, check_runnable, chosen_kernels, runner_of
from bench.machine import describe_machine
from worker.model import loader
from worker.step import NotFinite, StepRow

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from worker.kernels.native.library import Native
    from worker.model.loader import ModelFiles
    from worker.sampling.draw import Logits
    from worker.step import Runner

TEXT: Final = Path(__file__).parent / "data" / "quality.txt"
"""Our own words, so that no model has read them, and no change of the docs changes them."""
REFERENCE: Final = "float32"
TOGETHER: Final = 16
"""Prompts that are continued at once. What becomes of one does not depend on the others."""
SCORED_AT_ONCE: Final = 128
"""Rows of logits that are widened to float64 at once."""

QUALITY_COLUMNS: Final = (
    *("dtype", "by", "perplexity", "to float32", "+-", "log-probability differs by"),
    *("first token as float32", "all new tokens"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityConfig:
    """One run. Lengths are in tokens."""

    model: str = "smollm2-135m"
    dtypes: tuple[str, ...] = ("bfloat16", "int8")
    kv_dtype: str = "auto"
    """``int8``: keys and values of all ``dtypes`` but the reference are kept in eight bits."""
    text: Path | None = None
    """A file of plain text; None: `TEXT`."""
    window: int = 512
    prompts: int = 128
    prompt_tokens: int = 64
    new: int = 8
    kernels: str = "auto"
    threads: int = 0
    """0: as torch decides."""
    cache_dir: Path = Path("~/.cache/octavo")


@dataclass(frozen=True, slots=True)
class Task:
    """A text as token ids: what is scored, and what is continued."""

    windows: tuple[list[int], ...]
    """Each with what the tokenizer puts before a text."""
    unscored: int
    """Tokens at the front of each window that nothing comes before, or that aren't the text's."""
    prompts: tuple[list[int], ...]
    new: int

    @property
    def scored(self) -> int:
        return sum(len(window) - self.unscored for window in self.windows)

    @property
    def longest(self) -> int:
        """Positions that a model must have for it."""
        return max(*(len(window) for window in self.windows), len(self.prompts[0]) + self.new)

    @property
    def blocks(self) -> int:
        together = min(TOGETHER, len(self.prompts)) * blocks_of(len(self.prompts[0]) + self.new)
        return max(together, *(blocks_of(len(window)) for window in self.windows))


@dataclass(frozen=True, slots=True)
class Likeness:
    """What a model makes of a task."""

    logprobs: torch.Tensor
    """float64 ``[scored tokens]``"""
    continued: tuple[tuple[int, ...], ...]
    """Of each prompt: its new tokens."""


def run_quality(config: QualityConfig, note: Callable[[str], None]) -> dict[str, Any]:
    """Runs float32, then each of ``config.dtypes``; returns what is written as JSON.

    Raises:
        ModelError: the model can't be found, read or run.
        NotFinite: it computes something that is no number.
        ValueError: the text can't be read or is too short, or the model's context is.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    text = _text(config.text or TEXT)
    native = chosen_kernels(config.kernels, torch.get_num_threads())
    found: dict[str, tuple[Likeness, str]] = {}
    resolved = _resolved(config, native, note)
    task = cut(text, resolved[REFERENCE], config)
    for dtype, files in resolved.items():
        if task.longest > files.context_length:
            raise ValueError(f"{files.name} has {files.context_length} positions, too few for {task.longest} tokens")
        runner, by = runner_of(files, native, task.blocks, note, eight_bit_pages=_eight_bit_pages(config, dtype))
        found[dtype] = measure(runner, task, partial(_note, note, dtype)), by
        del runner
        gc.collect()  # before the next one is read
    reference = found[REFERENCE][0]
    return {
        "machine": describe_machine(),
        "config": {**asdict(config), "text": str(config.text or TEXT.name), "cache_dir": str(config.cache_dir)},
        "threads": torch.get_num_threads(),
        "kernels": native.level if native else None,
        "text": {
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
            "words": len(text.split()),
            "scored_tokens": task.scored,
            "windows": len(task.windows),
            "prompts": len(task.prompts),
        },
        "dtypes": [
            {"dtype": dtype, "by": by, **compare(reference, likeness)} for dtype, (likeness, by) in found.items()
        ],
    }


def _resolved(config: QualityConfig, native: Native | None, note: Callable[[str], None]) -> dict[str, ModelFiles]:
    """Files of every dtype, the reference's first. What can't be run is refused before minutes are spent on others."""
    found = {}
    for dtype in dict.fromkeys((REFERENCE, *config.dtypes)):
        found[dtype] = loader.resolve(
            config.model, cache_dir=config.cache_dir, dtype=dtype, device="cpu", progress=note
        )
        check_runnable(found[dtype], native, eight_bit_pages=_eight_bit_pages(config, dtype))
    return found


def _eight_bit_pages(config: QualityConfig, dtype: str) -> bool:
    return config.kv_dtype == "int8" and dtype != REFERENCE


def cut(text: str, files: ModelFiles, config: QualityConfig) -> Task:
    """Makes windows, the last of them shorter, and prompts whose beginnings are as far apart as can be.

    Raises:
        ValueError: the text has too few tokens for so many prompts.
    """
    tokenizer = Tokenizer.from_str(files.tokenizer_json.decode())
    front = tokenizer.encode("").ids
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    room = len(ids) - config.prompt_tokens
    if room < config.prompts - 1 or room < 0:
        raise ValueError(f"the text has {len(ids)} tokens, too few for {config.prompts} prompts that differ")
    starts = [index * room // max(config.prompts - 1, 1) for index in range(config.prompts)]
    unscored = max(len(front), 1)
    cuts = [front + ids[start : start + config.window] for start in range(0, len(ids), config.window)]
    windows = tuple(window for window in cuts if len(window) > unscored)
    if not windows:
        raise ValueError(f"the text has {len(ids)} tokens, none of which comes after another; take a longer one")
    return Task(
        windows=windows,
        unscored=unscored,
        prompts=tuple(front + ids[start : start + config.prompt_tokens] for start in starts),
        new=config.new,
    )


def measure(runner: Runner, task: Task, note: Callable[[str], None]) -> Likeness:
    """Runs a task.

    Raises:
        NotFinite: logits are not numbers.
    """
    logprobs = []
    for index, window in enumerate(task.windows):
        logprobs.append(score(runner, window, task.unscored))
        note(f"window {index + 1} of {len(task.windows)}")
    continued: list[tuple[int, ...]] = []
    for first in range(0, len(task.prompts), TOGETHER):
        continued += continue_greedily(runner, task.prompts[first : first + TOGETHER], task.new)
        note(f"prompt {len(continued)} of {len(task.prompts)}")
    return Likeness(torch.cat(logprobs), tuple(continued))


def score(runner: Runner, tokens: list[int], unscored: int) -> torch.Tensor:
    """Log-probabilities of tokens but the first ``unscored`` (one at least), each after those before it; float64."""
    wanted = len(tokens) - unscored
    table = list(range(blocks_of(len(tokens))))
    logits = _numbers(runner.forward([StepRow(tokens, 0, table, wanted + 1)]))[:-1]  # nothing comes after the last
    ids = torch.tensor(tokens[unscored:])[:, None]
    found = []
    for first in range(0, wanted, SCORED_AT_ONCE):
        some = slice(first, first + SCORED_AT_ONCE)
        found.append(logits[some].double().log_softmax(dim=-1).gather(1, ids[some])[:, 0])
    return torch.cat(found)


def continue_greedily(runner: Runner, prompts: Sequence[list[int]], new: int) -> list[tuple[int, ...]]:
    """The likeliest token after each prompt, then after that, and so on; what ends a text does not end it here."""
    each = blocks_of(max(len(prompt) for prompt in prompts) + new)
    rows = [
        StepRow(prompt, 0, list(range(index * each, (index + 1) * each)), 1) for index, prompt in enumerate(prompts)
    ]
    steps: list[list[int]] = []
    for _ in range(new):
        steps.append(_numbers(runner.forward(rows)).argmax(dim=-1).tolist())
        rows = [
            StepRow([token], row.start + len(row.token_ids), row.block_table, 1)
            for row, token in zip(rows, steps[-1], strict=True)
        ]
    return list(zip(*steps, strict=True))


def compare(reference: Likeness, other: Likeness) -> dict[str, float]:
    """Figures of one beside the reference. Beside itself: ratio 1, difference 0, agreement 1.

    ``ratio`` is that of perplexities; ``ratio_error`` its standard error, from how the differences of single tokens
    are spread. ``agreement`` is the share of prompts all of whose new tokens are equal.
    """
    differences = reference.logprobs - other.logprobs
    count = len(differences)
    ratio = math.exp(differences.mean().item())
    pairs = list(zip(reference.continued, other.continued, strict=True))
    return {
        "perplexity": math.exp(-other.logprobs.mean().item()),
        "ratio": ratio,
        "ratio_error": ratio * differences.std(correction=0).item() / math.sqrt(count),
        "mean_abs_logprob_difference": differences.abs().mean().item(),
        "first_token_agreement": sum(ours[0] == theirs[0] for ours, theirs in pairs) / len(pairs),
        "agreement": sum(ours == theirs for ours, theirs in pairs) / len(pairs),
    }


def quality_cells(found: dict[str, Any]) -> tuple[Any, ...]:
    """A dtype's line of the table."""
    return (
        found["dtype"],
        found["by"],
        f"{found['perplexity']:.4f}",
        f"{found['ratio'] - 1:+.2%}",
        f"{found['ratio_error']:.2%}",
        f"{found['mean_abs_logprob_difference']:.4f}",
        f"{found['first_token_agreement']:.1%}",
        f"{found['agreement']:.1%}",
    )


def blocks_of(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)


def _note(note: Callable[[str], None], dtype: str, line: str) -> None:
    note(f"{dtype}: {line}")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} can't be read: {error}") from error


def _numbers(logits: Logits) -> torch.Tensor:
    numbers = torch.as_tensor(logits)
    if not numbers.isfinite().all():
        raise NotFinite("the model's logits are not finite")
    return numbers
