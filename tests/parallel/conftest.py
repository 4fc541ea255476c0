"""Every test of this folder fails where the partitioner gives up on a layout while it runs."""

import pytest

# It goes from one layout to another by way of the whole array on every device.
GIVES_UP = "Involuntary full rematerialization"


@pytest.fixture(autouse=True)
def captured(capfd):
    """XLA writes to the file descriptor."""


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    result = yield
    # A test that reads capfd itself has taken what was written up to there.
    written = pyfuncitem.funcargs["capfd"].readouterr().err
    assert GIVES_UP not in written, f"the partitioner warns:\n{written}"
    return result
