"""Eight virtual CPU devices, set before anything imports jax."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
_COUNT = "--xla_force_host_platform_device_count=8"
if _COUNT not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_COUNT}".strip()

import pytest  # noqa: E402

pytest.register_assert_rewrite("sandbox_battery")
