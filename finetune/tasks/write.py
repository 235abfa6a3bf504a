"""Text to text: a decoder generates a target from an input that an encoder reads (Raffel et al. 2020, section 2.4) or
that precedes the target (Radford et al. 2018, section 3.3), or an encoder fills it in, mask by mask (`cloze.py`)."""

import dataclasses
from typing import Annotated, NamedTuple

import numpy as np
from tyro.conf import Suppress

from data_pipelines.command_line import unknown
from data_pipelines.errors import UserError
from data_pipelines.examples.layout import Feature
from data_pipelines.examples.next_tokens import delimiter_token
from data_pipelines.examples.text_to_text import as_batch, opening
from data_pipelines.text.encoding import Encoder
from data_pipelines.tokenizers.made import text_end
from finetune import metrics
from finetune.cloze import ClozeRows, cloze_rows
from finetune.files import Record, Told, as_text, records, tell
from finetune.rows import Row, Rows, joined
from finetune.task import FinetuningTask
from models.blocks.heads import TOKENS
from models.core.program import Program
from models.core.ranges import COUNT, check_ranges
from models.families.registry import family_of, name_of
from pretrain import metrics as texts
from pretrain.generation.settings import Decoding
from pretrain.objectives.masked_language_model import PREDICTIONS, MaskedLanguageModel
from pretrain.objectives.next_token_prediction import next_token_terms
from pretrain.objectives.protocols import CausalDecoder, ClozeWriter, EncoderDecoder
from pretrain.objectives.sequence_to_sequence import PhaseWithTargets, check_start
from pretrain.training.targets import ends, texts_after

FIGURES = "BLEU", "chrF", "ROUGE-1", "ROUGE-2", "ROUGE-L", "exact_match", "F1"
PREDICTED = ("targets", "weights")


class Pair(NamedTuple):
    """label: the right targets, of which the first is trained on; None if the file has none."""

    where: str
    text: str
    label: tuple[str, ...] | None


