import time

import numpy as np
import pytest

from ghostexport.runtimes.building import PeakMemory


def test_the_peak_is_that_of_the_block_even_when_it_was_freed():
    with PeakMemory() as memory:
        block = np.ones(1 << 24)  # 128 MiB, every page written
        time.sleep(0.1)
        del block
    assert 128 << 20 <= memory.nbytes < 192 << 20


def test_the_thread_ends_with_the_block_also_after_an_error():
    memory = PeakMemory()
    with pytest.raises(ValueError, match="broken"), memory:
        raise ValueError("broken")
    assert not memory._thread.is_alive()
