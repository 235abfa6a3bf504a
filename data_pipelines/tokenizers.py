"""Train a WordPiece tokenizer or take one of any kind, and write it as Hugging Face reads it."""

import json
import unicodedata
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from data_pipelines import pieces
from data_pipelines.errors import UserError

# role -> the names it goes by; the first is ours
ROLES = {
    "pad": ("[PAD]", "<pad>"),
    "unk": ("[UNK]", "<unk>"),
    "cls": ("[CLS]", "<cls>", "<s>"),
    "sep": ("[SEP]", "<sep>", "</s>"),
    "mask": ("[MASK]", "<mask>"),
}
OPTIONAL = {"eod": ("<eod>", "<|endoftext|>")}  # end of document; a role where there is such a token
SPECIALS = [names[0] for names in ROLES.values()]
CONTINUES = "##"
COVERAGE = 0.9995  # share of the text's characters that the alphabet covers, beyond its 1,000 most frequent ones
SMALLEST_VOCABULARY = 64
TRAINED = ("wordpiece", "sentencepiece-unigram", "sentencepiece-bpe", "wordlevel")
KEPT = ("padding_side", "bos_token", "eos_token", "additional_special_tokens", "model_input_names")


class Made(NamedTuple):
    tokenizer: Tokenizer
    special: dict[str, int]  # role -> id
    config: dict  # of tokenizer_config.json, besides the roles' tokens


def train(texts: list[str], vocab_size: int, cased: bool = False, keep_accents: bool = False) -> Tokenizer:
    """A WordPiece of at most `vocab_size` tokens, specials at ids 0..4. The same texts always give the same vocabulary.

    The library's trainer numbers the continuing characters ('##a') in the order of a randomly seeded hash map, and
    breaks ties between merges by number. Passing all of them as special tokens, sorted, takes the chance out.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise UserError(f"--vocab-size {vocab_size}: use at least {SMALLEST_VOCABULARY}")
    keep_accents = keep_accents or cased
    normalizer = _bert({}, cased, keep_accents).normalizer
    alphabet, continuing = _characters([normalizer.normalize_str(text) for text in texts], vocab_size // 4)
    learner = _bert({"[UNK]": 0}, cased, keep_accents)
    learner.train_from_iterator(
        texts,
        trainers.WordPieceTrainer(
            vocab_size=vocab_size,
            special_tokens=SPECIALS + [CONTINUES + character for character in continuing],
            initial_alphabet=alphabet,
            limit_alphabet=len(alphabet),
            continuing_subword_prefix=CONTINUES,
            show_progress=False,
        ),
    )
    return _bert(learner.get_vocab(with_added_tokens=False), cased, keep_accents)


def _characters(texts: list[str], most: int) -> tuple[list[str], list[str]]:
    """The characters to give a token of their own, and those among them that occur inside words; each sorted."""
    counts, inside = Counter(), set()
    for text in texts:
        counts.update(text)
        inside.update(character for word in set(text.split()) for character in word[1:])
    for character in [character for character in counts if character.isspace()]:
        del counts[character]
    ordered = sorted(counts, key=lambda character: (-counts[character], character))
    total, covered = counts.total(), 0
    alphabet = []
    for character in ordered[:most]:
        if len(alphabet) >= 1000 and covered >= COVERAGE * total:
            break
        alphabet.append(character)
        covered += counts[character]
    return sorted(alphabet), sorted(c for c in alphabet if c in inside and not _is_punctuation(c))


def _is_punctuation(character: str) -> bool:
    """As BERT has it: punctuation is split off, so it never continues a word."""
    ascii_symbol = character.isascii() and character.isprintable() and not character.isalnum()
    return ascii_symbol or unicodedata.category(character).startswith("P")


def load(path: Path, cased: bool = False, keep_accents: bool = False) -> Made:
    """A vocab.txt or spiece.model (normalised as `cased` and `keep_accents` say), a tokenizer.json, or a folder.

    Raises UserError where there is none, or where it has no token for a role in ROLES.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(
            f"--tokenizer {path} does not exist; give {', '.join(TRAINED)}, "
            "a vocab.txt, a tokenizer.json, a spiece.model or a folder"
        )
    names, config = {}, {}
    if path.is_dir():
        names, config = _folder_config(path)
        files = ("tokenizer.json", "vocab.txt", "spiece.model")
        inside = [path / name for name in files if (path / name).exists()]
        if not inside:
            raise UserError(f"--tokenizer {path}: no tokenizer.json, vocab.txt or spiece.model in this folder")
        path = inside[0]
    try:
        tokenizer, config = _read(path, cased, keep_accents, config)
    except UserError:
        raise
    except Exception as error:  # the library raises bare Exception
        reason = str(error).splitlines()[0]
        raise UserError(
            f"--tokenizer {path} cannot be read ({reason}); give a vocab.txt, tokenizer.json or spiece.model"
        ) from error
    tokenizer.no_padding()  # these come with a model; a corpus keeps sentences as they are
    tokenizer.no_truncation()
    return Made(tokenizer, special_ids(tokenizer, names, path), config)


