"""Find where sentences begin in a text, with `sentencex`."""

import re
from collections.abc import Callable, Iterator

import numpy as np
import sentencex

from data_pipelines.errors import UserError

BLANK_LINE = re.compile(r"\n[^\S\n]*\n")
# ISO's two-letter codes, and others that sentencex has rules for. Without rules, sentences end as in English
CODES = """
aa ab ae af ak am an ar as ast av awa ay az azb ba ban bar be be-tarask bg bh bho bi bjn bm bn bo bpy br bs bxr ca
ce ceb ch ckb co cr cs csb cu cv cy da de de-at de-ch dsb dv dz ee el en en-ca en-gb eo es es-419 et eu fa ff fi fj fo
fr frp fur fy ga gd gl gn gom gsw gu gv ha haw he hi ho hr hsb ht hu hy hyw hz ia id ie ig ii ik io is it iu ja jv
ka kab kg ki kj kk kl km kn ko kr ks ku kv kw ky la lad lb lez lg li lij lmo ln lo lt lu lv lzh mai mg mh mhr mi mk
ml mn mr ms mt mwl my mzn na nah nap nb nd nds ne new ng nl nn no nr nrm nv ny oc oj om or os pa pcd pi pl pms ps pt
pt-br qu rm rn ro ru rue rw sa sah sc scn sco sd se sg sh si sk sl sm sn so sq sr srn ss st stq su sv sw szl ta te
tg th ti tk tl tn to tr ts tt tw ty udm ug uk ur uz ve vec vi vls vo wa war wo wuu xh yi yo yue za zh zh-cn zh-hans
zh-hant zh-hk zh-tw zu
"""
LANGUAGES = CODES.split()
WINDOW = 2000  # most characters of a paragraph that sentencex sees at a time


def starts(text: str, language: str = "en", panicked: Callable[[], None] = lambda: None) -> np.ndarray:
    """Return the character with which each sentence begins, which is no white space: i64 [sentences]; in linear time. A
    blank line ends a sentence, a single newline does not. A sentence of more than WINDOW characters is cut after a
    space, if it has one. panicked: called for each window that sentencex can read only with plain spaces."""
    found = []
    at = 0
    for end, following in [*(blank.span() for blank in BLANK_LINE.finditer(text)), (len(text), len(text))]:
        found += _paragraph(text, at, end, language, panicked)
        at = following
    return np.array(found, np.int64)


def check_language(language: str) -> None:
    """Raise UserError for an unknown language, which sentencex would silently treat as English."""
    if language not in LANGUAGES:
        base = re.split("[-_]", language.lower())[0]
        near = [code for code in (base, base[:3], base[:2]) if code in LANGUAGES]
        hint = f"the nearest is {near[0]}; " if near else ""
        raise UserError(f"--language {language}: is not known; {hint}give a code such as en or zh")


def _paragraph(text: str, at: int, end: int, language: str, panicked) -> Iterator[int]:
    """Yield the starts in text[at:end], found in windows, each of which ends with its last whole sentence."""
    while at < end:
        window = text[at : min(at + WINDOW, end)]
        parts = _segment(language, window.replace("\n", " "), panicked)
        if at + WINDOW < end:
            parts = parts[:-1] or [window[: window.rfind(" ", 1) + 1 or WINDOW]]
        for part in parts:
            space = len(part) - len(part.lstrip())
            if space < len(part):
                yield at + space
            at += len(part)


def _segment(language: str, text: str, panicked) -> list[str]:
    """Return the sentences of a short text; joined, they are the text."""
    try:
        return sentencex.segment(language, text)
    except BaseException as error:  # it cuts inside the bytes of a space that is not ASCII: a panic of Rust
        if type(error).__name__ != "PanicException":
            raise
    panicked()
    return sentencex.segment(language, "".join(" " if character.isspace() else character for character in text))
