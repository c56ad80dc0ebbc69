import pytest

from ghostexport.errors import RecipeError
from ghostexport.recipe import BuildSection
from ghostexport.runtimes.base import Tensor
from ghostexport.runtimes.nvinfer.profiles import plan_profiles

INPUTS = (
    Tensor("input_ids", "int64", ("batch", "tokens")),
    Tensor("attention_mask", "int64", ("batch", "total")),
    Tensor("past_key_values.0.key", "float16", ("batch", 2, "past", 16)),
)


def test_joint_profiles_cover_an_empty_cache_and_link_the_mask_to_past_plus_tokens():
    settings = BuildSection(max_batch=4, max_tokens=32, max_past=63)
    prefill, decode = plan_profiles(settings, INPUTS)
    assert prefill.name == "prefill" and decode.name == "decode"
    assert prefill.shapes(INPUTS) == {
        "input_ids": ((1, 1), (1, 32), (4, 32)),
        "attention_mask": ((1, 1), (1, 32), (4, 95)),
        "past_key_values.0.key": ((1, 2, 0, 16), (1, 2, 0, 16), (4, 2, 63, 16)),
    }
    assert decode.shapes(INPUTS) == {
        "input_ids": ((1, 1), (1, 1), (4, 1)),
        "attention_mask": ((1, 1), (1, 33), (4, 64)),
        "past_key_values.0.key": ((1, 2, 0, 16), (1, 2, 32, 16), (4, 2, 63, 16)),
    }


def test_a_single_profile_covers_both():
    (single,) = plan_profiles(BuildSection(profiles="single", max_tokens=8, max_past=7), INPUTS)
    assert single.tokens == (1, 8, 8) and single.past == (0, 0, 7)


def test_points_split_the_ranges_without_gap_or_overlap():
    settings = BuildSection(max_batch=8, batch_points=(1,), opt_batch=1, max_tokens=512, token_points=(16, 128))
    profiles = plan_profiles(settings, INPUTS)
    assert [p.name for p in profiles] == [
        *(f"prefill-b{b}-t{t}" for b in (1, 8) for t in (16, 128, 512)),
        "decode-b1",
        "decode-b8",
    ]
    assert [p.tokens for p in profiles[:3]] == [(1, 16, 16), (17, 128, 128), (129, 512, 512)]
    assert [p.batch for p in profiles[-2:]] == [(1, 1, 1), (2, 2, 8)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"opt_batch": 5}, "opt_batch 5 is above build.max_batch 4"),
        ({"token_points": (512,)}, "must ascend and stay below build.max_tokens 512"),
        ({"token_points": (64, 32)}, "must ascend"),
        ({"batch_points": (4,)}, "stay below build.max_batch 4"),
    ],
)
def test_contradicting_limits_are_refused(settings, message):
    with pytest.raises(RecipeError, match=message):
        plan_profiles(BuildSection(**settings), INPUTS)


def test_a_graph_with_a_static_size_refuses_other_sizes():
    inputs = (Tensor("input_ids", "int64", ("batch", 8)),)
    with pytest.raises(RecipeError, match=r"fixed tokens size of 8, but profile prefill asks for \(1, 512, 512\)"):
        plan_profiles(BuildSection(), inputs)


def test_static_inputs_are_left_out_of_a_profile():
    inputs = (*INPUTS, Tensor("scale", "float32", (1,)))
    assert "scale" not in plan_profiles(BuildSection(), inputs)[0].shapes(inputs)
