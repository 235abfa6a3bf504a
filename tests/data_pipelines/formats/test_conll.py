"""`conll:` tokens are text again, and their labels lie on the characters that they are of."""

import pytest

from data_pipelines.errors import UserError
from data_pipelines.formats import cutting, source, table
from data_pipelines.formats.conll import FORMAT, Options
from data_pipelines.formats.problems import MALFORMED
from data_pipelines.store.fields import Field
from tests.data_pipelines.formats.reading import ranges, read, texts

CONLL_2003 = """-DOCSTART- -X- -X- O

EU NNP B-NP B-ORG
rejects VBZ B-VP O
# SYM O O

Peter NNP B-NP B-PER

-DOCSTART- -X- -X- O

Next JJ O O
"""
CONLL_U = """# newdoc id = a
# sent_id = 1
# newpar
# text = He didn't "go".
1\tHe\the\tPRON\tPRP\t_\t0\t_\t_\t_
2-3\tdidn't\t_\t_\t_\t_\t_\t_\t_\t_
2\tdid\tdo\tAUX\tVBD\t_\t0\t_\t_\t_
3\tn't\tnot\tPART\tRB\t_\t0\t_\t_\t_
4\t"\t"\tPUNCT\t``\t_\t0\t_\t_\tA=B|SpaceAfter=No
5\tgo\tgo\tVERB\tVB\t_\t0\t_\t_\tSpaceAfter=No
6-7\t".\t_\t_\t_\t_\t_\t_\t_\t_
6\t"\t"\t_\t''\t_\t0\t_\t_\t_
7\t.\t.\tPUNCT\t.\t_\t0\t_\t_\t_
7.1\tgone\tgo\tVERB\tVB\t_\t0\t_\t_\t_

1\tYes\tyes\tINTJ\tUH\t_\t0\t_\t_\t_

# newpar
1\tNew\tnew\tADJ\tJJ\t_\t0\t_\t_\t_

# newdoc
1\tNext\tnext\tADJ\tJJ\t_\t0\t_\t_\t_
"""


def labelled(document):
    (segment,) = document.segments
    assert {(one.field, one.segment) for one in document.annotations} <= {("labels", 0)}
    return [(segment.text[one.start : one.end], one.value) for one in document.annotations]


def write(folder, text, name="a.conll"):
    (folder / name).write_text(text)
    return f"conll:{folder / name}"


def test_conll_2003(tmp_path):
    (first, second), problems = read(write(tmp_path, CONLL_2003))
    assert first.segments[0].text == "EU rejects #\nPeter"
    assert labelled(first) == [("EU", "B-ORG"), ("rejects", "O"), ("#", "O"), ("Peter", "B-PER")]
    assert second.segments[0].text == "Next"
    assert not problems


def test_conll_u(tmp_path):
    (first, second), problems = read(write(tmp_path, CONLL_U))
    assert first.segments[0].text == 'He didn\'t "go".\nYes\n\nNew'
    expected = [("He", "PRON"), ("didn't", "AUX+PART"), ('"', "PUNCT"), ("go", "VERB"), ('".', "PUNCT")]
    assert labelled(first) == [*expected, ("Yes", "INTJ"), ("New", "ADJ")]
    assert labelled(second) == [("Next", "ADJ")]
    assert not problems


def test_columns_are_options(tmp_path):
    spec = write(tmp_path, CONLL_2003)
    assert labelled(read(spec, label_column=2)[0][0])[:2] == [("EU", "NNP"), ("rejects", "VBZ")]
    assert labelled(read(spec, token_column=2, label_column=1)[0][0])[:1] == [("NNP", "EU")]
    assert read(spec, label_column=0)[0][0].annotations == ()
    spec = write(tmp_path, CONLL_U)
    assert labelled(read(spec, token_column=3, label_column=5)[0][0])[:1] == [("he", "PRP")]
    assert FORMAT.annotations(Options()) == {"labels": Field("uint16", values=())}
    assert FORMAT.annotations(Options(label_column=0)) == {}


@pytest.mark.parametrize(("option", "value"), [("token_column", 0), ("label_column", -1)])
def test_columns_are_counted_from_one(tmp_path, option, value):
    with pytest.raises(UserError, match=f"--{option.replace('_', '-')} {value}: columns are counted from 1"):
        read(write(tmp_path, CONLL_2003), **{option: value})


def test_languages_without_spaces_have_none_between_tokens(tmp_path):
    spec = write(tmp_path, "北 O\n京 O\n\n好 O\n")
    assert texts(spec, language="zh")[0] == ["北京\n好"]
    assert texts(spec, language="de")[0] == ["北 京\n好"]


def test_tokens_alone_have_no_labels(tmp_path):
    documents, problems = read(write(tmp_path, "a\nb\n"))
    assert [(one.segments[0].text, one.annotations) for one in documents] == [("a b", ())]
    assert not problems


def test_lines_without_the_columns_are_counted(tmp_path):
    documents, problems = read(write(tmp_path, "a O\nb\nc O\n"), label_column=2)
    assert labelled(documents[0]) == [("a", "O"), ("c", "O")]
    assert problems[MALFORMED]["first"].endswith("a.conll, line 2: 1 columns")


@pytest.mark.parametrize("words", [9, 10_000])
def test_a_long_document_comes_in_pieces_with_their_own_annotations(tmp_path, monkeypatch, words):
    monkeypatch.setattr(cutting, "WINDOW", 300)
    sentences = [[f"w{sentence}x{word}" for word in range(words)] for sentence in range(1000 // words + 2)]
    spec = write(tmp_path, "\n".join("".join(f"{word} L{word}\n" for word in words) for words in sentences))
    documents, _ = read(spec)
    assert [one.continues for one in documents] == [False] + [True] * (len(documents) - 1)
    assert len(documents) > 3
    assert texts(spec)[0] == ["\n".join(map(" ".join, sentences))]
    found = [pair for document in documents for pair in labelled(document)]
    assert found == [(word, f"L{word}") for words in sentences for word in words]
    if words == 9:
        assert all(one.segments[0].text.startswith("\n") for one in documents[1:])  # cut between sentences


@pytest.mark.parametrize("text", [CONLL_2003, CONLL_U])
def test_cutting_a_file_changes_no_document(tmp_path, monkeypatch, text):
    whole = read(write(tmp_path, text * 20))
    monkeypatch.setattr(source, "SHARD", 150)
    spec = write(tmp_path, text * 20)
    assert len(ranges(table.parse(spec))) > 10
    assert read(spec) == whole
