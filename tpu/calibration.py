"""How far estimates are from published measurements."""

# TPU generation, and the ratio of estimated to measured share of the peak, by `python -m benchmarks.plans calibration`;
# benchmarks/results/plans.md says what was measured.
RATIOS = {
    "layers of MaxText's 32B on 64 chips": ("v5p", 1.10),
    "layers of Llama2-70B on 64 chips": ("v5p", 1.03),
    "layers of MaxText's 32B on 256 chips": ("v5e", 0.90),
    "layers of Llama3.1-8B on 8 chips": ("v6e", 0.73),
    "a product of 8,192^3": ("v6e", 0.87),
}


def span(estimated: float, generation: str) -> tuple[float, float]:
    """Return (least, most): the range of the measured share of the peak for an estimated one, by the extreme ratios of
    the generation, or of all generations if none is known for it.
    """
    ratios = [ratio for name, ratio in RATIOS.values() if name == generation]
    ratios = ratios or [ratio for _, ratio in RATIOS.values()]
    return estimated / max(1.0, *ratios), min(estimated / min(1.0, *ratios), 1.0)
