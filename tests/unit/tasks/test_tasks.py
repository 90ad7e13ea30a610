import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import f1_score, matthews_corrcoef, mean_absolute_error, roc_auc_score

from paceline.contract.errors import RecipeError
from paceline.recipe.parts import TaskPart
from paceline.seams import Batch
from paceline.tasks import best_metric, task_for

NAMES = ("a", "b", "c")
CPU = torch.device("cpu")


def batch(labels: torch.Tensor, filler: int = 0) -> Batch:
    weights = torch.ones(len(labels))
    weights[len(labels) - filler :] = 0
    return Batch({}, labels, weights)


def cut(meter, logits: torch.Tensor, labels: torch.Tensor, size: int) -> dict[str, float]:
    for start in range(0, len(labels), size):
        meter.update(logits[start : start + size], batch(labels[start : start + size]))
    return meter.compute()


def made(kind: str, seed: int = 0, n: int = 50):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, 1 if kind == "regression" else 3, generator=generator)
    if kind == "classification":
        labels = torch.randint(0, 3, (n,), generator=generator)
    elif kind == "multi_label":
        labels = (torch.rand(n, 3, generator=generator) > 0.5).float()
    else:
        labels = torch.randn(n, generator=generator)
    return logits, labels


@pytest.mark.parametrize("kind", ["classification", "multi_label", "regression"])
def test_loss_sum_over_count_is_torchs_mean(kind: str) -> None:
    logits, labels = made(kind)
    task = task_for(kind, NAMES if kind != "regression" else ("y",), TaskPart())
    ours = task.loss_sum(logits, batch(labels)) / task.count(labels.numpy())
    theirs = {
        "classification": lambda: F.cross_entropy(logits, labels),
        "multi_label": lambda: F.binary_cross_entropy_with_logits(logits, labels),
        "regression": lambda: F.mse_loss(logits[:, 0], labels),
    }[kind]()
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kind", ["classification", "multi_label", "regression"])
def test_filler_changes_neither_loss_nor_metrics_nor_right_answers(kind: str) -> None:
    logits, labels = made(kind)
    task = task_for(kind, NAMES if kind != "regression" else ("y",), TaskPart())
    padded_logits = torch.cat([logits, torch.full_like(logits[:7], 100.0)])
    padded_labels = torch.cat([labels, labels[:7]])
    torch.testing.assert_close(
        task.loss_sum(padded_logits, batch(padded_labels, 7)), task.loss_sum(logits, batch(labels))
    )
    assert task.correct(padded_logits, batch(padded_labels, 7)) == task.correct(logits, batch(labels))
    one, other = task.meter(CPU), task.meter(CPU)
    one.update(logits, batch(labels))
    other.update(padded_logits, batch(padded_labels, 7))
    assert one.compute() == other.compute()
    assert one.confusion() == other.confusion()


@pytest.mark.parametrize("kind", ["classification", "multi_label", "regression"])
@pytest.mark.parametrize("size", [1, 7, 50])
def test_metrics_do_not_depend_on_the_batch_size(kind: str, size: int) -> None:
    logits, labels = made(kind)
    task = task_for(kind, NAMES if kind != "regression" else ("y",), TaskPart())
    assert cut(task.meter(CPU), logits, labels, size) == pytest.approx(
        cut(task.meter(CPU), logits, labels, 50), rel=1e-5
    )


def test_classification_metrics_are_those_of_scikit_learn() -> None:
    logits, labels = made("classification")
    task = task_for("classification", NAMES, TaskPart(metrics=("accuracy", "f1", "auroc", "mcc")))
    found = cut(task.meter(CPU), logits, labels, 8)
    predicted = logits.argmax(1).numpy()
    assert found["accuracy"] == pytest.approx((predicted == labels.numpy()).mean())
    assert found["f1"] == pytest.approx(f1_score(labels, predicted, average="macro"), rel=1e-5)
    assert found["mcc"] == pytest.approx(matthews_corrcoef(labels, predicted), rel=1e-4)
    probabilities = logits.softmax(1).double().numpy()
    probabilities /= probabilities.sum(1, keepdims=True)
    assert found["auroc"] == pytest.approx(roc_auc_score(labels, probabilities, multi_class="ovr"), rel=1e-4)


@pytest.mark.filterwarnings("ignore:A single label was found")
@pytest.mark.parametrize("names", [("a", "b"), NAMES], ids=["two classes", "three classes"])
@pytest.mark.parametrize(
    ("labels", "predicted"),
    [
        ([0, 1, 0, 1, 1], [0, 0, 0, 0, 0]),
        ([0, 1, 0, 1, 1], [1, 1, 1, 1, 1]),
        ([0, 0, 0, 0, 0], [0, 1, 0, 1, 1]),
        ([1, 1, 1, 1, 1], [1, 1, 1, 1, 1]),
        ([1, 1, 1, 1, 1], [0, 0, 0, 0, 0]),
        ([0, 1, 0, 1, 1], [0, 1, 0, 1, 1]),
        ([0, 1, 0, 1, 1], [1, 0, 1, 0, 0]),
        ([0, 1, 0, 1, 1], [0, 1, 1, 1, 0]),
    ],
)
def test_mcc_is_that_of_scikit_learn_also_of_one_class(
    names: tuple[str, ...], labels: list[int], predicted: list[int]
) -> None:
    meter = task_for("classification", names, TaskPart(metrics=("mcc",))).meter(CPU)
    found = cut(meter, F.one_hot(torch.tensor(predicted), len(names)).float(), torch.tensor(labels), 2)["mcc"]
    assert found == pytest.approx(matthews_corrcoef(labels, predicted), abs=1e-12)


