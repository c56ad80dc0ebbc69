"""Two processes that share the windows find what one process finds."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from ghostexport.operators import load_operators
from ghostexport.recovery.fits.solving import solve_ridge
from tests.integration.distributed_worker import work

ROOT = Path(__file__).parents[2]


def torchrun(*arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *map(str, arguments)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["whole", "streamed"])
def test_two_processes_fit_the_same_operators_as_one(how, tmp_path):
    torchrun(ROOT / "tests/integration/distributed_worker.py", tmp_path, how)
    alone = work()
    for rank in (0, 1):
        shared = torch.load(tmp_path / f"rank{rank}.pt", weights_only=False)
        for one, other in zip(shared["moments"], alone["moments"], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-9)
            same = [solve_ridge(m[0], m[1], 1e-3, m[5]) for m in (one, other)]
            assert float((same[0] - same[1]).norm() / same[1].norm()) < 1e-10
        torch.testing.assert_close(shared["ratios"], alone["ratios"], rtol=1e-10, atol=0)
        for name, tensors in alone["tensors"].items():
            for key, values in tensors.items():  # stored as float32
                np.testing.assert_allclose(shared["tensors"][name][key], values, rtol=1e-6, atol=1e-7, err_msg=name)
            for one, other in zip(shared["fits"][name], alone["fits"][name], strict=True):
                assert one["tokens"] == other["tokens"]
                assert one["nmse_held_out"] == pytest.approx(other["nmse_held_out"], rel=1e-5)


@pytest.mark.slow
def test_the_command_line_under_torchrun_writes_one_run(tiny_model, text_file, tmp_path, cli):
    flags = ("--plan", "[[2, 4]]", "--calibration", text_file, "--sequences", 80, "--length", 64, "--operator", "ghost")
    torchrun("-m", "ghostexport.cli", "recover", tiny_model, "-o", tmp_path / "two", *flags)
    code, _, err = cli("recover", tiny_model, "-o", tmp_path / "one", *flags)
    assert code == 0, err
    two, one = (load_operators(tmp_path / n / "operators" / "ghost.safetensors").operators[0] for n in ("two", "one"))
    np.testing.assert_allclose(two.delta, one.delta, rtol=1e-6, atol=1e-7)
    assert two.fit["tokens"] == one.fit["tokens"] == 80 * 64
    code, _, err = cli("recover", tmp_path / "two")
    assert code == 0 and err.count("current, kept") == 3
