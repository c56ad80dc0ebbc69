"""Named devices: what each holds, and recipes that parse."""

import pytest

from ghostexport.errors import RecipeError
from ghostexport.hardware import HARDWARE, find_hardware
from ghostexport.recipe import parse_recipe

#: as TensorRT-RTX builds for SM86, 89 and 120 went, and as NVIDIA lists the units of Orin and Thor
HELD = {
    "orin": ("int8", "int4"),
    "orin-nano": ("int8", "int4"),
    "thor": ("int8", "int4", "fp8", "mxfp8", "nvfp4"),
    "rtx30": ("int8", "int4"),
    "rtx40": ("int8", "int4", "fp8", "mxfp8"),
    "rtx50": ("int8", "int4", "fp8", "mxfp8", "nvfp4"),
    "cpu": ("int8", "int4"),
}


@pytest.mark.parametrize("name", HARDWARE)
def test_what_a_device_holds_and_its_recipe(name):
    device = HARDWARE[name]
    assert device.forms == HELD[name]
    recipe = parse_recipe(
        {"model": {"source": "m"} | device.recipe["model"]}
        | {key: value for key, value in device.recipe.items() if key != "model"}
    )
    assert recipe.quantize.format == (device.form,) and device.form in device.forms
    assert recipe.model.dtype == ("float32" if name == "cpu" else "float16")
    assert recipe.build.compute_capability == ((device.capability,) if device.runtime == "tensorrt-rtx" else ())
    assert len(device.lines) == 5 and all(": " in line for line in device.lines[1:])


def test_a_form_the_device_lacks_and_an_unknown_device():
    with pytest.raises(
        RecipeError, match=r"RTX 30 series: fp8 needs SM89 .* SM86 is older; it holds int8, int4"
    ) as error:
        find_hardware("rtx30").require(["int4", "fp8"])
    assert "--quantize int4" in str(error.value)
    with pytest.raises(RecipeError, match=r"Jetson Orin Nano: nvfp4 needs SM100"):
        find_hardware("orin-nano").require(["nvfp4"])
    with pytest.raises(RecipeError, match="Did you mean 'orin'"):
        find_hardware("orrin")


def test_whose_bandwidth_is_counted_with():
    assert find_hardware("thor").bytes_per_second() == 273e9
    assert find_hardware("thor").whose_bandwidth() == "published for T5000"
    assert find_hardware("orin").bytes_per_second(204.8) == 204.8e9
    assert find_hardware("orin").whose_bandwidth(204.8) == "as given"
    assert all(device.bandwidth_of for device in HARDWARE.values() if device.bandwidth is not None)