def test_regression_metrics_and_confusion() -> None:
    logits, targets = made("regression")
    task = task_for("regression", ("y",), TaskPart(metrics=("mae", "mse", "pearson")))
    meter = task.meter(CPU)
    found = cut(meter, logits, targets, 9)
    assert found["mae"] == pytest.approx(mean_absolute_error(targets, logits[:, 0]), rel=1e-5)
    assert found["pearson"] == pytest.approx(np.corrcoef(targets, logits[:, 0])[0, 1], rel=1e-4)
    assert meter.confusion() is None
    logits, labels = made("classification")
    meter = task_for("classification", NAMES, TaskPart()).meter(CPU)
    cut(meter, logits, labels, 9)
    matrix = np.array(meter.confusion())
    assert matrix.sum() == 50
    assert np.trace(matrix) == (logits.argmax(1) == labels).sum()


def test_a_row_of_the_confusion_matrix_is_a_true_class() -> None:
    labels, predicted = torch.tensor([0, 0, 0, 1, 2, 2]), torch.tensor([1, 1, 0, 1, 0, 2])
    meter = task_for("classification", NAMES, TaskPart()).meter(CPU)
    cut(meter, F.one_hot(predicted, 3).float(), labels, 4)
    assert meter.confusion() == ((1, 2, 0), (0, 1, 0), (1, 0, 1))


@pytest.mark.parametrize("kind", ["classification", "multi_label"])
def test_right_answers_while_training_are_those_that_accuracy_counts(kind: str) -> None:
    logits, labels = made(kind)
    task = task_for(kind, NAMES, TaskPart(metrics=("accuracy",)))
    right = task.correct(logits, batch(labels)) / task.count(labels.numpy())
    assert float(right) == pytest.approx(cut(task.meter(CPU), logits, labels, 50)["accuracy"])


def test_a_label_is_predicted_from_a_probability_of_one_half() -> None:
    task = task_for("multi_label", NAMES, TaskPart())
    logits = torch.tensor([[0.1, -0.1, 0.4], [-0.4, 3.0, -3.0]])  # probabilities of 0.40 to 0.60 among them
    for labels, right in ((logits > 0, 6), (logits <= 0, 0)):
        assert task.correct(logits, batch(labels.float())) == right


def test_unknown_metric_names_the_nearest() -> None:
    with pytest.raises(RecipeError, match="did you mean 'accuracy'"):
        task_for("classification", NAMES, TaskPart(metrics=("acuracy",)))


def test_a_users_loss_and_metric(tmp_path, monkeypatch) -> None:
    (tmp_path / "my_task_test.py").write_text(
        "import torch.nn.functional as F\n"
        "def smooth(logits, labels):\n"
        "    return F.cross_entropy(logits, labels, reduction='none', label_smoothing=0.1)\n"
        "def mean(logits, labels): return F.cross_entropy(logits, labels)\n"
        "def top_score(scores, labels): return scores.max()\n"
    )
    monkeypatch.chdir(tmp_path)
    logits, labels = made("classification")
    part = TaskPart(loss="my_task_test:smooth", metrics=("my_task_test:top_score",))
    task = task_for("classification", NAMES, part)
    expected = F.cross_entropy(logits, labels, label_smoothing=0.1)
    torch.testing.assert_close(task.loss_sum(logits, batch(labels)) / 50, expected)
    assert task.best_metric == "-loss"
    assert cut(task.meter(CPU), logits, labels, 20)["top_score"] == pytest.approx(logits.softmax(1).max().item())
    with pytest.raises(RecipeError, match="reduction='none'"):
        task_for("classification", NAMES, TaskPart(loss="my_task_test:mean")).loss_sum(logits, batch(labels))


def test_the_best_metric_is_one_that_is_measured_and_whose_best_is_meant() -> None:
    task = task_for("classification", ("a", "b"), TaskPart(metrics=("accuracy", "auroc")))
    assert best_metric(task, "auto") == "accuracy"
    assert best_metric(task, "auroc") == "auroc"
    assert best_metric(task, "-loss") == "-loss"
    with pytest.raises(RecipeError, match="did you mean 'auroc'"):
        best_metric(task, "auruc")
    with pytest.raises(RecipeError, match=r"a lower loss is better(.|\n)*best_metric=-loss"):
        best_metric(task, "loss")
    with pytest.raises(RecipeError, match="a lower mse is better"):
        best_metric(task_for("regression", ("y",), TaskPart()), "mse")


def test_two_metrics_of_one_name_are_refused() -> None:
    with pytest.raises(RecipeError, match="two are called add"):
        task_for("classification", ("a", "b"), TaskPart(metrics=("operator:add", "_operator:add")))


def test_a_metric_that_so_few_samples_do_not_have_is_nan() -> None:
    task = task_for("regression", ("y",), TaskPart(metrics=("r2", "mse")))
    found = cut(task.meter(CPU), torch.ones(1, 1), torch.zeros(1), 1)
    assert math.isnan(found["r2"])
    assert found["mse"] == 1.0
