import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def frozen_heap():
    """Leaves the objects of earlier tests out of the garbage collections that the benchmark makes between variants."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
