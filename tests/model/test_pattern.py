"""Blocks, as users count them, become Megatron's hybrid layer pattern; what does not fit is refused in a sentence."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megagate.errors import UserError
from megagate.model.pattern import (
    check_pattern,
    derive_pattern,
    expert_blocks,
    linear_attention_blocks,
    stage_sizes,
)


@pytest.mark.parametrize(
    ("frequency", "expected"),
    [(1, "EEEEEE"), (2, "E-E-E-"), (3, "E--E--"), (6, "E-----"), ([0, 1, 1, 1, 1, 1], "-EEEEE"), ([0] * 6, "------")],
)
def test_expert_blocks(frequency: int | list[int], expected: str) -> None:
    assert expert_blocks(6, frequency, num_experts=8) == [symbol == "E" for symbol in expected]


@pytest.mark.parametrize("num_experts", [None, 0])
def test_a_dense_model_has_no_expert_blocks(num_experts: int | None) -> None:
    assert expert_blocks(3, 1, num_experts) == [False] * 3
    assert expert_blocks(3, [1, 1], num_experts) == [False] * 3  # the list describes experts, and there are none


def test_a_frequency_list_of_another_length_is_refused() -> None:
    with pytest.raises(UserError, match=re.escape("--moe-layer-freq describes 2 blocks, but --num-layers is 3")):
        expert_blocks(3, [1, 0], num_experts=4)
    with pytest.raises(UserError, match=re.escape("--linear-attention-freq describes 4 blocks, but --num-layers is 3")):
        linear_attention_blocks(3, [1, 1, 1, 0])


@pytest.mark.parametrize(
    ("frequency", "expected"),
    [(None, "******"), (1, "******"), (2, "G*G*G*"), (4, "GGG*GG"), (9, "GGGGGG"), ([0, 1, 1, 0, 0, 1], "*GG**G")],
)
def test_linear_attention_blocks(frequency: int | list[int] | None, expected: str) -> None:
    assert linear_attention_blocks(6, frequency) == [symbol == "G" for symbol in expected]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((8, 1), [8]),
        ((8, 4), [2, 2, 2, 2]),
        ((7, 4, 1), [1, 2, 2, 2]),
        ((7, 4, None, 1), [2, 2, 2, 1]),
        ((8, 3, 3, 1), [3, 4, 1]),
        ((8, 2, 5, 3), [5, 3]),
        ((3, 2, 1, 2), [1, 2]),
        ((5, 1, 5), [5]),
    ],
)
def test_stage_sizes(arguments: tuple[int, ...], expected: list[int]) -> None:
    assert stage_sizes(*arguments) == expected


@given(
    stages=st.integers(1, 6),
    share=st.integers(0, 4),
    first=st.none() | st.integers(0, 4),
    last=st.none() | st.integers(0, 4),
)
def test_stage_sizes_add_up(stages: int, share: int, first: int | None, last: int | None) -> None:
    equal = stages - (first is not None) - (last is not None)
    if equal < 0:
        return
    sizes = stage_sizes(share * equal + (first or 0) + (last or 0), stages, first, last)
    assert len(sizes) == stages
    assert sum(sizes) == share * equal + (first or 0) + (last or 0)
    assert first is None or sizes[0] == first
    assert last is None or sizes[-1] == last


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((7, 2), "7 blocks (--num-layers) do not divide evenly over 2 pipeline stages"),
        ((8, 3, 1), "8 blocks (--num-layers), of which 1 are in the first and 0 in the last stage, do not divide"),
        ((4, 2, 3, 3), "4 blocks (--num-layers), of which 3 are in the first and 3 in the last stage, do not divide"),
        ((8, 2, 3, 3), "8 blocks (--num-layers), of which 3 are in the first and 3 in the last stage, do not divide"),
        ((2, 4, 3), "2 blocks (--num-layers), of which 3 are in the first and 0 in the last stage, do not divide"),
    ],
)
def test_stages_that_do_not_divide_are_refused(arguments: tuple[int, ...], sentence: str) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)):
        stage_sizes(*arguments)


def test_derive_pattern() -> None:
    softmax = [False] * 3
    assert derive_pattern([False, True, True], softmax, [1, 2]) == "*-|*E*E"
    assert derive_pattern([True] * 3, softmax, [3]) == "*E*E*E"
    assert derive_pattern([False, True], softmax[:2], [1, 0, 1]) == "*-||*E"  # an empty stage is one all the same
    assert derive_pattern([False, True, True], [True, False, True], [2, 1]) == "G-*E|GE"


@pytest.mark.parametrize(
    ("pattern", "num_experts"), [("*-*-", None), ("*E|*-", 4), ("**E", 1), ("G-GE", 1), ("-", None), ("", None)]
)
def test_patterns_that_are_accepted(pattern: str, num_experts: int | None) -> None:
    check_pattern(pattern, num_experts)


@pytest.mark.parametrize(
    ("pattern", "num_experts", "sentence"),
    [
        (
            "M*-D",
            None,
            "--hybrid-layer-pattern 'M*-D' has 'D', 'M', for which there is no layer yet: use * (attention), G (Gated",
        ),
        ("*E/*E", 4, "--hybrid-layer-pattern '*E/*E' has '/', for which there is no layer yet"),
        ("*E", None, "--hybrid-layer-pattern '*E' has expert layers (E), but --num-experts is not given"),
        ("*E", 0, "--hybrid-layer-pattern '*E' has expert layers (E), but --num-experts is not given"),
        ("*-", 4, "--num-experts is 4, but --hybrid-layer-pattern '*-' has no expert layer (E)"),
    ],
)
def test_patterns_that_are_refused(pattern: str, num_experts: int | None, sentence: str) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)):
        check_pattern(pattern, num_experts)
