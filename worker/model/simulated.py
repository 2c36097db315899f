"""``--model simulated``: a whole worker with its pool and its traffic, whose model takes time and nothing else.

For fleets of more workers than a machine could run models, and for tests of what is around a model. Brings neither
torch nor transformers along, unless there are no native kernels.
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import TYPE_CHECKING, Final

from worker.model.errors import ModelUnsupported
from worker.model.simulated_runner import LAYOUT, SimulatedRunner, Timing

if TYPE_CHECKING:
    from collections.abc import Callable

    from worker.config import WorkerConfig
    from worker.kernels.native.library import Native
    from worker.model.prepared import Prepared
    from worker.sampling.native import NativeSampler
    from worker.sampling.sampler import TorchSampler

SIMULATED: Final = "simulated"
FORM: Final = "simulated:PREFILL_TOK_S,DECODE_MS[,SEQUENCE_MS]"
DEFAULT: Final = Timing(prefill_tok_s=1000.0, decode_s=0.02, sequence_s=0.001)
CONTEXT_LENGTH: Final = 131072
"""In tokens. What a pool can hold is less, as a rule."""


def is_simulated(spec: str) -> bool:
    """Whether ``--model`` asks for a simulated one."""
    return spec.partition(":")[0] == SIMULATED


def timing_of(spec: str) -> Timing:
    """From ``simulated`` or ``simulated:PREFILL_TOK_S,DECODE_MS[,SEQUENCE_MS]``.

    Raises:
        ModelUnsupported: it has another form, or times that can't be.
    """
    _, given, numbers = spec.partition(":")
    if not given:
        return DEFAULT
    try:
        prefill_tok_s, decode_ms, *rest = (float(number) for number in numbers.split(","))
        (sequence_ms,) = rest or (0.0,)
    except ValueError as error:
        raise ModelUnsupported(f"model {spec!r} is not of the form {FORM}") from error
    times = (decode_ms, sequence_ms)
    if not all(math.isfinite(number) for number in (prefill_tok_s, *times)) or prefill_tok_s <= 0 or min(times) < 0:
        raise ModelUnsupported(f"model {spec!r}: PREFILL_TOK_S must be above 0, times 0 ms or more")
    return Timing(prefill_tok_s, decode_ms / 1000, sequence_ms / 1000)


def look(spec: str, *, dtype: str, device: str) -> None:
    """Raises ModelUnsupported for a model that can't be made."""
    timing_of(spec)
    if dtype != "auto" or device not in ("auto", "cpu"):
        raise ModelUnsupported("a simulated model has no weights, and runs on the processor: --dtype and --device auto")


def prepare(config: WorkerConfig, progress: Callable[[str], None]) -> Prepared:
    """Makes the model. Takes milliseconds.

    Raises:
        ModelUnsupported: settings that it can't have.
    """
    from worker.model import simulated_text as text
    from worker.model.digest import joined_digest
    from worker.model.prepared import Prepared, kernels_of, texts_of

    look(config.model, dtype=config.dtype, device=config.device)
    if config.kv_dtype != "auto":
        raise ModelUnsupported("a simulated model's pages hold no keys or values: --kv-dtype auto")
    timing = timing_of(config.model)
    runner = SimulatedRunner(timing, num_blocks=config.num_blocks, block_size=config.block_size)
    tokenizer_json, tokenizer_config = text.tokenizer_json(), text.tokenizer_config()
    sampler = _sampler(kernels_of(config.kernels, 1, progress))
    progress(
        f"simulated: {timing.prefill_tok_s:g} prompt tokens a second, {timing.decode_s * 1000:g} ms a step, "
        f"{timing.sequence_s * 1000:g} ms for each further sequence"
    )
    return Prepared(
        name=SIMULATED,
        runner=runner,
        sampler=sampler,
        texts=texts_of(SIMULATED, tokenizer_json),
        fingerprint=joined_digest((fingerprint(tokenizer_json, tokenizer_config), sampler.digest)),
        device="cpu",
        dtype="none",
        context_length=CONTEXT_LENGTH,
        eos_token_ids=(text.END,),
        tokenizer_json=tokenizer_json,
        tokenizer_config=tokenizer_config,
    )


def fingerprint(tokenizer_json: bytes, tokenizer_config: bytes) -> str:
    """Of what decides tokens, which timing does not."""
    texts = [hashlib.sha256(part).hexdigest() for part in (tokenizer_json, tokenizer_config)]
    return hashlib.sha256(json.dumps([LAYOUT, *texts]).encode()).hexdigest()


def _sampler(kernels: Native | None) -> NativeSampler | TorchSampler:
    if kernels is None:
        from worker.sampling.sampler import TorchSampler

        return TorchSampler()
    from worker.sampling.native import NativeSampler

    return NativeSampler(kernels)
