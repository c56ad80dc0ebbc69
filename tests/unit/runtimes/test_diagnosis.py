import pytest

from ghostexport.runtimes import default_runtime, doctor
from ghostexport.runtimes.gpu import find_gpu
from ghostexport.runtimes.nvinfer.diagnosis import explain

NOISE = "[E] [checkMacros.cpp::catchCudaError::250] Error Code 1: Cuda Runtime (cudaError 35: insufficient)"


@pytest.mark.parametrize(
    ("raw", "meaning"),
    [
        ("pybind11::init(): factory function returned nullptr", "no usable NVIDIA GPU or driver"),
        ("CUDA initialization failure with error: 35", "no usable NVIDIA GPU or driver"),
        ("Unable to determine GPU memory usage", "no usable NVIDIA GPU or driver"),
        ("CUDA initialization failure with error: 2", "another process holds the GPU"),
        ("libnvinfer.so.11: cannot open shared object file", "but not its libraries"),
        ("libnvinfer_lean.so.1: cannot open shared object file", "lean runtime"),
        ("failed to load GroupQueryAttention plugin", "only ONNX Runtime's providers supply"),
        ("FP32 GEMM is not supported", "no float32 kernels"),
        ("[graph_jit.cpp:10] CUDA_SUCCESS check", "needs a GPU for a refittable or stripped plan"),
        ("kOPT values for profile 0 violate shape constraints", "contradicts the graph's shapes"),
        ("std::bad_alloc", "ran out of memory"),
        ("magic tag does not match", "another version, flavour or GPU"),
    ],
)
def test_known_messages_mean_something(raw, meaning):
    assert meaning in explain(raw)[0]
    assert meaning in explain(f"{NOISE}\n{raw}")[0]  # the driver's noise never hides the reason


def test_the_noise_alone_is_the_reason_and_unknown_text_has_none():
    assert "no usable NVIDIA GPU" in explain(NOISE)[0]
    assert explain("something new") is None
    assert explain(f"something new\n{NOISE}") is None


def test_doctor_explains_every_runtime_in_one_line():
    rows = doctor()
    assert [name for name, *_ in rows] == ["tensorrt", "tensorrt-rtx", "onnxruntime"]
    for _, build, run, _, reason in rows:
        assert reason and "\n" not in reason and "Traceback" not in reason
        assert build or not run
    name, why = default_runtime()
    assert {n: b and r for n, b, r, *_ in rows}[name] and why


def test_a_missing_gpu_is_a_reason_and_not_an_error():
    gpu = find_gpu()
    assert (isinstance(gpu, str) and "\n" not in gpu) or gpu.sm.startswith("SM")
