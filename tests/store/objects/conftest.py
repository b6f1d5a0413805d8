import pytest

from .running import LocalStore


@pytest.fixture
def store():
    made = LocalStore()
    yield made
    made.close()
