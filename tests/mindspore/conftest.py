"""Time limits of the MindSpore tests: longer than a job's, so that a stuck rank is reported with its stacks."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "test_ms_" in item.nodeid and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(240))
