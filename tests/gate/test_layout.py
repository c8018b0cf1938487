"""The rows of linear_qkv: every part is found where the layout says, whole or sharded, and padding is zero."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megagate.errors import UserError
from megagate.gate import PRESETS, SWITCH_HEAD_PRESETS, GateConfig, QKVLayout, preset

HIDDEN_SIZE = 5
HEADWISE = [name for name, config in PRESETS.items() if config.is_fused and config.granularity == "headwise"]


def layouts() -> st.SearchStrategy[QKVLayout]:
    def build(name: str, groups: int, heads_per_group: int, channels: int, alignment: int) -> QKVLayout:
        axes = {field: getattr(preset(name), field) for field in preset(name).__dataclass_fields__}
        gate = GateConfig(**axes | {"row_alignment": alignment})
        return QKVLayout(groups * heads_per_group, groups, channels, gate)

    sizes = st.integers(1, 4)
    return st.builds(
        build,
        st.sampled_from([*PRESETS, *SWITCH_HEAD_PRESETS]),
        sizes,
        sizes,
        st.integers(1, 6),
        st.sampled_from([1, 3, 16]),
    )


def random_parts(
    layout: QKVLayout, *trailing: int
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    groups, channels = layout.num_query_groups, layout.kv_channels
    gate = torch.randn(groups * layout.gate_rows, *trailing) if layout.gate_rows else None
    query = torch.randn(layout.num_attention_heads * channels, *trailing)
    key = torch.randn(groups * layout.gate.key_experts * channels, *trailing)
    return query, gate, key, torch.randn(groups * layout.gate.value_experts * channels, *trailing)


def assert_parts_equal(actual, expected) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


@settings(max_examples=60, deadline=None)
@given(layout=layouts(), trailing=st.sampled_from([(), (HIDDEN_SIZE,)]))
def test_split_weight_inverts_merge_weight(layout: QKVLayout, trailing: tuple[int, ...]) -> None:
    parts = random_parts(layout, *trailing)
    merged = layout.merge_weight(*parts)
    assert merged.shape == (layout.total_rows, *trailing)
    assert_parts_equal(layout.split_weight(merged), parts)
    assert torch.count_nonzero(merged[layout.padding_row_mask()]) == 0
    if layout.gate_rows:
        assert torch.equal(merged[layout.gate_row_mask()], parts[1])
    assert layout.gate_row_mask().sum() == layout.num_query_groups * layout.gate_rows
    assert layout.padding_row_mask().sum() == layout.num_query_groups * (layout.gate_rows_padded - layout.gate_rows)


@settings(max_examples=60, deadline=None)
@given(layout=layouts())
def test_the_split_of_the_product_is_the_product_of_the_split(layout: QKVLayout) -> None:
    """Projecting with the merged weight and splitting gives each part's own projection, heads in order."""
    parts = random_parts(layout, HIDDEN_SIZE)
    hidden = torch.randn(3, 2, HIDDEN_SIZE)
    split = layout.split(hidden @ layout.merge_weight(*parts).T)
    channels = (layout.kv_channels, layout.gate_channels, *layout.sections[-2:])
    for actual, weight, width in zip(split, parts, channels, strict=True):
        assert (actual is None) == (weight is None)
        if weight is not None:
            torch.testing.assert_close(actual.flatten(2, -2), (hidden @ weight.T).unflatten(-1, (-1, width)))
    if layout.gate_rows:
        gated = split.query if layout.gate.is_on_query_heads else split.value
        if not layout.gate.is_switch_head:
            assert torch.broadcast_shapes(split.gate.shape, gated.shape) == gated.shape
        assert split.gate.shape[:-1] == gated.shape[:-1]


@settings(max_examples=60, deadline=None)
@given(layout=layouts(), groups_per_rank=st.integers(1, 4))
def test_a_ranks_slice_splits_into_slices_of_the_parts(layout: QKVLayout, groups_per_rank: int) -> None:
    if layout.num_query_groups % groups_per_rank:
        groups_per_rank = 1
    ranks = layout.num_query_groups // groups_per_rank
    weight = torch.randn(layout.total_rows, HIDDEN_SIZE)
    mixed = torch.randn(2, 1, layout.total_rows)
    whole_weight, whole = layout.split_weight(weight), layout.split(mixed)
    for rank in range(ranks):
        local_weight = layout.split_weight(weight.chunk(ranks)[rank])
        assert_parts_equal(local_weight, (part if part is None else part.chunk(ranks)[rank] for part in whole_weight))
        local = layout.split(mixed.chunk(ranks, dim=-1)[rank])
        assert_parts_equal(local, (part if part is None else part.chunk(ranks, dim=2)[rank] for part in whole))
        merged = layout.merge_weight(*local_weight)
        kept = ~layout.padding_row_mask().chunk(ranks)[rank]
        assert torch.equal(merged[kept], weight.chunk(ranks)[rank][kept])


