import jax
import pytest


@pytest.fixture
def quickly_compiled():
    """For programs that take seconds to compile and run for milliseconds."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
