"""How far estimates are from what was measured, where somebody published that."""

# Estimated by measured share of the peak; `python -m benchmarks.plan_calibration` makes them, and
# benchmarks/results/plans.md says of what and how thin that is. None of the estimates was above its measurement.
RATIOS = {
    "a product of 8,192^3 on v6e": 0.87,
    "a decoder of 6.7B on 64 v5p beside MaxText's of 32B": 0.97,
}


def span(estimated: float) -> tuple[float, float]:
    """(least, most): what an estimated share of the peak would be measured as by the worst ratios to both sides."""
    return estimated / max(1.0, *RATIOS.values()), min(estimated / min(1.0, *RATIOS.values()), 1.0)