def test_sdpa_elementwise_is_megatrons_own_layout() -> None:
    """Megatron's attention_output_gate: per group view(g, 2r + 2, d, H) = [q x r | gate x r | k | v]."""
    groups, heads_per_group, channels = 3, 4, 2
    layout = QKVLayout(groups * heads_per_group, groups, channels, PRESETS["sdpa-elementwise"])
    assert layout.total_rows == (2 * groups * heads_per_group + 2 * groups) * channels
    weight = torch.randn(layout.total_rows, HIDDEN_SIZE)
    query, gate, key, value = weight.view(groups, 2 * heads_per_group + 2, channels, HIDDEN_SIZE).split(
        [heads_per_group, heads_per_group, 1, 1], dim=1
    )
    expected = [part.reshape(-1, HIDDEN_SIZE) for part in (query, gate, key, value)]
    assert_parts_equal(layout.split_weight(weight), expected)


@pytest.mark.parametrize("name", [name for name, config in PRESETS.items() if not config.is_fused])
def test_without_a_fused_gate_the_layout_is_megatrons_ungated_one(name: str) -> None:
    layout = QKVLayout(6, 2, 4, PRESETS[name])
    assert layout.total_rows == (6 + 2 * 2) * 4
    assert layout.gate_rows == layout.gate_rows_padded == 0
    assert layout.split(torch.randn(1, 1, layout.total_rows)).gate is None
    assert not layout.gate_row_mask().any()
    assert not layout.padding_row_mask().any()


def test_headwise_rows_lie_after_the_queries_and_are_padded() -> None:
    layout = QKVLayout(8, 2, 3, PRESETS["sdpa-headwise"])
    assert (layout.heads_per_group, layout.gate_rows, layout.gate_rows_padded, layout.rows_per_group) == (4, 4, 16, 34)
    gate, padding = layout.gate_row_mask().nonzero().flatten(), layout.padding_row_mask().nonzero().flatten()
    assert gate.tolist() == [12, 13, 14, 15, 46, 47, 48, 49]
    assert padding.tolist() == [*range(16, 28), *range(50, 62)]


@pytest.mark.parametrize("name", HEADWISE)
def test_padding_changes_no_result_and_gets_no_gradient(name: str) -> None:
    layout = QKVLayout(4, 2, 3, PRESETS[name])
    weight = torch.randn(layout.total_rows, HIDDEN_SIZE, requires_grad=True)
    parts = layout.split(torch.randn(2, 1, HIDDEN_SIZE) @ weight.T)
    sum(part.square().sum() for part in parts).backward()
    rows_without_gradient = (weight.grad == 0).all(dim=1)
    assert torch.equal(rows_without_gradient, layout.padding_row_mask())


@pytest.mark.parametrize("name", HEADWISE)
@pytest.mark.parametrize("heads_per_group", [1, 8, 16, 17])
def test_headwise_blocks_keep_the_alignment_of_the_ungated_ones(name: str, heads_per_group: int) -> None:
    layout = QKVLayout(4 * heads_per_group, 4, 128, PRESETS[name])
    assert layout.rows_per_group % 16 == 0
    assert 0 <= layout.gate_rows_padded - layout.gate_rows < 16


@pytest.mark.parametrize("name", ["value-headwise", "sdpa-headwise", "sdpa-elementwise"])
def test_parts_are_views(name: str) -> None:
    layout = QKVLayout(4, 2, 3, PRESETS[name])
    mixed = torch.randn(5, 1, layout.total_rows)
    for part in layout.split(mixed):
        assert part.untyped_storage().data_ptr() == mixed.untyped_storage().data_ptr()


def test_impossible_head_counts_are_refused_with_the_numbers() -> None:
    with pytest.raises(UserError, match="10 attention heads do not divide evenly over 4 query groups"):
        QKVLayout(10, 4, 8)
    with pytest.raises(UserError, match="--num-query-groups must be positive, not 0"):
        QKVLayout(10, 0, 8)


def test_wrong_shapes_are_refused_with_the_numbers() -> None:
    layout = QKVLayout(4, 2, 3, PRESETS["sdpa-elementwise"])
    query, gate, key, value = random_parts(layout, HIDDEN_SIZE)
    with pytest.raises(ValueError, match="20 rows are not a whole number of KV group blocks of 18 rows"):
        layout.split(torch.randn(1, 20))
    with pytest.raises(ValueError, match="0 rows are not a whole number"):
        layout.split_weight(torch.randn(0, HIDDEN_SIZE))
    with pytest.raises(ValueError, match="gate has 6 rows, but 2 groups of 6 are 12"):
        layout.merge_weight(query, gate[:6], key, value)
    with pytest.raises(ValueError, match="6 gate rows per group, but gate is NoneType"):
        layout.merge_weight(query, None, key, value)
    with pytest.raises(ValueError, match="0 gate rows per group, but gate is Tensor"):
        QKVLayout(4, 2, 3).merge_weight(query, gate, key, value)
