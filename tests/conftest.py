"""Fixtures of all tests.

``exported(name, dtype="float32", opset=20, **overrides)`` returns the :class:`ExportedTiny` of a tiny model: the
PyTorch model and its dense graph on disk, made by the real exporter. Every combination is exported once per test run
(5 to 15 seconds), so ask for one that another test asks for: ``llama``, ``qwen3`` and ``gemma3`` in float32 with the
default six blocks are always there. Files and models are shared: write elsewhere, and change a copy of the model.
"""

import pytest


def pytest_configure(config):
    from tests.exports import make_folder

    config.exports_folder = make_folder()


def pytest_unconfigure(config):
    from tests.exports import remove_folder

    if getattr(config, "exports_folder", None) is not None:
        remove_folder(config.exports_folder)


@pytest.fixture(scope="session")
def exported():
    from tests.exports import exported

    return exported
