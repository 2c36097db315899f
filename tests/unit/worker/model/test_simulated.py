"""Simulated models: the same tokens on every path, others where a page or a table is wrong, and steps that take exactly
what they should."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from worker.model.errors import ModelUnsupported
from worker.model.simulated import DEFAULT, is_simulated, look, timing_of
from worker.model.simulated_runner import LETTERS, LIKELY, UNLIKELY, SimulatedRunner, Timing
from worker.model.simulated_text import END, VOCAB_SIZE
from worker.step import StepRow

if TYPE_CHECKING:
    import numpy.typing as npt

    Logits = npt.NDArray[np.float32]

BLOCK = 4
TEXT = list(b"pages of many readers, bound into one book")
TABLE = [7, 2, 9, 0, 5, 11, 3, 8, 1, 10, 6, 4]


class Clock:
    """Stands still but for the waiting, of which it keeps the ends."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.waits: list[float] = []

    def tell(self) -> float:
        return self.now

    def wait(self, until: float) -> None:
        self.waits.append(until - self.now)
        self.now = until


def made(timing: Timing = DEFAULT, clock: Clock | None = None, num_blocks: int = 12) -> SimulatedRunner:
    clock = clock or Clock()
    return SimulatedRunner(timing, num_blocks=num_blocks, block_size=BLOCK, clock=clock.tell, wait=clock.wait)


def whole(text: list[int] = TEXT, table: list[int] = TABLE) -> Logits:
    """The logits after every token, computed in one step by a runner that has done nothing else."""
    return made().forward([StepRow(text, 0, table, len(text))])


def test_what_a_step_takes() -> None:
    clock = Clock()
    runner = made(Timing(prefill_tok_s=500.0, decode_s=0.04, sequence_s=0.002), clock)
    prompt, first, second = StepRow([1] * 20, 0, [0, 1, 2, 3, 4], 1), StepRow([1], 3, [5], 1), StepRow([1], 0, [6], 1)
    for rows, seconds in (
        ([first], 0.04),
        ([first, second], 0.042),
        ([prompt], 0.04 + 0.04),
        ([prompt, first, second], 0.04 + 0.04 + 0.002),
        ([StepRow([1] * 4, 0, [7], 0), StepRow([1] * 6, 0, [8, 9], 0)], 0.04 + 10 / 500),
    ):
        runner.forward(rows)
        assert clock.waits.pop() == pytest.approx(seconds, abs=1e-9)


def test_a_step_that_is_late_already_waits_no_longer() -> None:
    runner = SimulatedRunner(Timing(1e9, 0.0), num_blocks=1, block_size=BLOCK)
    assert runner.forward([StepRow([1], 0, [0], 1)]).shape == (1, VOCAB_SIZE)


