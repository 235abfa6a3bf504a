"""What answers to prompts come to, with standard errors."""

from collections.abc import Sequence

import numpy as np

from pretrain.prompting.prompts import Prompt

Figure = tuple[float, float | None]  # and its standard error, which one example does not tell


def of_likelihoods(prompts: Sequence[Prompt], found: np.ndarray) -> dict[str, Figure]:
    """found: f64[texts], ln p of the texts of all prompts in turn.

    -> the right targets' nats per token and per byte of UTF-8, and in how many of the examples with choices the right
    one has the highest likelihood: as a whole ("by sum"), per token, and per byte.
    """
    ends = np.cumsum([len(prompt.texts) for prompt in prompts])
    by_prompt = np.split(found, ends[:-1])
    tokens = [np.array([len(text.tokens) - text.first for text in prompt.texts]) for prompt in prompts]
    sizes = [np.array([len(choice.encode()) for choice in prompt.example.choices]) for prompt in prompts]
    right = [prompt.example.answer for prompt in prompts]
    of_right = lambda arrays: np.array([of[answer] for of, answer in zip(arrays, right, strict=True)])
    figures = {
        "nats per token": _ratio(-of_right(by_prompt), of_right(tokens)),
        "nats per byte": _ratio(-of_right(by_prompt), of_right(sizes)),
    }
    asked = [index for index, prompt in enumerate(prompts) if len(prompt.texts) > 1]
    for name, weights in {"by sum": None, "per token": tokens, "per byte": sizes}.items() if asked else ():
        score = lambda index, weights=weights: by_prompt[index] / (1 if weights is None else weights[index])
        figures[f"accuracy {name}"] = mean([score(index).argmax() == right[index] for index in asked])
    return figures


def mean(values: Sequence[float]) -> Figure:
    """With its standard error."""
    values = np.asarray(values, np.float64)
    return float(values.mean()), float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else None


def _ratio(above: np.ndarray, below: np.ndarray) -> Figure:
    """The ratio of sums, with its standard error to first order."""
    ratio = above.sum() / below.sum()
    return float(ratio), mean((above - ratio * below) / below.mean())[1]
