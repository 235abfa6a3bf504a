"""SentencePiece vocabularies, tokenised as the Hugging Face classes of XLNet, ALBERT and T5 do.

`sentencepiece` trains the vocabulary and describes a spiece.model. Text is encoded by `tokenizers`, in the pipeline
that those classes build around a vocabulary: quotes, accents, case; then words between white space, with ▁ before each.
"""

import base64
import io
import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import sentencepiece
from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory, text_format
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from data_pipelines.errors import UserError
from data_pipelines.text.encoding import WORD
from data_pipelines.tokenizers.made import Made, names_in, special_ids, surround
from data_pipelines.tokenizers.training import Training, bounded, count_words

COVERAGE = 0.99995  # share of the text's characters that get a piece (XLNet's value); the others are <unk>
THREADS = 16  # fixed, since scores are summed per thread and the number changes the result
DIGIT_COMMA = re.compile(r"(?<=\d)(?=,)")  # no piece spans it: XLNet's and ALBERT's code cuts there too
CUT = "\x1f"  # white space, so it is in no word
NUMBERED = {"bos_id": "<s>", "eos_id": "</s>", "pad_id": "<pad>"}  # the trainer's own id options, besides `unk_id`
INPUTS = ["input_ids", "token_type_ids", "attention_mask"]  # transformers 5 omits the types by default
UNIGRAM = 1  # TrainerSpec.ModelType
USER_DEFINED = 4  # ModelProto.SentencePiece.Type
# The fields of a spiece.model that a tokenizer needs, with their numbers in sentencepiece_model.proto: the module that
# comes with `sentencepiece` requires a newer protobuf than some environments have
PROTO = """
name: "spiece.proto"
message_type {
  name: "Piece"
  field { name: "piece" number: 1 label: LABEL_REQUIRED type: TYPE_STRING }
  field { name: "score" number: 2 label: LABEL_OPTIONAL type: TYPE_FLOAT }
  field { name: "type" number: 3 label: LABEL_OPTIONAL type: TYPE_INT32 default_value: "1" }
}
message_type {
  name: "Trainer"
  field { name: "model_type" number: 3 label: LABEL_OPTIONAL type: TYPE_INT32 default_value: "1" }
}
message_type {
  name: "Normalizer"
  field { name: "precompiled_charsmap" number: 2 label: LABEL_OPTIONAL type: TYPE_BYTES }
}
message_type {
  name: "Model"
  field { name: "pieces" number: 1 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: "Piece" }
  field { name: "trainer" number: 2 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: "Trainer" }
  field { name: "normalizer" number: 3 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: "Normalizer" }
}
"""
POOL = descriptor_pool.DescriptorPool()
POOL.Add(text_format.Parse(PROTO, descriptor_pb2.FileDescriptorProto()))
Model = message_factory.GetMessageClass(POOL.FindMessageTypeByName("Model"))


class Flavour(NamedTuple):
    """What a model expects of its tokenizer."""

    tokenizer_class: str  # of Hugging Face; for unigram models; '' for the generic class
    specials: tuple[str, ...]  # the pieces at ids 0, 1, ...
    mask: AddedToken | None  # if not among the specials, the last token
    single: str  # where special pieces go, and the token types
    pair: str
    config: dict  # of tokenizer_config.json
    lower: bool  # the class's default
    may_keep_accents: bool  # if not, the class strips them, whatever its folder says
    normalises: bool = True  # if not, the class applies only the vocabulary's own map of characters
    unknown: str = "<unk>"


FLAVOURS = {
    "xlnet": Flavour(
        "XLNetTokenizer",
        ("<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>"),
        AddedToken("<mask>", lstrip=True, normalized=False, special=True),
        "$A:0 <sep>:0 <cls>:2",
        "$A:0 <sep>:0 $B:1 <sep>:1 <cls>:2",
        {"bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": ["<eop>", "<eod>"]}
        | {"padding_side": "left", "model_input_names": INPUTS},
        lower=False,
        may_keep_accents=False,
    ),
    "albert": Flavour(
        "AlbertTokenizer",
        ("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"),
        AddedToken("[MASK]", normalized=False, special=True),
        "[CLS]:0 $A:0 [SEP]:0",
        "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        {"bos_token": "[CLS]", "eos_token": "[SEP]", "model_input_names": INPUTS},
        lower=True,
        may_keep_accents=True,
    ),
    "t5": Flavour(
        "T5Tokenizer",
        ("<pad>", "</s>", "<unk>"),
        None,
        "$A </s>",
        "$A </s> $B </s>",
        {"eos_token": "</s>", "extra_ids": 0},
        lower=False,
        may_keep_accents=True,
        normalises=False,
    ),
}
# The class of DeBERTa V2 takes some white space for characters of words; a tokenizer.json is read as it is.
FLAVOURS["deberta"] = FLAVOURS["albert"]._replace(
    tokenizer_class="", specials=("[PAD]", "[CLS]", "[SEP]", "[UNK]"), lower=False, normalises=False, unknown="[UNK]"
)
SPECIALS = tuple(FLAVOURS)