@pytest.mark.parametrize("seed", range(20))
def test_chunks_batches_and_places_change_no_bit(seed: int) -> None:
    """Texts in chunks of any size beside each other, wherever their blocks lie, against each computed at once."""
    chance = random.Random(seed)
    texts = [[chance.randrange(VOCAB_SIZE) for _ in range(chance.randint(1, 40))] for _ in range(3)]
    blocks = chance.sample(range(40), 40)
    tables = [[blocks.pop() for _ in range(-(-len(text) // BLOCK))] for text in texts]
    runner, done, found = made(num_blocks=40), [0, 0, 0], [np.empty((0, VOCAB_SIZE))] * 3
    while any(done[index] < len(text) for index, text in enumerate(texts)):
        open_ = [index for index, text in enumerate(texts) if done[index] < len(text)]
        some = chance.sample(open_, chance.randint(1, len(open_)))
        counts = [chance.randint(1, len(texts[index]) - done[index]) for index in some]
        rows = [
            StepRow(texts[index][done[index] : done[index] + count], done[index], tables[index], count)
            for index, count in zip(some, counts, strict=True)
        ]
        parts = np.split(runner.forward(rows), np.cumsum(counts)[:-1])
        for index, count, part in zip(some, counts, parts, strict=True):
            done[index] += count
            found[index] = np.concatenate([found[index], part])
    for text, logits in zip(texts, found, strict=True):
        np.testing.assert_array_equal(logits, whole(text))


def test_a_prefix_of_another_sequence_is_read_through_the_table() -> None:
    runner = made(num_blocks=16)
    runner.forward([StepRow(TEXT[:8], 0, [3, 1], 0)])
    theirs = runner.forward([StepRow(TEXT[8:20], 8, [3, 1, 4, 5, 6], 12)])
    ours = runner.forward([StepRow(TEXT[8:20], 8, [3, 1, 9, 8, 7], 12)])
    np.testing.assert_array_equal(theirs, whole()[8:20])
    np.testing.assert_array_equal(ours, theirs)


def last(runner: SimulatedRunner, table: list[int]) -> list[int]:
    """The three likeliest tokens after the text, whose last token alone is computed."""
    logits = runner.forward([StepRow(TEXT[-1:], len(TEXT) - 1, table, 1)])
    return np.argsort(-logits[0], kind="stable")[:3].tolist()


@pytest.mark.parametrize("place", range(10))
def test_a_wrong_or_stale_page_changes_what_comes_next(place: int) -> None:
    """Wherever it is in the table: a block that was never written, another one of the same text, one place too far."""
    runner = made(num_blocks=14)
    runner.forward([StepRow(TEXT[:-1], 0, TABLE, 0)])
    right = last(runner, TABLE)
    assert right == np.argsort(-whole()[-1], kind="stable")[:3].tolist()
    for wrong in (13, TABLE[(place + 1) % 10]):
        assert last(runner, [*TABLE[:place], wrong, *TABLE[place + 1 :]]) != right
    assert last(runner, TABLE) == right
    runner.write_blocks([TABLE[place]], [bytes(runner.page_bytes)])
    assert last(runner, TABLE) != right


def test_copied_blocks_and_blocks_moved_as_bytes_are_as_good_as_the_first() -> None:
    runner, other = made(num_blocks=14), made(num_blocks=14)
    runner.forward([StepRow(TEXT[:-1], 0, TABLE, 0)])
    right = last(runner, TABLE)
    runner.copy_blocks([(7, 13), (9, 12)])
    assert last(runner, [13, 2, 12, *TABLE[3:]]) == right
    payloads = runner.read_blocks(TABLE)
    assert [len(payload) for payload in payloads] == [runner.page_bytes] * 12 == [BLOCK * 8] * 12
    other.write_blocks(TABLE[::-1], [memoryview(payload) for payload in payloads])
    assert other.read_blocks(TABLE[::-1]) == payloads
    assert other.page_layout == runner.page_layout
    assert last(other, TABLE[::-1]) == right


def test_a_payload_of_another_size_is_refused_and_nothing_written() -> None:
    runner = made()
    with pytest.raises(ValueError, match="a block has 32 bytes"):
        runner.write_blocks([0, 1], [b"x" * 32, b"x" * 31])
    assert runner.read_blocks([0, 1]) == [bytes(32)] * 2


def test_the_tokens_themselves() -> None:
    """What other versions must say too, as long as the layout has the same name."""
    runner, text = made(num_blocks=20), list(b"A book is")
    row = StepRow(text, 0, list(range(20)), 1)
    said = bytearray()
    for _ in range(40):
        said.append(int(runner.forward([row])[0].argmax()))
        row = StepRow([said[-1]], row.start + len(row.token_ids), row.block_table, 1)
    assert said.decode() == "tvopeaeoilaeao oatgaoeoadi tomsmann reas"


def test_what_logits_are_like() -> None:
    """A few letters are likely and all else hardly possible; now and then a text may end."""
    text = [random.Random(1).randrange(256) for _ in range(4000)]
    logits = made(num_blocks=1000).forward([StepRow(text, 0, list(range(1000)), 4000)])
    assert logits.dtype == np.float32
    ends = logits[:, END] > UNLIKELY
    assert 4 <= ends.sum() <= 32  # one of 256
    assert (logits[ends].argmax(axis=1) == END).all()
    letters = logits[~ends]
    assert (letters.max(axis=1) == LIKELY[0]).all()
    assert set(letters.argmax(axis=1).tolist()) == set(LETTERS.tolist())
    likely = (letters > UNLIKELY).sum(axis=1)
    assert set(likely.tolist()) == {1, 2, 3, 4}


def test_what_there_is_not_is_refused() -> None:
    runner = made()
    for row, reason in (
        (StepRow([], 0, [0], 0), "has no tokens"),
        (StepRow([1], 0, [0], 2), "more tokens than it has"),
        (StepRow([VOCAB_SIZE], 0, [0], 1), "a token id is not 0 to 257"),
        (StepRow([-1], 0, [0], 1), "a token id is not 0 to 257"),
        (StepRow([1, 2], 3, [0], 1), "too short"),
        (StepRow([1], 0, [12], 1), "a block is not 0 to 11"),
        (StepRow([1], 4, [-1, 0], 1), "a block is not 0 to 11"),
    ):
        with pytest.raises(ValueError, match=reason):
            runner.forward([row])
    assert runner.read_blocks(range(12)) == [bytes(32)] * 12
    assert runner.forward([StepRow([1], 0, [0], 0)]).shape == (0, VOCAB_SIZE)


def test_what_model_names() -> None:
    assert all(map(is_simulated, ("simulated", "simulated:1,2", "simulated:")))
    assert not any(map(is_simulated, ("simulated2", "smollm2-135m", "./simulated", "")))
    assert timing_of("simulated") == DEFAULT
    assert timing_of("simulated:500,40") == Timing(500.0, 0.04, 0.0)
    assert timing_of("simulated:2e3,0,0.5") == Timing(2000.0, 0.0, 0.0005)
    for spec in ("simulated:", "simulated:500", "simulated:500,a", "simulated:1,2,3,4", "simulated:1;2"):
        with pytest.raises(ModelUnsupported, match="is not of the form simulated:PREFILL_TOK_S,DECODE_MS"):
            timing_of(spec)
    for numbers in ("0,1", "-1,1", "1,-1", "1,1,-1", "nan,1", "1,inf"):
        with pytest.raises(ModelUnsupported, match="PREFILL_TOK_S must be above 0, times 0 ms or more"):
            look(f"simulated:{numbers}", dtype="auto", device="auto")
    for dtype, device in (("int8", "auto"), ("auto", "cuda")):
        with pytest.raises(ModelUnsupported, match="has no weights, and runs on the processor"):
            look("simulated", dtype=dtype, device=device)
