import pytest

from snowskin.cli.compiled import StaleModule, refuse_stale_modules


def pytest_configure():
    try:
        refuse_stale_modules()
    except StaleModule as error:
        raise pytest.UsageError(str(error)) from None
