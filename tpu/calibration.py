"""How far estimates are from what was measured, where somebody published that."""

# Generation, and estimated by measured share of the peak; `python -m benchmarks.plans calibration` makes
# them, and benchmarks/results/plans.md says of what.
RATIOS = {
    "layers of MaxText's 32B on 64 chips": ("v5p", 1.10),
    "layers of Llama2-70B on 64 chips": ("v5p", 1.03),
    "layers of MaxText's 32B on 256 chips": ("v5e", 0.90),
    "layers of Llama3.1-8B on 8 chips": ("v6e", 0.73),
    "a product of 8,192^3": ("v6e", 0.87),
}


def span(estimated: float, generation: str) -> tuple[float, float]:
    """(least, most): what an estimated share of the peak would be measured as by the worst ratios to both sides, of
    the generation where any is known, else of all.
    """
    ratios = [ratio for of, ratio in RATIOS.values() if of == generation] or [ratio for _, ratio in RATIOS.values()]
    return estimated / max(1.0, *ratios), min(estimated / min(1.0, *ratios), 1.0)