def count(texts: Iterable[str], options: Training, kind: str) -> Counter:
    """Count normalised words between white space."""
    normalizer = _plan(options, kind)[1]
    return count_words(texts, lambda run: normalizer.normalize_str(run).split())


def learn(words: Counter, options: Training, kind: str) -> Made:
    """Learn a tokenizer of `vocab_size` pieces. kind: 'unigram' or 'bpe'.

    The same words always give the same vocabulary. ALBERT keeps accents when case is kept; XLNet only with
    `keep_accents`, which its Hugging Face class cannot. In that case, and for 'bpe', which no class can, the class is
    the generic one. Raises UserError for a size that the text does not allow.
    """
    flavour, normalizer, config = _plan(options, kind)
    vocab = _scored(parse(learn_pieces(dict(bounded(words)), kind, options.vocab_size, flavour)))
    pieces, unknown = [piece for piece, _ in vocab], flavour.unknown
    model = _unigram(vocab, unknown) if kind == "unigram" else _bpe(pieces, unknown)
    tokenizer = _assemble(model, normalizer, flavour)
    return Made(tokenizer, special_ids(tokenizer, names_in(config)), config)


def _plan(options: Training, kind: str) -> tuple[Flavour, normalizers.Normalizer, dict]:
    """Return the flavour, its normaliser and its tokenizer_config.json."""
    flavour = FLAVOURS[options.specials or SPECIALS[0]]
    keep_accents = options.keep_accents or (options.cased and flavour.may_keep_accents)
    own_class = kind == "unigram" and flavour.tokenizer_class and (flavour.may_keep_accents or not keep_accents)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **flavour.config}
    if not flavour.normalises:
        return flavour, _only(b""), config | ({"tokenizer_class": flavour.tokenizer_class} if own_class else {})
    if own_class:
        named = {"do_lower_case": not options.cased, "keep_accents": keep_accents}
        config |= {"tokenizer_class": flavour.tokenizer_class, **named}
    return flavour, _normalizer(not options.cased, keep_accents, compose=not own_class), config


def learn_pieces(words: dict[str, int], kind: str, vocab_size: int, flavour: Flavour) -> bytes:
    """Return the content of a spiece.model that itself normalises nothing, learnt from normalised words and their
    counts. Unigram: Kudo 2018; byte-pair encoding: Sennrich et al. 2016."""
    if vocab_size <= len(flavour.specials):
        raise UserError(f"--vocab-size {vocab_size} is too small; use more than {len(flavour.specials)}")
    model = io.BytesIO()
    numbered, specials = {"unk_id": flavour.unknown} | NUMBERED, flavour.specials
    ids = {name: specials.index(piece) if piece in specials else -1 for name, piece in numbered.items()}
    mask_beside = flavour.mask is not None and flavour.mask.content not in specials
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(f"{DIGIT_COMMA.sub(CUT, word)}\t{count}" for word, count in sorted(words.items())),
            input_format="tsv",
            pretokenization_delimiter=CUT,
            model_writer=model,
            model_type=kind,
            vocab_size=vocab_size - mask_beside,
            unk_piece=flavour.unknown,
            control_symbols=[piece for piece in specials if piece not in numbered.values()],
            character_coverage=COVERAGE,
            normalization_rule_name="identity",
            max_sentence_length=1 << 30,
            num_threads=THREADS,
            minloglevel=2,
            **ids,
        )
    except RuntimeError as error:
        raise UserError(_reason(vocab_size, str(error))) from error
    return model.getvalue()


def _reason(vocab_size: int, error: str) -> str:
    """Return why there is no vocabulary, from the trainer's error."""
    small, large = re.search(r"smaller than required_chars\D*\d+ vs (\d+)", error), re.search(r"<= (\d+)", error)
    if small:
        return f"--vocab-size {vocab_size} is too small for the characters of this text; use at least {small[1]}"
    if large:
        return f"--vocab-size {vocab_size} is too large for this text; use at most {large[1]}"
    if re.search(r"sentences_\.empty|all_chars_count", error):
        return "--source has no text to train a tokenizer on; give other sources, or a --tokenizer to use"
    return f"--tokenizer: SentencePiece cannot be trained ({error.splitlines()[0]}); use --tokenizer wordpiece"


def _scored(model: Model) -> list[tuple[str, float]]:
    return [(piece.piece, piece.score) for piece in model.pieces]


def parse(content: bytes) -> Model:
    """Parse a spiece.model. Raises ValueError if this is none."""
    try:
        model = Model.FromString(content)
    except message.DecodeError as error:
        raise ValueError("it is not a SentencePiece model") from error
    if not model.pieces:
        raise ValueError("it has no pieces")
    return model