def _read(path: Path, cased: bool, keep_accents: bool, config: dict) -> tuple[Tokenizer, dict]:
    """The tokenizer, and its part of a tokenizer_config.json. config: what the folder says of it."""
    if path.suffix == ".model":
        return pieces.read_model(path, config or {"do_lower_case": not cased, "keep_accents": keep_accents or cased})
    if path.suffix == ".json":
        kept = {name: config[name] for name in KEPT if name in config}
        return pieces.read_json(path, config) or (Tokenizer.from_file(str(path)), kept)
    tokens = path.read_text("utf-8").removesuffix("\n").split("\n")
    vocab = {token.rstrip("\r"): index for index, token in enumerate(tokens)}
    cased = not config.get("do_lower_case", not cased)
    strip = config.get("strip_accents")
    return _bert(vocab, cased, keep_accents or cased if strip is None else not strip), {}


def _folder_config(folder: Path) -> tuple[dict[str, str], dict]:
    """role -> token as the folder's own files name it; and its tokenizer_config.json with its config.json's model."""
    names, config = {}, {}
    for file in ("config.json", "special_tokens_map.json", "tokenizer_config.json"):
        if (folder / file).exists():
            try:
                said = json.loads((folder / file).read_text("utf-8"))
            except ValueError as error:
                raise UserError(f"--tokenizer {folder}: {file} is not JSON ({error}); restore it") from error
            if file == "config.json":
                config = {name: said[name] for name in ("model_type", "tokenizer_class") if said.get(name)}
                continue
            config |= said
            for role in ROLES:
                token = said.get(f"{role}_token")
                if token:
                    names[role] = token["content"] if isinstance(token, dict) else token
    return names, config


def special_ids(tokenizer: Tokenizer, names: dict[str, str], path: Path) -> dict[str, int]:
    """role -> id, by the given names or else the usual ones. UserError naming the first role without a token."""
    ids = {}
    for role, usual in (ROLES | OPTIONAL).items():
        candidates = [names[role]] if role in names else usual
        found = [tokenizer.token_to_id(name) for name in candidates if tokenizer.token_to_id(name) is not None]
        if found:
            ids[role] = found[0]
        elif role in ROLES:
            raise UserError(
                f"--tokenizer {path} has no {role} token ({' or '.join(candidates)}); "
                f"add {candidates[0]} to its vocabulary, or use --tokenizer wordpiece"
            )
    return ids


def token_ids(made: Made) -> dict[str, int | None]:
    """'bos_token_id', ... -> the id of that token, None where the tokenizer has none."""
    ids = {role: made.special[role] for role in ("pad", "cls", "sep", "mask")}
    for role in ("bos", "eos"):
        token = made.config.get(f"{role}_token")
        token = token["content"] if isinstance(token, dict) else token
        ids[role] = None if token is None else made.tokenizer.token_to_id(token)
    return {f"{role}_token_id": index for role, index in ids.items()}


def vocabulary(tokenizer: Tokenizer) -> list[str]:
    """The tokens by id; an id that no token has gives ''."""
    ids = tokenizer.get_vocab()
    tokens = [""] * (1 + max(ids.values()))
    for token, index in ids.items():
        tokens[index] = token
    return tokens


def save(made: Made, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json, special_tokens_map.json, and for WordPiece vocab.txt."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = made.tokenizer
    tokens = vocabulary(tokenizer)
    specials = {f"{role}_token": tokens[made.special[role]] for role in ROLES}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **made.config, **specials}
    normalizer = tokenizer.normalizer
    if isinstance(tokenizer.model, models.WordPiece):
        (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in tokens), "utf-8")
        if isinstance(normalizer, normalizers.BertNormalizer):
            config |= {
                "tokenizer_class": "BertTokenizer",
                "do_lower_case": normalizer.lowercase,
                "strip_accents": normalizer.strip_accents,
                "tokenize_chinese_chars": normalizer.handle_chinese_chars,
            }
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in (("tokenizer_config.json", config), ("special_tokens_map.json", specials)):
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")


def _bert(vocab: dict[str, int], cased: bool, keep_accents: bool) -> Tokenizer:
    """BERT's tokenizer around a vocabulary: normaliser, splitting at space and punctuation, [CLS] a [SEP] b [SEP]."""
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=not cased, strip_accents=not keep_accents)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix=CONTINUES)
    tokenizer.add_special_tokens([token for token in SPECIALS if token in vocab])
    if "[CLS]" in vocab and "[SEP]" in vocab:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", vocab["[CLS]"]), ("[SEP]", vocab["[SEP]"])],
        )
    return tokenizer
