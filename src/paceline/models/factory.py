"""A model that a user's own function builds."""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import is_lazy

from paceline.errors import ModelError
from paceline.references import current_folder_importable, described, resolve


def build(reference: str, num_labels: int) -> nn.Module:
    """The module that ``reference``, a ``package.module:function``, returns for ``num_labels=N``.

    Raises:
        RecipeError: it cannot be imported.
        ModelError: it failed when called, returned something else, or a model with layers that have no shape yet.
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
    for name, module in model.named_modules():
        if any(is_lazy(held) for held in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
            raise ModelError(
                f"model.factory = {reference}: {name or 'the model'} is a {type(module).__name__} without a shape",
                "it takes its shape from the first batch, and weights are counted and moved before there is one",
                "call the model once on a made-up batch in the factory, or give the layer its in_features",
            )
    return model