def read_model(path: Path, config: dict) -> tuple[Tokenizer, dict]:
    """Return the tokenizer of a spiece.model, as Hugging Face's XLNet, ALBERT or T5 class reads it, and its entries of
    tokenizer_config.json. config: its folder's. Raises ValueError for a model that no class reads."""
    model = parse(path.read_bytes())
    vocab = _scored(model)
    flavour = _find(config, [piece for piece, _ in vocab])
    if flavour is None or model.trainer.model_type != UNIGRAM:
        raise ValueError("it is not XLNet's or ALBERT's; convert it to a tokenizer.json with transformers")
    added = [AddedToken(piece.piece, normalized=False) for piece in model.pieces if piece.type == USER_DEFINED]
    return _rebuild(flavour, vocab, model.normalizer.precompiled_charsmap, added, config)


def read_json(path: Path, config: dict) -> tuple[Tokenizer, dict] | None:
    """Return the same for a tokenizer.json whose folder names one of the classes, which keep its vocabulary and its map
    of characters and take the rest from tokenizer_config.json. None for other folders."""
    flavour = _find(config, [])
    if flavour is None:
        return None
    written = json.loads(path.read_text("utf-8"))
    normalizer = written["normalizer"] or {}
    tables = [part.get("precompiled_charsmap") for part in normalizer.get("normalizers", [normalizer])]
    table = base64.b64decode(next(filter(None, tables), ""))
    added = [token for _, token in sorted(Tokenizer.from_file(str(path)).get_added_tokens_decoder().items())]
    added = [token for token in added if token.content not in flavour.specials]  # sentinels, too
    return _rebuild(flavour, [(piece, score) for piece, score in written["model"]["vocab"]], table, added, config)


def _find(config: dict, pieces: list[str]) -> Flavour | None:
    """Return the flavour that a folder names by class or model, else the one whose special pieces are all here."""
    named = config.get("tokenizer_class", config.get("model_type"))
    for name, flavour in FLAVOURS.items():
        if not flavour.tokenizer_class:
            continue
        if named in (flavour.tokenizer_class, f"{flavour.tokenizer_class}Fast", name):
            return flavour
        if named is None and {*flavour.specials} <= {*pieces}:
            return flavour
    return None


def _rebuild(flavour: Flavour, vocab, table: bytes, added: list[AddedToken], config: dict) -> tuple[Tokenizer, dict]:
    """Return the flavour's tokenizer around a unigram vocabulary. table: SentencePiece's map of characters or b""."""
    lower = config.get("do_lower_case", flavour.lower)
    keep = bool(config.get("keep_accents")) and flavour.may_keep_accents
    named = {"do_lower_case": lower, "keep_accents": keep} if flavour.normalises else {}
    normalizer = _normalizer(lower, keep, table=table) if flavour.normalises else _only(table)
    tokenizer = _assemble(_unigram(vocab, flavour.unknown), normalizer, flavour)
    tokenizer.add_tokens(added)
    return tokenizer, flavour.config | {"tokenizer_class": flavour.tokenizer_class} | named


def _only(table: bytes) -> normalizers.Normalizer:
    return normalizers.Sequence([normalizers.Precompiled(table)] if table else [])


def _normalizer(lower: bool, keep_accents: bool, compose: bool = False, table: bytes = b"") -> normalizers.Normalizer:
    """Return transformers 5's normaliser of both models. compose: also bring kept accents into one form."""
    parts = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    if not keep_accents:
        parts += [normalizers.NFKD(), normalizers.StripAccents()]
    elif compose:
        parts += [normalizers.NFKC()]
    if lower:
        parts += [normalizers.Lowercase()]
    if table:
        parts += [normalizers.Precompiled(table)]
    return normalizers.Sequence(parts)


def _unigram(vocab: list[tuple[str, float]], unknown: str) -> models.Model:
    return models.Unigram(vocab, unk_id=[piece for piece, _ in vocab].index(unknown), byte_fallback=False)


def _bpe(pieces: list[str], unknown: str) -> models.Model:
    """Return a BPE model. Pieces are in order of merging, that of ids; each arises from any two that make it up."""
    ids = {piece: index for index, piece in enumerate(pieces)}
    merges = []
    for piece in pieces:
        halves = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        found = [(left, right) for left, right in halves if left in ids and right in ids]
        merges += sorted(found, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    return models.BPE(ids, merges, unk_token=unknown, fuse_unk=True)


def _assemble(model: models.Model, normalizer: normalizers.Normalizer, flavour: Flavour) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(WORD, prepend_scheme="always")]
    )
    tokenizer.decoder = decoders.Metaspace(WORD, prepend_scheme="always")
    plain = [AddedToken(piece, normalized=False, special=True) for piece in flavour.specials]
    mask = flavour.mask and flavour.mask.content
    tokenizer.add_special_tokens([token for token in plain if token.content != mask])
    if flavour.mask:
        tokenizer.add_special_tokens([flavour.mask])
    surround(tokenizer, flavour.single, flavour.pair)
    return tokenizer
