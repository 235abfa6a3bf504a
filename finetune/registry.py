"""The tasks by their names in `finetune run` and recipe.json."""

from finetune.task import FinetuningTask
from finetune.tasks.answer import Answer
from finetune.tasks.choose import Choose
from finetune.tasks.classify import Classify
from finetune.tasks.tag import Tag
from finetune.tasks.write import Write
from finetune.teaching import Layers
from pretrain.recipe import OBJECTIVES

TASKS: dict[str, type[FinetuningTask]] = {
    "answer": Answer,
    "choose": Choose,
    "classify": Classify,
    "tag": Tag,
    "write": Write,
}
OBJECTIVES.update(TASKS | {"layers": Layers})  # so that a run's recipe can be read wherever this is imported
