"""The last layer fitted by scikit-learn gives scikit-learn's answers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import LinearSVC
from torch import nn

from paceline.errors import ModelError
from paceline.models.features import collect, fit_final_linear, write_into


def samples(num_classes: int, n: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """Features with very different scales and offsets, and labels that they half explain."""
    random = np.random.default_rng(num_classes)
    labels = random.integers(num_classes, size=n)
    features = random.normal(size=(n, 5)) + 0.7 * np.eye(5)[labels % 5]
    return features * [1, 100, 0.01, 1, 1] + [0, 500, 0, -3, 0], labels


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("num_classes", [2, 3])
def test_logits_have_the_probabilities_of_logistic_regression(num_classes: int) -> None:
    features, labels = samples(num_classes)
    weight, bias = fit_final_linear(features, labels, "classification", "logistic", num_classes)
    theirs = make_pipeline(StandardScaler(), LogisticRegression(max_iter=5_000)).fit(features, labels)
    np.testing.assert_allclose(softmax(features @ weight.T + bias), theirs.predict_proba(features), atol=1e-6)


@pytest.mark.parametrize("num_classes", [2, 3])
def test_logits_are_the_decision_values_of_the_svm(num_classes: int) -> None:
    features, labels = samples(num_classes)
    weight, bias = fit_final_linear(features, labels, "classification", "svm", num_classes)
    theirs = make_pipeline(StandardScaler(), LinearSVC(random_state=0, max_iter=20_000)).fit(features, labels)
    logits = features @ weight.T + bias
    values = logits if num_classes > 2 else logits[:, 1] - logits[:, 0]
    np.testing.assert_allclose(values, theirs.decision_function(features), atol=1e-6)


def test_multi_label_fits_one_label_against_the_rest() -> None:
    features, labels = samples(4)
    targets = np.stack([labels == 1, labels > 1, np.zeros_like(labels)], axis=1).astype(np.float32)
    weight, bias = fit_final_linear(features, targets, "multi_label", "logistic", 3)
    probabilities = 1 / (1 + np.exp(-np.clip(features @ weight.T + bias, -50, 50)))
    theirs = make_pipeline(StandardScaler(), LogisticRegression(max_iter=5_000)).fit(features, targets[:, 1])
    np.testing.assert_allclose(probabilities[:, 1], theirs.predict_proba(features)[:, 1], atol=1e-6)
    assert probabilities[:, 2].max() < 1e-9, "a label that no sample has must not be predicted"


def test_regression() -> None:
    features, labels = samples(5)
    targets = features[:, 0] * 2 + labels + 40
    weight, bias = fit_final_linear(features, targets, "regression", "logistic", 1)
    theirs = make_pipeline(StandardScaler(), Ridge()).fit(features, targets)
    np.testing.assert_allclose(features @ weight[0] + bias[0], theirs.predict(features), atol=1e-6)
    weight, bias = fit_final_linear(features, targets, "regression", "svm", 1)
    residual = targets - (features @ weight[0] + bias[0])
    assert residual.std() < targets.std() / 1.5
    assert abs(residual.mean()) < 0.1


def test_a_class_without_samples_is_never_predicted() -> None:
    features, labels = samples(2)
    weight, bias = fit_final_linear(features, labels * 2, "classification", "logistic", 3)
    assert set((features @ weight.T + bias).argmax(axis=1)) == {0, 2}
    weight, bias = fit_final_linear(features, np.ones_like(labels), "classification", "svm", 3)
    assert set((features @ weight.T + bias).argmax(axis=1)) == {1}


def test_a_layer_without_bias_is_fitted_without_one() -> None:
    features, labels = samples(2)
    weight, bias = fit_final_linear(features, labels, "classification", "logistic", 2, bias=False)
    assert not bias.any()
    layer = nn.Linear(5, 2, bias=False)
    write_into(layer, weight, bias)
    np.testing.assert_allclose(layer.weight.detach().numpy(), weight, rtol=1e-6)
    with pytest.raises(ModelError, match="no bias"):
        write_into(layer, weight, bias + 1)
    with pytest.raises(ModelError, match="the fitted one"):
        write_into(nn.Linear(4, 2), weight, bias)


def test_features_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ModelError, match="not finite"):
        fit_final_linear(np.array([[1.0], [np.nan]]), np.array([0, 1]), "classification", "logistic", 2)


def test_collected_features_are_what_the_last_layer_sees() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    model[0].eval()
    inputs = torch.randn(10, 3)
    found = collect(model, model[2], lambda net, batch: net(batch), inputs.split(4))
    np.testing.assert_allclose(found, model[0](inputs).detach().numpy(), rtol=1e-6)
    assert [module.training for module in model] == [False, True, True], "the modes of the modules were changed"
    assert not model[2]._forward_hooks
    assert collect(model, model[2], lambda net, batch: net(batch), []).shape == (0, 4)


def test_a_layer_that_sees_every_token_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    with pytest.raises(ModelError, match=r"one vector a sample\n.*is given \[2, 5, 4\]"):
        collect(model, model[1], lambda net, batch: net(batch), [torch.zeros(2, 5, 3)])
    with pytest.raises(ModelError, match=r"one vector a sample\n.*is run 2 times"):
        collect(model[1], model[1], lambda net, batch: net(net(batch) @ torch.ones(2, 4)), [torch.zeros(2, 4)])


def test_logits_that_another_layer_has_a_part_in_are_refused() -> None:
    """SwiftFormer's are the mean of two layers'; the one that was fitted would have its solution halved."""
    model = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])
    with pytest.raises(ModelError, match=r"of more than its last linear layer\n.*\n.*set model.train=head"):
        collect(model, model[1], lambda net, batch: (net[0](batch) + net[1](batch)) / 2, [torch.ones(2, 3)])
    half = collect(model, model[1], lambda net, batch: net[1](batch).double(), [torch.ones(2, 3)])
    assert half.shape == (2, 3), "another number format is no other layer"
