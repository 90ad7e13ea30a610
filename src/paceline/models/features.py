"""Fit the last layer without gradients: extract its input once for every sample, then let scikit-learn solve it.

The solution is written into the model's own linear layer, so that what is saved is a plain transformers model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from paceline.contract.errors import ModelError
from paceline.contract.spans import activity
from paceline.models.heads import head_of


@activity("embedding")
def collect(
    model: nn.Module, linear: nn.Linear, forward: Callable[[nn.Module, Any], object], batches: Iterable[Any]
) -> NDArray[np.float32]:
    """What ``linear`` is given for every sample, [n, d], in the order of ``batches``.

    The model is run in evaluation mode and without gradients; each module is in its own mode again afterwards.

    Args:
        model: the whole model.
        linear: its ``final_linear``.
        forward: runs the model on a batch, as in training.
        batches: batches of any kind that ``forward`` takes, without filling.

    Raises:
        ModelError: the layer sees something else than one vector a sample, is not run, or what it puts out are not the
            logits.
    """
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    modes = [(module, module.training) for module in model.modules()]
    hook = linear.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0], output)))
    rows: list[NDArray[np.float32]] = []
    model.eval()
    try:
        with torch.inference_mode():
            for batch in batches:
                seen.clear()
                logits = forward(model, batch)
                given, puts_out = seen[0] if len(seen) == 1 else (None, None)
                if given is None or given.ndim != 2:
                    found = f"run {len(seen)} times" if given is None else f"given {list(given.shape)}"
                    raise _unfit(model, "does not end in one vector a sample", f"its last linear layer is {found}")
                if not _same(logits, puts_out):
                    what = "makes its logits of more than its last linear layer"
                    raise _unfit(model, what, "that layer is all that features fits")
                rows.append(given.float().cpu().numpy())
    finally:
        hook.remove()
        for module, mode in modes:
            module.training = mode
    return np.concatenate(rows) if rows else np.zeros((0, linear.in_features), np.float32)


def _same(logits: object, puts_out: torch.Tensor | None) -> bool:
    """Whether the logits are what the layer puts out, maybe in another number format."""
    if not isinstance(logits, torch.Tensor) or puts_out is None or logits.shape != puts_out.shape:
        return False
    return torch.equal(logits.float().nan_to_num(), puts_out.float().nan_to_num())


def _unfit(model: nn.Module, what: str, why: str) -> ModelError:
    return ModelError(f"model.train = features: {type(model).__name__} {what}", why, "--set model.train=head")


def fit_final_linear(
    features: NDArray[np.floating[Any]],
    labels: NDArray[Any],
    kind: str,
    classifier: str,
    num_labels: int,
    *,
    bias: bool = True,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Weight [C, d] and bias [C] of a linear layer, fitted on standardised features and scaled back.

    With ``logistic``, softmax of the logits (sigmoid for ``multi_label``) is scikit-learn's probability. With ``svm``
    the logits are decision values, one class against the rest. ``regression`` is ridge regression, or LinearSVR for
    ``svm``. scikit-learn's own defaults apply: C = 1, alpha = 1.

    Args:
        features: [n, d].
        labels: int [n], float [n] for regression, or 0/1 [n, C] for ``multi_label``.
        kind: name of the task.
        classifier: ``logistic`` or ``svm``.
        num_labels: C. A class that no sample has gets a logit that is never the largest.
        bias: False for a layer without one; the features are then scaled but not centred.

    Raises:
        ModelError: features that are not finite.
    """
    from sklearn.preprocessing import StandardScaler

    if not np.isfinite(features).all():
        raise ModelError(
            "model.train = features: the model gives features that are not finite", fix="use another model"
        )
    scaler = StandardScaler(with_mean=bias).fit(np.asarray(features, np.float64))
    scaled = scaler.transform(np.asarray(features, np.float64))
    rows = head_of(kind).solve(scaled, labels, classifier, num_labels, bias)
    weight = np.stack([row for row, _ in rows]) / scaler.scale_
    offset = np.array([start for _, start in rows])
    return weight, offset - weight @ scaler.mean_ if bias else offset


def write_into(linear: nn.Linear, weight: NDArray[np.floating[Any]], bias: NDArray[np.floating[Any]]) -> None:
    """Copy a fitted layer into ``linear``, in place.

    Raises:
        ModelError: the layer has another shape, or no bias to hold ``bias``.
    """
    if tuple(linear.weight.shape) != weight.shape:
        raise ModelError(f"the final layer is {list(linear.weight.shape)}, the fitted one {list(weight.shape)}")
    if linear.bias is None and np.any(bias):
        raise ModelError("the final layer has no bias", "the fitted one has", "fit it with bias=False")
    with torch.no_grad():
        linear.weight.copy_(torch.from_numpy(np.ascontiguousarray(weight)))
        if linear.bias is not None:
            linear.bias.copy_(torch.from_numpy(np.ascontiguousarray(bias)))
