"""Offline workloads and what is made of an engine's times."""

from __future__ import annotations

import pytest

from bench.offline import LOADS, Answer, BadAnswerError, Load, agreement, rate, ratios, shown, summary

SMALL = Load("A", count=2, shared=0, own=3, new=3, decoding=False)
DECODING = Load("D2", count=2, shared=0, own=3, new=4, decoding=True)


def test_prompts_are_the_same_for_the_same_seed_and_others_in_every_turn() -> None:
    load = LOADS["B"]
    prompts = load.prompts(1, 49152)
    assert prompts == load.prompts(1, 49152)
    assert [len(prompt) for prompt in prompts] == [544] * 32
    assert len({tuple(prompt[:512]) for prompt in prompts}) == 1
    assert len({tuple(prompt[512:]) for prompt in prompts}) == 32
    assert all(256 <= token < 49152 for prompt in prompts for token in prompt)
    others = [load.prompts(2, 49152), load.prompts(1, 49152, seed=1), LOADS["A"].prompts(1, 49152)]
    assert all(other[0][:16] != prompts[0][:16] for other in others)


def test_the_workloads_are_those_of_the_table() -> None:
    sizes = {name: (load.count, load.shared, load.own, load.new, load.decoding) for name, load in LOADS.items()}
    assert sizes == {
        "A": (32, 0, 128, 64, False),
        "B": (32, 512, 32, 32, False),
        "D1": (1, 0, 128, 128, True),
        "D8": (8, 0, 128, 128, True),
        "D32": (32, 0, 128, 128, True),
    }


def test_a_whole_turn_counts_from_the_first_prompt_to_the_last_token() -> None:
    answer = Answer([[1, 2, 3], [4, 5, 6]], [[1.0, 2.0, 3.0], [2.0, 3.0, 4.0]])
    answer.check(SMALL)
    assert rate(SMALL, answer) == 6 / 4


def test_decoding_counts_only_while_all_sequences_are_under_way() -> None:
    """From 2.0, when the second has its first token, to 4.0, when the first has its last."""
    answer = Answer([[1] * 4, [2] * 4], [[1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 4.0, 9.0]])
    answer.check(DECODING)
    assert rate(DECODING, answer) == 4 / 2


@pytest.mark.parametrize("times", [[[1.0] * 4, [1.0] * 4], [[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]]])
def test_times_that_tell_no_rate(times: list[list[float]]) -> None:
    with pytest.raises(BadAnswerError, match="one after the other, or all at once"):
        rate(DECODING, Answer([[1] * 4] * 2, times))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Answer([[1, 2, 3]], [[1.0] * 3]), "1 answers to 2 prompts"),
        (Answer([[1, 2, 3], [1, 2]], [[1.0] * 3, [1.0] * 2]), "answer 1 has 2 tokens, not 3"),
        (Answer([[1, 2, 3], [1, 2, 3]], [[1.0] * 2, [1.0] * 3]), "answer 0 has 2 times for 3 tokens"),
    ],
)
def test_an_answer_that_is_not_what_was_asked_for(answer: Answer, message: str) -> None:
    with pytest.raises(BadAnswerError, match=message):
        answer.check(SMALL)


def test_agreement_is_of_whole_beginnings() -> None:
    reference = [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert agreement([[1, 2, 9], [3, 4, 0], [5, 0, 6], [0, 8, 8]], reference) == 0.5
    with pytest.raises(ValueError, match="zip"):
        agreement([[1, 2]], reference)


def test_medians_and_ratios_are_over_rounds() -> None:
    assert summary([100.0, 80.0, 110.0]) == {"median": 100.0, "least": 80.0, "most": 110.0, "spread": 0.3}
    assert ratios([100.0, 90.0, 80.0], [50.0, 60.0, 80.0]) == {"median": 1.5, "least": 1.0, "most": 2.0}
    assert ratios([100.0, None, 80.0], [50.0, 60.0, None]) == {"median": 2.0, "least": 2.0, "most": 2.0}
    assert ratios([None, 1.0], [1.0, None]) is None


def test_figures_of_a_table() -> None:
    assert [shown(1234.56), shown(1.256, 2), shown(None), shown(float("nan"))] == ["1,235", "1.26", "-", "-"]
