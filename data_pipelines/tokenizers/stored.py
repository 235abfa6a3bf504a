"""Read tokenizers of any kind from files, and write one as Hugging Face reads it."""

import json
from pathlib import Path

from tokenizers import Tokenizer, models, normalizers

from data_pipelines.errors import UserError
from data_pipelines.tokenizers import bpe, pieces, words
from data_pipelines.tokenizers.made import Made, named_tokens, names_in, special_ids, vocabulary
from data_pipelines.tokenizers.table import KINDS

KEPT = ("padding_side", "bos_token", "eos_token", "additional_special_tokens", "model_input_names")
# model -> the Hugging Face class that reads its vocab.json and merges.txt
MERGED = {{"gpt": "openai-gpt"}.get(name, name): one.tokenizer_class for name, one in bpe.FLAVOURS.items()}
FILES = ("tokenizer.json", "vocab.txt", "spiece.model", "vocab.json")


def load(path: Path, cased: bool = False, keep_accents: bool = False) -> Made:
    """Load a vocab.txt or a spiece.model (normalised as `cased` and `keep_accents` say), a tokenizer.json, or a folder.
    Raises UserError if there is none. A role in ROLES may have no token."""
    path = Path(path)
    if not path.exists():
        raise UserError(f"--tokenizer {path} does not exist; give {', '.join(KINDS)}, a tokenizer's file or folder")
    names, config = {}, {}
    if path.is_dir():
        names, config = _folder_config(path)
        inside = [path / name for name in FILES if (path / name).exists()]
        if not inside:
            raise UserError(f"--tokenizer {path}: has no {', '.join(FILES[:-1])} or {FILES[-1]}; give another folder")
        path = inside[0]
    try:
        tokenizer, config = _read(path, cased, keep_accents, config)
    except Exception as error:  # the library raises bare Exception
        reason = str(error).splitlines()[0]
        raise UserError(f"--tokenizer {path} cannot be read ({reason}); give a vocab.txt or tokenizer.json") from error
    tokenizer.no_padding()  # both are settings of a model; a corpus keeps sentences as they are
    tokenizer.no_truncation()
    return Made(tokenizer, special_ids(tokenizer, names), config)


def _read(path: Path, cased: bool, keep_accents: bool, config: dict) -> tuple[Tokenizer, dict]:
    """Return the tokenizer, and its entries of tokenizer_config.json. config: what its folder says."""
    if path.suffix == ".model":
        return pieces.read_model(path, config or {"do_lower_case": not cased, "keep_accents": keep_accents or cased})
    if path.name == "vocab.json":
        made = _read_merges(path, config)
        return made.tokenizer, made.config
    if path.suffix == ".json":
        kept = {name: config[name] for name in KEPT if name in config}
        return pieces.read_json(path, config) or (Tokenizer.from_file(str(path)), kept)
    tokens = path.read_text("utf-8").removesuffix("\n").split("\n")
    vocab = {token.rstrip("\r"): index for index, token in enumerate(tokens)}
    cased = not config.get("do_lower_case", not cased)
    strip = config.get("strip_accents")
    return words.assemble(vocab, cased, keep_accents or cased if strip is None else not strip), {}


def _read_merges(path: Path, config: dict) -> Made:
    """Read a vocab.json with its merges.txt, by the class or model that the folder names, else by its tokens."""
    vocab = json.loads(path.read_text("utf-8"))
    lines = path.with_name("merges.txt").read_text("utf-8").split("\n")
    merges = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    named = config.get("tokenizer_class", config.get("model_type"))
    name = MERGED.get(named, str(named).removesuffix("Fast"))
    if name not in MERGED.values():
        ends = any(token.endswith("</w>") for token in vocab)
        name = "OpenAIGPTTokenizer" if ends else "GPT2Tokenizer" if "<s>" not in vocab else "RobertaTokenizer"
    kept = {role: config[role] for role in ("add_prefix_space", *KEPT) if role in config} | {"tokenizer_class": name}
    if name == "CTRLTokenizer":
        vocab = bpe.read_ctrl(vocab)
    return bpe.assemble(vocab, merges, kept)


def _folder_config(folder: Path) -> tuple[dict[str, str], dict]:
    """Return role -> token as the folder's files name it; and its tokenizer_config.json with config.json's model."""
    names, config = {}, {}
    for file in ("config.json", "special_tokens_map.json", "tokenizer_config.json"):
        if (folder / file).exists():
            try:
                content = json.loads((folder / file).read_text("utf-8"))
            except ValueError as error:
                raise UserError(f"--tokenizer {folder}: {file} is not JSON ({error}); restore it") from error
            if file == "config.json":
                config = {name: content[name] for name in ("model_type", "tokenizer_class") if content.get(name)}
                continue
            config |= content
            names |= names_in(content)
    return names, config


def save(made: Made, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json, special_tokens_map.json, and the vocabulary files that the Hugging
    Face class reads: vocab.txt, or vocab.json and merges.txt."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = made.tokenizer
    specials = {f"{role}_token": token for role, token in named_tokens(made).items() if role != "eod"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **made.config, **specials}
    normalizer = tokenizer.normalizer
    if isinstance(tokenizer.model, models.WordPiece):
        lines = "".join(f"{token}\n" for token in vocabulary(tokenizer))
        (folder / "vocab.txt").write_text(lines, "utf-8")
        if isinstance(normalizer, normalizers.BertNormalizer):
            config |= {
                "tokenizer_class": "BertTokenizer",
                "do_lower_case": normalizer.lowercase,
                "strip_accents": normalizer.strip_accents,
                "tokenize_chinese_chars": normalizer.handle_chinese_chars,
            }
    elif config["tokenizer_class"] in MERGED.values():
        tokenizer.model.save(str(folder))
        if config["tokenizer_class"] == "CTRLTokenizer":
            added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
            by_id = dict(sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1]))
            vocab = bpe.write_ctrl(by_id, added)
            (folder / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False), "utf-8")
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in (("tokenizer_config.json", config), ("special_tokens_map.json", specials)):
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")
