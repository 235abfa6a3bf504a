"""Text from a trained model, to look at it and to evaluate it."""
