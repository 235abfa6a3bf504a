"""Train a WordPiece tokenizer or take an existing one, and write it as Hugging Face reads it."""

import json
import unicodedata
from collections import Counter
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from data_pipelines.errors import UserError

# role -> the names it goes by; the first is ours
ROLES = {
    "pad": ("[PAD]", "<pad>"),
    "unk": ("[UNK]", "<unk>"),
    "cls": ("[CLS]", "<s>", "<cls>"),
    "sep": ("[SEP]", "</s>", "<sep>"),
    "mask": ("[MASK]", "<mask>"),
}
SPECIALS = [names[0] for names in ROLES.values()]
CONTINUES = "##"
COVERAGE = 0.9995  # share of the text's characters that the alphabet covers, beyond its 1,000 most frequent ones
SMALLEST_VOCABULARY = 64


def train(texts: list[str], vocab_size: int, cased: bool = False) -> Tokenizer:
    """A WordPiece of at most `vocab_size` tokens, specials at ids 0..4. The same texts always give the same vocabulary.

    The library's trainer numbers the continuing characters ('##a') in the order of a randomly seeded hash map, and
    breaks ties between merges by number. Passing all of them as special tokens, sorted, takes the chance out.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise UserError(f"--vocab-size {vocab_size}: use at least {SMALLEST_VOCABULARY}")
    normalizer = _bert({}, cased).normalizer
    alphabet, continuing = _characters([normalizer.normalize_str(text) for text in texts], vocab_size // 4)
    learner = _bert({"[UNK]": 0}, cased)
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
    return _bert(learner.get_vocab(with_added_tokens=False), cased)


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


def load(path: Path, cased: bool = False) -> tuple[Tokenizer, dict[str, int]]:
    """The tokenizer, and role -> id, from a vocab.txt (normalised as `cased` says), a tokenizer.json, or a folder.

    Raises UserError where there is none, or where it has no token for a role in ROLES.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"--tokenizer {path} does not exist; give wordpiece, a vocab.txt, a tokenizer.json or a folder")
    names = {}
    if path.is_dir():
        names, config = _folder_config(path)
        cased = not config.get("do_lower_case", not cased)
        inside = [path / name for name in ("tokenizer.json", "vocab.txt") if (path / name).exists()]
        if not inside:
            raise UserError(f"--tokenizer {path}: no tokenizer.json or vocab.txt in this folder")
        path = inside[0]
    try:
        if path.suffix == ".json":
            tokenizer = Tokenizer.from_file(str(path))
        else:
            tokens = path.read_text("utf-8").removesuffix("\n").split("\n")
            tokenizer = _bert({token.rstrip("\r"): index for index, token in enumerate(tokens)}, cased)
    except Exception as error:  # the library raises bare Exception
        reason = str(error).splitlines()[0]
        raise UserError(f"--tokenizer {path} cannot be read ({reason}); give a vocab.txt or tokenizer.json") from error
    tokenizer.no_padding()  # these come with a model; a corpus keeps sentences as they are
    tokenizer.no_truncation()
    return tokenizer, special_ids(tokenizer, names, path)


def _folder_config(folder: Path) -> tuple[dict[str, str], dict]:
    """role -> token as the folder's own files name it, and its tokenizer_config.json."""
    names, config = {}, {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / file).exists():
            try:
                config = json.loads((folder / file).read_text("utf-8"))
            except ValueError as error:
                raise UserError(f"--tokenizer {folder}: {file} is not JSON ({error}); restore it") from error
            for role in ROLES:
                token = config.get(f"{role}_token")
                if token:
                    names[role] = token["content"] if isinstance(token, dict) else token
    return names, config


def special_ids(tokenizer: Tokenizer, names: dict[str, str], path: Path) -> dict[str, int]:
    """role -> id, by the given names or else the usual ones. UserError naming the first role without a token."""
    ids = {}
    for role, usual in ROLES.items():
        candidates = [names[role]] if role in names else usual
        found = [tokenizer.token_to_id(name) for name in candidates if tokenizer.token_to_id(name) is not None]
        if not found:
            raise UserError(
                f"--tokenizer {path} has no {role} token ({' or '.join(candidates)}); "
                f"add {candidates[0]} to its vocabulary, or use --tokenizer wordpiece"
            )
        ids[role] = found[0]
    return ids


def vocabulary(tokenizer: Tokenizer) -> list[str]:
    """The tokens by id; an id that no token has gives ''."""
    ids = tokenizer.get_vocab()
    tokens = [""] * (1 + max(ids.values()))
    for token, index in ids.items():
        tokens[index] = token
    return tokens


def save(tokenizer: Tokenizer, special: dict[str, int], folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json, special_tokens_map.json, and for WordPiece vocab.txt."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = vocabulary(tokenizer)
    specials = {f"{role}_token": tokens[index] for role, index in special.items()}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **specials}
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


def _bert(vocab: dict[str, int], cased: bool) -> Tokenizer:
    """BERT's tokenizer around a vocabulary: normaliser, splitting at space and punctuation, [CLS] a [SEP] b [SEP]."""
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=not cased, strip_accents=not cased)
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
