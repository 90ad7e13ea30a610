"""Labels become numbers, and labels that cannot are named with their place."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.contract.errors import DataError
from paceline.data.dataset import Origins
from paceline.data.labels import class_names, empty_labels, encode_known_labels, encode_labels


def _origins(num_rows: int) -> Origins:
    return Origins(("data.csv",), np.zeros(num_rows, dtype=np.int32), np.arange(2, num_rows + 2, dtype=np.int64))


def _splits(**rows: list[int]) -> dict[str, np.ndarray]:
    return {name: np.array(ids, dtype=np.int64) for name, ids in rows.items()}


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["10", "9", "2"], ("2", "9", "10")),
        (["1.5", "-1", "01", "1"], ("-1", "01", "1", "1.5")),
        (["10", "9", "b"], ("10", "9", "b")),
        (["nan", "2", "10"], ("10", "2", "nan")),
        (["pos", "neg", "pos"], ("neg", "pos")),
    ],
)
def test_class_names_are_sorted(labels: list[str], names: tuple[str, ...]) -> None:
    assert class_names(labels, "classification") == names


def test_classification() -> None:
    encoded = encode_labels(["b", "a", "b"], "classification", _splits(train=[0, 1], test=[2]), _origins(3))
    assert encoded.names == ("a", "b")
    assert encoded.values.dtype == np.int64
    assert encoded.values.tolist() == [1, 0, 1]


def test_multi_label_has_one_column_a_class_and_may_be_empty() -> None:
    labels = [("b", "a"), (), ("c",)]
    encoded = encode_labels(labels, "multi_label", _splits(train=[0, 1, 2]), _origins(3))
    assert encoded.names == ("a", "b", "c")
    assert encoded.values.dtype == np.float32
    assert encoded.values.tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 1]]


def test_regression_takes_the_name_of_its_column() -> None:
    encoded = encode_labels([1.5, -2], "regression", _splits(train=[0, 1]), _origins(2), target="score")
    assert encoded.names == ("score",)
    assert encoded.values.dtype == np.float32
    assert encoded.values.tolist() == [1.5, -2.0]


@pytest.mark.parametrize("target", [float("nan"), float("inf"), 1e300])
def test_targets_that_are_not_finite_in_single_precision(target: float) -> None:
    with pytest.raises(DataError, match=r"data\.csv:3, column 'target': target .* not a finite number"):
        encode_labels([1.0, target], "regression", _splits(train=[0, 1]), _origins(2))


def test_a_class_missing_from_train_is_named_with_its_first_place() -> None:
    with pytest.raises(
        DataError, match=r"data\.csv:4, column 'target': test has labels that are missing from train: 'c', 'd'"
    ) as found:
        encode_labels(list("abcd"), "classification", _splits(train=[0, 1], test=[2, 3]), _origins(4))
    assert (found.value.file, found.value.line) == ("data.csv", 4)


def test_a_multi_label_class_missing_from_train() -> None:
    with pytest.raises(DataError, match=r"data\.csv:3, column 'target': validation .*'b'"):
        encode_labels([("a",), ("a", "b")], "multi_label", _splits(train=[0], validation=[1]), _origins(2))


def test_a_single_class_is_refused_unless_allowed() -> None:
    splits = _splits(train=[0, 1])
    with pytest.raises(DataError, match="every label of train is 'a'"):
        encode_labels(["a", "a"], "classification", splits, _origins(2))
    allowed = encode_labels(["a", "a"], "classification", splits, _origins(2), allow_single_class=True)
    assert allowed.values.tolist() == [0, 0]


def test_known_labels_keep_the_models_order() -> None:
    encoded = encode_known_labels(["pos", "neg"], "classification", ("pos", "neg"), _origins(2))
    assert encoded.values.tolist() == [0, 1]


def test_a_label_unknown_to_the_model_is_named_with_its_place() -> None:
    with pytest.raises(DataError, match=r"data\.csv:3: label 'postive' is unknown(.|\n)*did you mean 'positive'"):
        encode_known_labels(["negative", "postive"], "classification", ("negative", "positive"), _origins(2))
    with pytest.raises(DataError, match=r"data\.csv:2: label 'c'"):
        encode_known_labels([("a", "c")], "multi_label", ("a", "b"), _origins(1))


@pytest.mark.parametrize(
    ("kind", "shape", "dtype"),
    [("classification", (3,), np.int64), ("multi_label", (3, 2), np.float32), ("regression", (3,), np.float32)],
)
def test_unlabelled_samples_get_zeros(kind: str, shape: tuple[int, ...], dtype: type) -> None:
    encoded = empty_labels(3, kind, ("a", "b"))
    assert encoded.values.shape == shape
    assert encoded.values.dtype == dtype
    assert not encoded.values.any()


HEAD = ("entailment", "neutral", "contradiction")


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["neutral", "contradiction", "entailment"], HEAD),
        (["Neutral", "CONTRADICTION", "Entailment"], ("Entailment", "Neutral", "CONTRADICTION")),
        (["neutral", "contradiction"], HEAD),
        (["neutral", "other"], ("neutral", "other")),
        (["neutral", "Neutral"], ("Neutral", "neutral")),
    ],
)
def test_classes_that_the_head_knows_keep_its_order(labels: list[str], names: tuple[str, ...]) -> None:
    everything = _splits(train=list(range(len(labels))))
    encoded = encode_labels(labels, "classification", everything, _origins(len(labels)), head=HEAD)
    assert encoded.names == names
    assert [names[value] for value in encoded.values] == labels


def test_classes_of_the_head_that_do_not_occur_are_told() -> None:
    labels = ["neutral", "contradiction"]
    encoded = encode_labels(labels, "classification", _splits(train=[0, 1]), _origins(2), head=HEAD)
    assert "entailment" in encoded.notices[0]


@pytest.mark.parametrize(
    ("labels", "head", "names"),
    [
        (["neutral", "contradiction", "entailment"], HEAD, HEAD),
        (["neutral", "contradiction", "Entailment"], HEAD, ("Entailment", "neutral", "contradiction")),
        (["0", "1", "2"], ("LABEL_0", "LABEL_1", "LABEL_2"), ("0", "1", "2")),
    ],
)
def test_a_class_of_other_splits_alone_has_its_row_of_the_head(
    labels: list[str], head: tuple[str, ...], names: tuple[str, ...]
) -> None:
    splits = _splits(train=[0, 1], validation=[2])
    encoded = encode_labels(labels, "classification", splits, _origins(3), head=head)
    assert encoded.names == names
    assert [names[value] for value in encoded.values] == labels
    assert f"train has no sample of {labels[2]!r}" in encoded.notices[0]


def test_a_list_of_columns_keeps_its_order() -> None:
    labels = [("toxic", "rude"), ("spam",)]
    order = ("toxic", "spam", "rude")
    encoded = encode_labels(labels, "multi_label", _splits(train=[0, 1]), _origins(2), order=order)
    assert encoded.names == order
    assert encoded.values.tolist() == [[1, 0, 1], [0, 1, 0]]


UNNAMED = tuple(f"LABEL_{row}" for row in range(12))


@pytest.mark.parametrize(
    ("labels", "head", "names"),
    [
        ([f"LABEL_{row}" for row in range(11)], (), UNNAMED[:11]),
        ([str(row) for row in range(12)], UNNAMED, tuple(str(row) for row in range(12))),
        (["LABEL_10", "LABEL_2"], UNNAMED, UNNAMED),
        (["label_10", "Label_2"], UNNAMED[:11], (*UNNAMED[:2], "Label_2", *UNNAMED[3:10], "label_10")),
        (["2", "10"], UNNAMED, (*(str(row) for row in range(12)),)),
        (["0.0", "2.0"], UNNAMED[:3], ("0.0", "1", "2.0")),
        (["2", "10"], ("10", "2"), ("10", "2")),
        (["0", "1"], UNNAMED[:3], ("0", "1")),
        (["1", "2", "3"], UNNAMED[:3], ("1", "2", "3")),
        (["0", "LABEL_2"], UNNAMED[:3], ("0", "LABEL_2")),
        (["0", "0.0", "2"], UNNAMED[:3], ("0", "0.0", "2")),
        (["0", "2"], HEAD, ("0", "2")),
    ],
)
def test_classes_go_by_number_where_rows_have_no_names(
    labels: list[str], head: tuple[str, ...], names: tuple[str, ...]
) -> None:
    everything = _splits(train=list(range(len(labels))))
    encoded = encode_labels(labels[::-1], "classification", everything, _origins(len(labels)), head=head)
    assert encoded.names == names
    assert [names[value] for value in encoded.values] == labels[::-1]
    assert bool(encoded.notices) == (len(names) > len(labels)), "classes that do not occur are told of"


@pytest.mark.parametrize(
    ("labels", "rows", "by_number"),
    [
        (["LABEL_2", "LABEL_10"], [2, 10], False),
        (["10", "2", "0"], [10, 2, 0], True),
        (["1.0", "0.0"], [1, 0], True),
        (["label_3", "LABEL_3"], [3, 3], False),
    ],
)
def test_a_model_without_names_is_measured_by_number(labels: list[str], rows: list[int], by_number: bool) -> None:
    encoded = encode_known_labels(labels, "classification", UNNAMED, _origins(len(labels)))
    assert encoded.values.tolist() == rows
    assert encoded.names == UNNAMED
    assert any("by number: " in notice for notice in encoded.notices) == by_number


def test_numbers_of_several_labels_are_columns() -> None:
    encoded = encode_known_labels([("0", "2"), ()], "multi_label", UNNAMED[:3], _origins(2))
    assert encoded.values.tolist() == [[1, 0, 1], [0, 0, 0]]


@pytest.mark.parametrize(
    ("label", "names", "fix"),
    [
        ("3", UNNAMED[:3], "write their numbers, 0 to 2"),
        ("positive", UNNAMED[:2], "write their numbers, 0 to 1"),
        ("1", HEAD, "write the classes' names; by number 1 would be 'neutral'"),
        ("us", ("US", "Us"), "correct the label"),
    ],
)
def test_an_unknown_label_is_answered_by_what_the_model_calls_its_classes(
    label: str, names: tuple[str, ...], fix: str
) -> None:
    with pytest.raises(DataError, match=f"label '{label}' is unknown to the model") as found:
        encode_known_labels([names[0], label], "classification", names, _origins(2))
    assert (found.value.line, fix in found.value.fix) == (3, True), found.value


def test_a_listed_column_that_is_never_1_is_told_of() -> None:
    encoded = encode_labels(
        [("toxic",), ("spam",)], "multi_label", _splits(train=[0, 1]), _origins(2), order=("toxic", "rude", "spam")
    )
    assert encoded.names == ("toxic", "spam")
    assert encoded.notices == ("label column 'rude' is 1 in no row of train and is left out",)


@pytest.mark.parametrize(
    ("labels", "names", "rows"),
    [
        (["0", "1"], ("0.0", "1.0"), [0, 1]),
        (["1.0", "0.0"], ("0", "1"), [1, 0]),
        (["01", "2"], ("1", "2"), [0, 1]),
        (["5.0", "other"], ("5", "other"), [0, 1]),
        (["true", "False"], ("0", "1"), [1, 0]),
        (["TRUE", "0", "false"], ("1.0", "0.0"), [0, 1, 1]),
        (["1", "0.0"], ("False", "True"), [1, 0]),
        (["false", "true"], ("LABEL_0", "LABEL_1"), [0, 1]),
    ],
)
def test_numbers_are_compared_by_value(labels: list[str], names: tuple[str, ...], rows: list[int]) -> None:
    encoded = encode_known_labels(labels, "classification", names, _origins(len(labels)))
    assert encoded.values.tolist() == rows
    assert len(encoded.notices) == 1


@pytest.mark.parametrize(
    ("label", "names", "why"),
    [
        ("1.0", ("1", "01", "2"), "known: 01, 1, 2"),
        ("10", ("1", "2", "100"), "known: 1, 2, 100"),
        ("3", ("0.0", "1.0"), "known: 0.0, 1.0"),
        ("nan", ("nan ", "b"), "did you mean"),
        ("positive", ("negative", "neutral"), "known: negative, neutral"),
        ("true", ("0", "1", "2"), "known: 0, 1, 2"),
        ("true", ("1", "2"), "known: 1, 2"),
        ("yes", ("0", "1"), "known: 0, 1"),
        ("x", tuple(f"class {row}" for row in range(99)), "and 89 more"),
    ],
)
def test_only_a_near_label_is_offered(label: str, names: tuple[str, ...], why: str) -> None:
    with pytest.raises(DataError, match=f"label '{label}' is unknown to the model") as caught:
        encode_known_labels([label], "classification", names, _origins(1))
    assert why in caught.value.why
    assert "on_bad_row=skip" in caught.value.fix
