import pytest

from ghostexport.errors import RecipeError
from ghostexport.plan import BlockSpan, PrunePlan


def test_adjacent_spans_merge_and_positions_count_kept_blocks():
    plan = PrunePlan.from_spans(30, [[20, 22], [10, 12], [12, 17]])
    assert plan.removed == (BlockSpan(10, 17), BlockSpan(20, 22))
    assert [b.position for b in plan.boundaries] == [10, 13]
    assert plan.num_removed == 9 and len(plan.kept) == 21
    assert plan.kept[10] == 17 and plan.new_index(17) == 10 and plan.new_index(16) is None


@pytest.mark.parametrize("block", [0, 3, 5])
def test_position_is_the_index_of_the_first_block_after_the_cut(block):
    plan = PrunePlan.from_blocks(6, [block])
    (boundary,) = plan.boundaries
    after = [b for b in plan.kept if b > block]
    assert boundary.position == (plan.new_index(after[0]) if after else len(plan.kept))


def test_single_blocks_group_into_maximal_spans():
    assert PrunePlan.from_blocks(30, [5, 3, 4, 9]).removed == (BlockSpan(3, 6), BlockSpan(9, 10))


def test_json_round_trip_and_identity_ignore_the_criterion():
    plan = PrunePlan.from_spans(8, [[2, 4]], "streamline", {"mean_cosine": [0.5]})
    again = PrunePlan.from_json(plan.to_json())
    assert again == plan
    assert again.sha256 == PrunePlan.from_spans(8, [[2, 4]]).sha256 != PrunePlan.from_spans(8, [[2, 5]]).sha256


def test_the_same_cut_of_another_depth_is_another_plan():
    assert PrunePlan.from_spans(8, [[2, 4]]).sha256 != PrunePlan.from_spans(9, [[2, 4]]).sha256
    assert PrunePlan(8).sha256 != PrunePlan(9).sha256


def test_an_empty_plan_keeps_everything():
    plan = PrunePlan(4)
    assert plan.kept == (0, 1, 2, 3) and plan.boundaries == ()


@pytest.mark.parametrize(
    ("spans", "says"),
    [
        ([[4, 2]], "reversed"),
        ([[3, 3]], "empty"),
        ([[-1, 2]], "negative"),
        ([[4, 9]], "past the model, which has 8"),
        ([[0, 8]], "removes all 8"),
        ([[1, 4], [3, 5]], "overlap"),
        ([[1, 2, 3]], "not a span"),
        ([[1, True]], "not a span"),
        (["ab"], "not a span"),
    ],
)
def test_bad_spans_are_refused_with_the_reason(spans, says):
    with pytest.raises(RecipeError, match=says):
        PrunePlan.from_spans(8, spans)
