"""A model that a user's own function builds."""

from __future__ import annotations

from torch import nn

from paceline.errors import ModelError
from paceline.references import current_folder_importable, described, resolve


def build(reference: str, num_labels: int) -> nn.Module:
    """The module that ``reference``, a ``package.module:function``, returns for ``num_labels=N``.

    Raises:
        RecipeError: it cannot be imported.
        ModelError: it failed when called, or returned something else.
    """
    function = resolve(reference, "model.factory")
    try:
        with current_folder_importable():
            model = function(num_labels=num_labels)
    except Exception as error:
        fix = f"define it as: def {reference.partition(':')[2]}(num_labels): ..." * isinstance(error, TypeError)
        raise ModelError(
            f"model.factory = {reference}: failed when called with num_labels={num_labels}", described(error), fix
        ) from error
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"model.factory = {reference}: returned {type(model).__name__}",
            "an nn.Module is needed",
            "return the model",
        )
    return model