@dataclasses.dataclass(frozen=True)
class Write(FinetuningTask):
    """A model with a decoder generates the target of each input."""

    phase = PhaseWithTargets

    input: str = "input"  # column of inputs
    target: str = "target"  # column of targets, or of lists of right targets, of which the first is trained on
    prefix: str = ""  # text to put before each input, like "translate English to German: "
    target_length: int = 64  # maximum number of target tokens, with the end token; longer targets are cut
    metric: str = FIGURES[0]  # metric that selects the best checkpoint
    bleu_tokenizer: str = "13a"  # tokenizer of sacrebleu; zh for Chinese
    cloze: Annotated[bool, Suppress] = False  # whether the model is a `ClozeWriter`
    start: Annotated[int, Suppress] = 0  # start token of the model's targets

    def __post_init__(self):
        check_ranges(self, {"target_length": COUNT}, "--")
        if self.metric not in FIGURES:
            raise ValueError(unknown("--metric: unknown metric", self.metric, FIGURES))

    @property
    def predictions(self):
        return {"lm": PREDICTIONS if self.cloze else PREDICTED}

    @property
    def asks(self):
        return (ClozeWriter, TOKENS) if self.cloze else (CausalDecoder if self.causal else EncoderDecoder,)

    @property
    def sizes(self):
        return {"target_length": self.target_length}

    @property
    def columns(self):
        if self.causal or self.cloze:
            return {}
        of_target = Feature((self.target_length,))
        arrays = dict.fromkeys(("decoder_tokens", "decoder_segments", "targets"), of_target)
        return arrays | {"weights": of_target._replace(dtype=np.float32)}

    @property
    def of_tokens(self):
        if self.cloze:
            return {"ranks": Feature(())}
        return {"targets": Feature(()), "weights": Feature((), np.float32)} if self.causal else {}

    def suited(self, model_config):
        module = family_of(model_config).module(model_config, Program())
        if not isinstance(module, CausalDecoder | EncoderDecoder | ClozeWriter):
            raise UserError(f"--from: {name_of(model_config)} models cannot write text; use one with a decoder")
        start = module.start if isinstance(module, EncoderDecoder) else 0
        return dataclasses.replace(super().suited(model_config), cloze=isinstance(module, ClozeWriter), start=start)

    def check(self, model_config, corpus, phase):
        if not self.causal and not self.cloze:
            check_start(model_config, corpus)

    def layout(self, above, length):
        rows = super().layout(above, length)
        if not self.cloze:
            return rows
        return ClozeRows(length, above, rows.columns, rows.of_tokens, target_length=self.target_length)

    def read(self, file, is_labelled=True):
        columns = {self.input: "--input"} | ({self.target: "--target"} if is_labelled else {})
        return [self._example(record) for record in records(file, columns)]

    def _example(self, record: Record) -> Pair:
        given = record.fields.get(self.target)
        targets = given if isinstance(given, list) else [given] if given is not None else []
        if given == []:
            raise UserError(f"{record.where}: list {self.target} is empty; give a target")
        label = tuple(as_text(record, self.target, target) for target in targets) or None
        return Pair(record.where, self.prefix + as_text(record, self.input, record.fields[self.input]), label)

    def encode(self, examples, made, labels, length):
        in_one_row = self.causal or self.cloze
        first = [] if in_one_row else opening(made.special, self.start)
        room = length - self.cloze - len(first) - 1 - (self.target_length if in_one_row else 0)
        if room < 1:
            raise UserError(f"--length {length}: leaves no room for inputs beside --target-length; raise it")
        encoder, told = Encoder(made.tokenizer), Told(list)
        inputs = encoder.tokens([one.text for one in examples])
        targets = encoder.tokens([one.label[0] if one.label else "" for one in examples])
        for one, text, target in zip(examples, inputs, targets, strict=True):
            if len(text) > room:
                told[f"inputs longer than {room} tokens, which are cut"].append(one.where)
            if len(target) >= self.target_length - len(first):
                told["targets longer than --target-length, which are cut"].append(one.where)
        tell(told)
        if (end := text_end(made.special)) is None:
            raise UserError("--from: its tokenizer has no eod or sep token to end texts with; use another model")
        inputs = [text[:room] for text in inputs]
        targets = [np.array([*[*first, *target][: self.target_length - 1], end]) for target in targets]
        is_known = np.array([one.label is not None for one in examples])
        if self.cloze:
            return cloze_rows(inputs, targets, is_known, made.special)
        if self.causal:
            return _continued(inputs, targets, is_known, delimiter_token(made.special))
        return self._encoded([np.array([*first, *text, end]) for text in inputs], targets, is_known)

    def _encoded(self, tokens: list, targets: list, is_known: np.ndarray) -> Rows:
        """Return rows for the encoder, with the arrays of the decoder as columns."""
        padded = np.zeros((len(targets), self.target_length), np.int32)
        for row, target in zip(padded, targets, strict=True):
            row[: len(target)] = target
        last = np.array([len(target) - 1 for target in targets])
        batch = as_batch(np.zeros((len(targets), 1), np.int32), padded, self.start, (np.zeros_like(last), last))
        batch["weights"] *= is_known[:, None]
        return joined([Row(row) for row in tokens], {name: batch[name] for name in self.columns})

    def forward(self, model, params, batch, moment):
        if self.cloze:
            terms, _, _ = MaskedLanguageModel(next_sentence=False).loss(model, params, batch, {}, moment)
            return {}, {"lm": terms["mlm"]}
        given = model, params, batch, self.predictions, 0.0, moment
        return {}, next_token_terms(*given) if self.causal else next_token_terms(*given, "decode_targets", None)

    def generated(self, model, params, mesh, rows, made):
        prompts = [rows.tokens[begin:end] for begin, end in zip(rows.starts, rows.starts[1:], strict=False)]
        if self.causal or self.cloze:
            prompts = [row[:size] for row, size in zip(prompts, rows.columns["inputs"], strict=True)]
        if self.cloze:
            prompts = [np.append(row, made.special["mask"]) for row in prompts]
        decoding = Decoding(self.target_length, stop=tuple(sorted(ends(made))))
        return {"texts": texts_after(model, params, mesh, made, [row.tolist() for row in prompts], decoding)}

    def answers(self, examples, rows, outputs, labels):
        return [{"text": text} for text in outputs["texts"]]

    def figures(self, examples, answers, labels):
        written, right = [one["text"] for one in answers], [one.label for one in examples]
        percent, _ = texts.figures(written, right, self.bleu_tokenizer)
        return metrics.with_score({name: value / 100 for name, value in percent.items()}, self.metric)


def _continued(inputs: list, targets: list, is_known: np.ndarray, delimiter: int) -> Rows:
    """Return rows of input, delimiter and target, with the next token as the target of each token.   Column `inputs`:
    number of tokens of input and delimiter."""
    rows = [np.concatenate([text, [delimiter], target]) for text, target in zip(inputs, targets, strict=True)]
    sizes = np.array([len(text) + 1 for text in inputs])
    in_target = [np.arange(len(row) - 1) >= size - 1 for row, size in zip(rows, sizes, strict=True)]
    weights = [within * known for within, known in zip(in_target, is_known, strict=True)]
    following = {"targets": [row[1:] for row in rows], "weights": weights}
    return joined([Row(row[:-1]) for row in rows], {"inputs": sizes}, following)
