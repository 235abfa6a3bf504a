"""Questions to a causal decoder after others with their answers."""
