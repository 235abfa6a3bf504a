"""What answers to prompts come to, with standard errors."""

from collections.abc import Sequence

import numpy as np

from pretrain.prompting.prompts import Prompt

Figure = tuple[float, float | None]  # and its standard error, which one example does not tell


def of_likelihoods(prompts: Sequence[Prompt], found: Sequence[np.ndarray]) -> dict[str, Figure]:
    """found: f64[texts of the prompt] for each, ln p of its targets.

    -> the right targets' nats per token and per byte of UTF-8, and in how many of the examples with choices the right
    one has the highest likelihood: as a whole ("by sum"), per token, and per byte.
    """
    tokens = [np.array([len(text.tokens) - text.first for text in prompt.texts]) for prompt in prompts]
    sizes = [np.array([len(choice.encode()) for choice in prompt.example.choices]) for prompt in prompts]
    right = [prompt.example.answer for prompt in prompts]

    def of_right(arrays):
        return np.array([of[answer] for of, answer in zip(arrays, right, strict=True)])

    figures = {
        "nats per token": _ratio(-of_right(found), of_right(tokens)),
        "nats per byte": _ratio(-of_right(found), of_right(sizes)),
    }
    asked = [index for index, prompt in enumerate(prompts) if len(prompt.texts) > 1]
    by = {"by sum": [1] * len(prompts), "per token": tokens, "per byte": sizes}
    for name, weights in by.items() if asked else ():
        best = [(found[index] / weights[index]).argmax() for index in asked]
        figures[f"accuracy {name}"] = mean([choice == right[index] for choice, index in zip(best, asked, strict=True)])
    return figures


def of_answers(prompts: Sequence[Prompt], texts: Sequence[str]) -> dict[str, Figure]:
    """How many of the texts are the target, but for white space around both."""
    pairs = zip(prompts, texts, strict=True)
    return {"exact match": mean([text.strip() == prompt.example.target.strip() for prompt, text in pairs])}


def mean(values: Sequence[float]) -> Figure:
    """With its standard error."""
    values = np.asarray(values, np.float64)
    return float(values.mean()), float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else None


def with_error(figure: Figure) -> str:
    """In words."""
    value, error = figure
    return f"{value:.4f}" + ("" if error is None else f" ± {error:.4f}")


def _ratio(above: np.ndarray, below: np.ndarray) -> Figure:
    """The ratio of sums, with its standard error to first order."""
    ratio = above.sum() / below.sum()
    return float(ratio), mean((above - ratio * below) / below.mean())[1]
