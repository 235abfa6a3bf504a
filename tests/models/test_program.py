"""The program that a device gets by itself."""

from types import SimpleNamespace

import jax
import pytest

from models.core.program import default


@pytest.mark.parametrize(
    "platform, capability, dtype",
    [
        ("gpu", "7.0", "float32"),  # V100
        ("gpu", "7.5", "float32"),  # T4
        ("gpu", "8.0", "bfloat16"),
        ("gpu", "10.3", "bfloat16"),
        ("gpu", "gfx90a", "bfloat16"),  # AMD
        ("gpu", None, "bfloat16"),
        ("tpu", None, "bfloat16"),
        ("cpu", None, "float32"),
    ],
)
def test_bfloat16_where_the_device_has_it(platform, capability, dtype):
    assert default(platform, capability).dtype == dtype


@pytest.mark.parametrize("capability, dtype", [("7.5", "float32"), ("9.0", "bfloat16")])
def test_without_a_platform_the_device_here_is_asked(capability, dtype, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(compute_capability=capability)])
    assert default().dtype == dtype
