"""Columns are found by name, guesses are told, and nothing ambiguous is guessed."""

import shlex

import pytest

from paceline.contract.errors import DataError
from paceline.data.columns import find_roles
from paceline.recipe.parts import DataPart


def roles_of(columns, sample=(), labelled=True, **settings):
    part = DataPart(source="a.csv", **settings)
    return find_roles(part, columns, sample, file="a.csv", labelled=labelled)


@pytest.mark.parametrize(
    ("columns", "text", "pair", "label", "split"),
    [
        (["text", "label"], "text", None, "label", None),
        (["Review", "Sentiment"], "Review", None, "Sentiment", None),
        (["id", "title", "body", "category", "fold"], "body", None, "category", "fold"),
        (["text", "label", "label_text", "score"], "text", None, "label", None),
        (["sentence1", "sentence2", "score"], "sentence1", "sentence2", "score", None),
        (["hypothesis", "premise", "label"], "premise", "hypothesis", "label", None),
        (["Question 1", "Question 2", "label"], "Question 1", "Question 2", "label", None),
        (["question", "sentence", "label"], "question", "sentence", "label", None),
        (["text", "question", "sentence", "label"], "text", None, "label", None),
        (["text", "Y", "subset"], "text", None, "Y", "subset"),
    ],
)
def test_names_are_known(columns, text, pair, label, split):
    roles = roles_of(columns)
    assert (roles.content, roles.pair, roles.label, roles.split) == (text, pair, (label,), split)


def test_a_guess_says_how_to_change_it():
    notices = roles_of(["review", "stars", "split"]).notices
    assert notices[0] == "text column: 'review' (guessed; --set data.text=... to change)"
    assert [notice.split(" ")[0] for notice in notices] == ["text", "label", "split"]


def test_what_is_given_is_no_guess():
    roles = roles_of(["a", "b", "c", "split"], text="a", pair="b", label="c", split=None)
    assert (roles.content, roles.pair, roles.label, roles.split, roles.notices) == ("a", "b", ("c",), None, ())
    assert roles.columns == {"text": "a", "pair": "b", "label": "c"}


def test_pair_null_means_none():
    assert roles_of(["question", "sentence", "label"], pair=None, text="question").pair is None


def test_second_text_of_a_given_first_is_found():
    assert roles_of(["premise", "hypothesis", "label"], text="premise").pair == "hypothesis"


def test_the_only_column_of_words_is_the_text():
    sample = [{"id": "r-1", "phrase": "good value", "price": "3.5", "label": "x"}]
    assert roles_of(["id", "phrase", "price", "label"], sample).content == "phrase"


def test_two_columns_of_words_are_ambiguous():
    sample = [{"phrase": "good", "shop": "north", "label": "x"}]
    with pytest.raises(DataError, match="which column is the text") as caught:
        roles_of(["phrase", "shop", "label"], sample)
    assert "'phrase', 'shop'" in caught.value.why
    assert caught.value.fix == "--set data.text=phrase"


@pytest.mark.parametrize(
    ("columns", "role"),
    [
        (["content", "comment", "label"], "text"),
        (["text", "score", "rating"], "label"),
        (["Text", "text", "y"], "text"),
    ],
)
def test_names_of_one_rank_are_ambiguous(columns, role):
    with pytest.raises(DataError, match=f"which column is the {role}") as caught:
        roles_of(columns)
    assert all(repr(name) in caught.value.why for name in columns)


def test_no_label_column_lists_the_columns():
    with pytest.raises(DataError, match="no label column found") as caught:
        roles_of(["text", "spam"])
    assert "'text', 'spam'" in caught.value.why
    assert "--set data.label=" in caught.value.fix


def test_unknown_column_names_the_nearest():
    with pytest.raises(DataError, match="no column 'revew'") as caught:
        roles_of(["review", "label"], text="revew")
    assert "did you mean 'review'?" in caught.value.why
    assert caught.value.fix == "--set data.text=COLUMN"


def test_one_column_has_one_role():
    with pytest.raises(DataError, match="'label' has two roles"):
        roles_of(["label", "text"], text="label", label="label")


def test_several_label_columns():
    assert roles_of(["text", "toxic", "rude"], label=("toxic", "rude")).label == ("toxic", "rude")
    with pytest.raises(DataError, match="no column 'rud'"):
        roles_of(["text", "toxic", "rude"], label=("toxic", "rud"))
    with pytest.raises(DataError, match="named twice"):
        roles_of(["text", "toxic"], label=("toxic", "toxic"))


def test_unlabelled_rows_need_no_label():
    roles = roles_of(["text"], labelled=False, label="stars", split="part")
    assert (roles.content, roles.label, roles.split) == ("text", (), None)


def test_labels_among_unlabelled_rows_are_no_text():
    sample = [{"phrase": "good value", "label": "positive", "split": "test"}]
    assert roles_of(["phrase", "label", "split"], sample, labelled=False).content == "phrase"


def test_text_columns_that_are_not_read_are_named_with_the_way_to_read_them():
    told = roles_of(["标题", "内容", "标签"]).notices[1]
    assert told.startswith("text columns that are not read: '标题' (--set ")
    chosen = dict(word.split("=") for word in shlex.split(told[told.index("(") + 1 :]) if "=" in word)
    assert chosen == {"data.text": "标题", "data.pair": "内容"}
    roles = roles_of(["标题", "内容", "标签"], text=chosen["data.text"], pair=chosen["data.pair"])
    assert (roles.content, roles.pair) == ("标题", "内容")
    assert not [notice for notice in roles.notices if "not read" in notice]


def test_of_other_columns_and_of_choices_nothing_is_said():
    for columns, settings in [
        (["id", "内容", "作者", "标签"], {}),
        (["title", "body", "label"], {"text": "body"}),
        (["title", "body"], {"labelled": False}),
    ]:
        assert not [notice for notice in roles_of(columns, **settings).notices if "not read" in notice]
    told = roles_of(["question", "answer", "body", "label"], text="auto").notices
    assert "text columns that are not read: 'body'" in told


@pytest.mark.parametrize(
    ("file", "advises_a_header"),
    [("a.csv", True), ("a.tsv.gz", True), ("a.jsonl", False), ("DataFrame", False), ("a.parquet", False)],
)
def test_the_column_that_is_left_is_named_and_a_header_is_advised_where_there_is_one(file, advises_a_header):
    with pytest.raises(DataError, match="no label column found") as caught:
        find_roles(DataPart(source=file), ["message", "queue"], [], file=file, labelled=True)
    assert caught.value.fix.startswith("--set data.label=queue")
    assert ("add a line before it" in caught.value.fix) is advises_a_header
