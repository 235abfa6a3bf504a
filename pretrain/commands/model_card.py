"""Writes the model card (README.md) of an export: training, data and evaluation."""

from collections.abc import Mapping
from pathlib import Path

from data_pipelines import corpus as corpora
from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from models.core.parameters import count
from pretrain.commands.common import add_legend
from pretrain.commands.plot import curves
from pretrain.huggingface.export import CARD, CURVES
from pretrain.huggingface.tensors import heads_beside
from pretrain.recipe import boundaries, tasks_of
from pretrain.storage.journal import read_metrics
from pretrain.storage.run_directory import RunDirectory
from pretrain.training.assembly import optimizer_in
from pretrain.training.opened import Opened

# End of a transformers class name -> its task on huggingface.co/tasks
TASKS = {
    "PreTraining": "fill-mask",
    "MaskedLM": "fill-mask",
    "LMHeadModel": "text-generation",
    "CausalLM": "text-generation",
    "ConditionalGeneration": "text2text-generation",
    "SequenceClassification": "text-classification",
    "TokenClassification": "token-classification",
    "QuestionAnswering": "question-answering",
    "MultipleChoice": "multiple-choice",
}


def write_card(folder: Path, title: str, opened: Opened, architecture: str | None, license_name: str) -> None:
    """Write the card and a plot of the learning curves into the folder of a run's export.   architecture: the
    transformers class, None if there is none.   license_name: its Hugging Face name, like apache-2.0."""
    directory = RunDirectory(opened.source)
    known = _corpora(directory)
    sections = [
        _header(architecture, license_name, known),
        f"# {title}",
        _summary(opened, architecture),
        "## Training\n\n" + _table(_training(opened, directory)),
        "## Data\n\n" + _table(_data(directory, known)),
    ]
    if evaluations := [one for one in read_metrics(directory, "eval") if one["step"] <= opened.step]:
        figures = {name: f"{value:.5g}" for name, value in evaluations[-1].items() if name not in ("kind", "step")}
        step = evaluations[-1]["step"]
        what = ", of the last checkpoint, not of the mean" if opened.averaged or opened.ema else ""
        sections.append(f"## Evaluation\n\nHeld-out metrics after step {step:,}{what}.\n\n" + _table(figures))
    if any(read_metrics(directory, kind) for kind in ("train", "eval")):
        draw_curves(opened.source, folder / CURVES)
        sections.append(f"![Learning curves]({CURVES})")
    (folder / CARD).write_text("\n\n".join(sections) + "\n", "utf-8")


def draw_curves(run: Path, file: Path) -> None:
    """Plot the learning curves of a run into a file."""
    figure, marks, columns = curves([run])
    add_legend(figure, marks, columns)
    figure.savefig(file, dpi=110)


def _corpora(directory: RunDirectory) -> dict[str, Corpus]:
    """Return the run's corpora by name; empty if one is no longer there."""
    try:
        return directory.open_corpora()
    except UserError:
        return {}


def _header(architecture: str | None, license_name: str, known: Mapping[str, Corpus]) -> str:
    """Return the metadata that the Hugging Face hub sorts models by."""
    from huggingface_hub import ModelCardData

    languages = {code for corpus in known.values() for code in _values(corpus, "languages")}
    task = next((task for ending, task in TASKS.items() if architecture and architecture.endswith(ending)), None)
    library = "transformers" if architecture else None
    fields = ModelCardData(
        language=sorted(languages) or None, license=license_name, library_name=library, pipeline_tag=task, tags=["jax"]
    )
    return f"---\n{fields.to_yaml()}\n---"


def _summary(opened: Opened, architecture: str | None) -> str:
    recipe, family = opened.recipe, type(opened.config).__name__.removesuffix("Config")
    text = (
        f"{family} with {count(opened.params) / 1e6:.1f}M parameters, trained for {opened.step:,} of {recipe.steps:,} "
    )
    text += f"steps (recipe `{recipe.name}`, {recipe.source})."
    if opened.averaged:
        text += f" Its weights are the mean of checkpoints, of steps {', '.join(f'{at:,}' for at in opened.averaged)}."
    if opened.ema:
        text += f" Its weights are a running mean (decay {optimizer_in(recipe, opened.run.phase).ema})."
    for head in heads_beside(opened.config, opened.params):
        text += f" Its {head} is in `{head}.safetensors`, which transformers does not read."
    if architecture is None:
        return text + " transformers has no class for it."
    lines = f"from transformers import AutoTokenizer, {architecture}", "", "folder = ..."
    lines += f"model = {architecture}.from_pretrained(folder)", "tokenizer = AutoTokenizer.from_pretrained(folder)"
    return "\n".join([text, "", "```python", *lines, "```"])


def _training(opened: Opened, directory: RunDirectory) -> dict[str, str]:
    recipe, about = opened.recipe, directory.read_run()
    ends, found = [0, *boundaries(recipe)], {}
    for number, phase in enumerate(recipe.phases):
        tasks = tasks_of(recipe, phase)
        name = f"phase {number + 1}" if len(recipe.phases) > 1 else "rows"
        names = ", ".join(dict.fromkeys(type(task.objective).__name__ for task in tasks))
        found[name] = f"steps {ends[number]:,} to {ends[number + 1]:,}, {phase}, {names}"
    found |= {"peak learning rate": f"{recipe.schedule.peak:g}", "seed": str(recipe.seed)}
    if labels := getattr(opened.config, "labels", ()):
        found["labels"] = ", ".join(labels)
    found |= {"initial weights": Path(about["init_from"]).name} if about["init_from"] else {}
    named = {name: version for name in ("jax", "flax", "code") if (version := about["versions"].get(name))}
    return found | {"hardware": about["device"], "software": ", ".join(f"{name} {named[name]}" for name in named)}


def _data(directory: RunDirectory, known: Mapping[str, Corpus]) -> dict[str, str]:
    """Return a description of each corpus, without paths of the machine."""
    found = {}
    for name, path in corpora.named(directory.read_run()["corpus"]).items():
        title = Path(path).name if name == "" else f"{name}: {Path(path).name}"
        is_examples = Path(path).is_file()  # of a finetuned model
        found[title] = "labelled examples" if is_examples else "not available when this card was written"
        if corpus := known.get(name):
            train, held_out = corpus.size("train"), corpus.size("heldout")
            found[title] = (
                f"{train['documents']:,} documents, {train['tokens']:,} tokens; {held_out['documents']:,} held-out "
                f"documents; vocabulary of {corpus.vocab_size:,} tokens"
            )
            if sources := _values(corpus, "sources"):
                found[title] += "; sources: " + ", ".join(source.rsplit("/")[-1] for source in sources)
    return found


def _values(corpus: Corpus, field: str) -> list[str]:
    """Return the values of a document field."""
    return corpus.manifest["fields"].get(field, {}).get("values", [])


def _table(rows: Mapping[str, str]) -> str:
    return "\n".join(
        ["| | |", "|---|---|", *(f"| {name.replace('_', ' ')} | {value} |" for name, value in rows.items())]
    )
