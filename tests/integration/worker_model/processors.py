"""Do the bits stay the same on this processor, with these libraries and this many threads?

Runs in a process of its own, because torch and its libraries look at the processor, and at the environment that hides
parts of it, once. ``python -m tests.integration.worker_model.processors`` prints JSON about the present environment;
with ``--all``, it tries every environment below, with several numbers of threads, and prints a table.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Gemma2Config, GPT2Config, LlamaConfig, PreTrainedConfig

from tests.unit.worker.model import tiny
from tests.unit.worker.model.tiny import Text
from worker.kernels import products
from worker.kernels.linear import RowExactLinear

ENVIRONMENTS: dict[str, dict[str, str]] = {
    "as it is": {},
    "AVX-512 with bfloat16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    "AVX-512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "SSE4": {"ONEDNN_MAX_CPU_ISA": "SSE41", "ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
    "MKL compatible": {"MKL_CBWR": "COMPATIBLE"},
}
"""What to set so that a processor with AMX passes for a lesser one."""

LACK_BFLOAT16 = frozenset({"AVX-512", "AVX2", "SSE4"})

_ODD: dict[str, Any] = {"vocab_size": tiny.VOCAB, "initializer_range": 0.15, "bos_token_id": 1, "eos_token_id": 2}
_LLAMA: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 6, "max_position_embeddings": tiny.CONTEXT}

MODELS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_ODD, **_LLAMA, hidden_size=60, intermediate_size=1000, num_key_value_heads=2, head_dim=18),
    "llama-mqa": LlamaConfig(**_ODD, **_LLAMA, hidden_size=96, intermediate_size=131, num_key_value_heads=1),
    "gpt2": GPT2Config(**_ODD, n_positions=tiny.CONTEXT, n_embd=36, n_layer=2, n_head=3, n_inner=101),
    "gemma2": Gemma2Config(
        **_ODD,
        **_LLAMA,
        hidden_size=66,
        intermediate_size=89,
        num_key_value_heads=2,
        head_dim=24,
        query_pre_attn_scalar=24,
        sliding_window=37,
        pad_token_id=0,
    ),
}
"""Of sizes that no vector divides."""

SHAPES = ((576, 576), (192, 576), (1536, 576), (576, 1536), (49152, 576), (2304, 768), (768, 3072), (151, 33))
"""SmolLM2's, GPT-2's, and an odd one; ``(out_features, in_features)``."""


def check_products(dtype: torch.dtype, shapes: tuple[tuple[int, int], ...]) -> dict[str, str]:
    """Layers of real sizes: each row alone, and in batches of all sizes. Returns their forms and tiles."""
    forms = {}
    for shape in shapes:
        torch.manual_seed(0)
        layer = RowExactLinear(torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype))
        assert layer.recipe.exact, shape
        rows = torch.randn(180, shape[1]).to(dtype)
        expected = layer(rows)
        for start, stop in ((0, 1), (77, 78), (100, 133), (3, 51), (20, 150), (179, 180)):
            assert torch.equal(layer(rows[start:stop]), expected[start:stop]), (shape, start, stop)
        forms[f"{shape[1]}>{shape[0]}"] = f"{layer.recipe.form} {'/'.join(map(str, layer.recipe.tiles))}"
    return forms


def check_model(config: PreTrainedConfig, dtype: torch.dtype) -> dict[str, Any]:
    """A tiny model: solo, with 31 neighbours, on another's prefix, in any chunks. Returns its attention and digests."""
    with tempfile.TemporaryDirectory() as folder:
        runner = tiny.runner(tiny.save(config, Path(folder)), dtype, num_blocks=500)
    assert not runner.doubts, runner.doubts
    ids, free = tiny.tokens(150), list(range(500))
    random.Random(1).shuffle(free)

    def text(ids: list[int]) -> Text:
        return Text(ids, [free.pop() for _ in range(-(-len(ids) // tiny.BLOCK))])

    solo, whole = tiny.feed(runner, text(ids), *[1] * 40, 60, *[1] * 36), runner.forward([text(ids).next(150, 150)])
    mixed, company = text(ids), [text(tiny.tokens(140, seed)) for seed in range(31)]
    for count in (33, 1, 1, 5, 70, 1, 1, 17, 1, 20):
        share = [(near, min(1 + index % 5, 140 - near.done)) for index, near in enumerate(company) if near.done < 140]
        tiny.step(runner, *share[::2], (mixed, count), *share[1::2])
    prefix = Text(ids, solo.table[:4] + text(ids).table[4:], done=64)
    tiny.feed(runner, prefix, 36, 5, 1)
    for path in (solo, mixed, prefix):
        for length, logits in path.logits.items():
            assert torch.equal(logits, whole[length - 1]), length
    return {
        "attention": sorted({method.name for method in runner.attention.methods}),
        "fingerprint": runner.fingerprint,
    }


def check(threads: int, native: bool, shapes: tuple[tuple[int, int], ...]) -> dict[str, Any]:
    """All of the above, in both types. ``native`` False: as on a processor that does not multiply bfloat16."""
    torch.set_num_threads(threads)
    if not native:
        products.multiplies_bfloat16 = lambda: False  # type: ignore[assignment]
    found: dict[str, Any] = {}
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        found[name] = {"products": check_products(dtype, shapes)}
        found[name] |= {kind: check_model(config, dtype) for kind, config in MODELS.items()}
    return found


def run(environment: str, threads: int, *, native: bool = True, few: bool = False) -> dict[str, Any]:
    """`check` in a process that sees only what ``environment`` lets it see.

    Raises:
        AssertionError: it failed; with all that it said.
    """
    command = [sys.executable, "-m", __spec__.name, f"--threads={threads}"]
    command += [*([] if native else ["--no-bfloat16"]), *(["--few"] if few else [])]
    given = {**os.environ, **ENVIRONMENTS[environment], "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-bfloat16", action="store_true")
    parser.add_argument("--few", action="store_true", help="small products only")
    parser.add_argument("--all", action="store_true")
    options = parser.parse_args()
    if options.all:
        try_all()
        return
    logging.basicConfig(level=logging.WARNING)
    shapes = tuple(shape for shape in SHAPES if max(shape) < 2000) if options.few else SHAPES
    say(json.dumps(check(options.threads, not options.no_bfloat16, shapes)))


def try_all() -> None:
    """Every environment, with one to three threads; a line or a failure for each, and what was chosen there."""
    for environment in ENVIRONMENTS:
        for threads in (1, 2, 3):
            begin = time.monotonic()
            try:
                found = run(environment, threads, native=environment not in LACK_BFLOAT16)
            except AssertionError as error:
                say(f"{environment}, {threads} threads: FAILED\n{error}")
                continue
            say(f"{environment}, {threads} threads: equal bits, in {time.monotonic() - begin:.0f} s")
            for dtype, one in found.items():
                models = {name: one[name] for name in MODELS}
                say(f"  {dtype}: {one['products']}")
                say(f"    { ({name: ', '.join(made['attention']) for name, made in models.items()}) }")
                say(f"    { ({name: made['fingerprint'][:8] for name, made in models.items()}) }")


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
