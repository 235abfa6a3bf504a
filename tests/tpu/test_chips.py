"""Peak FLOP/s by the names that devices give themselves."""

import pytest

from tpu.chips import peak_flops


@pytest.mark.parametrize(
    "kind, teraflops",
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA L40", 181),
        ("NVIDIA GH200 480GB", 989),
        ("Tesla T4", 65),
        ("NVIDIA B200", 2250),
        ("TPU v2", 22.5),
        ("TPU v3", 61.5),
        ("TPU v4", 275),
        ("TPU v5 lite", 197),
        ("TPU v5e", 197),
        ("TPU v5p", 459),
        ("TPU v5", 459),
        ("TPU v6 lite", 918),
        ("TPU v6e", 918),
        ("TPU7x", 1153.5),
    ],
)
def test_known_chips(kind, teraflops):
    assert peak_flops(kind) == teraflops * 1e12


@pytest.mark.parametrize("kind", ["cpu", "Quadro RTX 8000", ""])
def test_a_chip_that_is_not_in_the_table_has_no_peak(kind):
    assert peak_flops(kind) is None
