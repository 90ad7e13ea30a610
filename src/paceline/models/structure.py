"""Where a model's blocks and its head are, found by shape rather than by name, and which parameters are trained."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Literal

from torch import nn

from paceline.contract.errors import ModelError, nearest

Named = tuple[str, nn.Module]


def blocks(model: nn.Module) -> list[Named]:
    """The repeated blocks with their names, in the order they are passed: transformer layers, ResNet blocks.

    A block is a member of a ModuleList or Sequential whose members are all of one class and hold at least two weight
    matrices each. Where the members are stages, which hold such lists themselves and differ in shape (ResNet, Swin)
    or hold nothing else, their blocks count. Of several kinds the one with most blocks is taken. ALBERT passes one
    block many times, so it has one. A model without repeated blocks gives an empty list.
    """
    kinds: dict[type, list[Named]] = {}
    for _, members in _lists(_base(model)[1], _base(model)[0]):
        for name, block in _inner(members):
            kinds.setdefault(type(block), []).append((name, block))
    return max(kinds.values(), key=len, default=[])


def head_names(model: nn.Module) -> list[str]:
    """Names of the parameters outside the base model: the classifier, with its dense layer where it has one.

    BERT's pooler belongs to the base model. A model that is no transformers model has no base: its head is its last
    linear or convolution layer.
    """
    prefix = _base(model)[0]
    names = [name for name, _ in model.named_parameters()]
    if prefix:
        return [name for name in names if not name.startswith(f"{prefix}.")]
    weighted = [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, nn.Conv2d))]
    return [name for name in names if weighted and name.rpartition(".")[0] == weighted[-1]]


def final_linear(model: nn.Module, num_labels: int) -> nn.Linear:
    """The last linear layer outside the base model with ``num_labels`` outputs, which ``model.train: features`` fits.

    Raises:
        ModelError: there is none.
    """
    prefix = _base(model)[0]
    found = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module.out_features == num_labels
        and not (prefix and name.startswith(f"{prefix}."))
    ]
    if not found:
        where = f" outside its base model ({prefix})" if prefix else ""
        raise ModelError(
            f"model.train = features: {type(model).__name__} has no linear layer with {num_labels} outputs{where}",
            "that layer is what features fits",
            f"--set model.train={'head' if head_names(model) else 'all'}",
        )
    return found[-1]


def parameter_counts(model: nn.Module) -> tuple[int, int]:
    """Its parameters, and those that are trained, in single numbers."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)


def set_trained(model: nn.Module, train: str) -> list[str]:
    """Mark what is trained by ``requires_grad`` and return the names of it.

    ``all``: everything. ``head``: the parameters outside the base model. ``last:K``: the head, the last K blocks, and
    what is registered after the blocks (a final norm, BERT's pooler) but for embeddings. ``features``: nothing, since
    the last layer is fitted without gradients.

    Only gradients are switched off. Frozen parts stay in the mode that ``train()`` and ``eval()`` put them in: during
    training their dropout goes on drawing, and batch norms go on following the batches, as in plain PyTorch.

    Raises:
        ModelError: K is above the number of blocks, or the model has no head of its own.
    """
    names = [name for name, _ in model.named_parameters()]
    if train == "all":
        trained = set(names)
    elif train == "features":
        trained = set()
    else:
        trained = set(trained_head(model, train))
        if train.startswith("last:"):
            trained |= _last(model, int(train.partition(":")[2]))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    return [name for name in names if name in trained]


def trained_head(model: nn.Module, train: str) -> list[str]:
    """``head_names``, of a model that is trained as ``model.train`` says.

    Raises:
        ModelError: it has no head of its own.
    """
    if names := head_names(model):
        return names
    what = f"model.train = {train}: {type(model).__name__} has no parameters outside its base model"
    raise ModelError(what, "those are what is called its head", "--set model.train=all")


def linear_layers(model: nn.Module, targets: Literal["auto"] | Sequence[str] = "auto") -> list[str]:
    """Names of the linear layers that adapters are put beside, in the order of the model; none of them is of the head.

    Layers of torch's own TransformerEncoderLayer and MultiheadAttention are left out: these read the weights of their
    layers themselves, and would pass by what stands beside them.

    Args:
        targets: last parts of the names; ``auto``: all linear layers of the blocks.

    Raises:
        ModelError: there is none, or none of a name.
    """
    head = set(head_names(model))
    passed_by = {id(c) for m in model.modules() if isinstance(m, _READ_WEIGHTS) for c in m.modules()}
    found = [
        name
        for name, module in model.named_modules()
        # GPT-2 and its kin call theirs Conv1D
        if (type(module) is nn.Linear or type(module).__name__ == "Conv1D")
        and id(module) not in passed_by
        and f"{name}.weight" not in head
    ]
    if targets == "auto":
        inside = tuple(f"{name}." for name, _ in blocks(model))
        chosen = [name for name in found if name.startswith(inside)]
        if not chosen:
            what = f"model.train = lora: {type(model).__name__} has no linear layers in its blocks"
            raise ModelError(what, "adapters stand beside those", "--set model.train=head, or last:K")
        return chosen
    for target in targets:
        if not any(_ends(name, target) for name in found):
            raise ModelError(
                f"model.lora.targets: {type(model).__name__} has no linear layer {target} outside its head",
                nearest(target, {name.rpartition(".")[2] for name in found}),
                "--set model.lora.targets=auto",
            )
    return [name for name in found if any(_ends(name, target) for target in targets)]


_READ_WEIGHTS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


def _ends(name: str, ending: str) -> bool:
    return f".{name}".endswith(f".{ending}")


def _last(model: nn.Module, number: int) -> set[str]:
    """Parameters of the last blocks and of what follows them."""
    found = blocks(model)
    if number > len(found):
        why = f"it has {len(found)}" if found else "none were found in it"
        if len(found) == 1 and getattr(getattr(model, "config", None), "num_hidden_layers", 1) > 1:
            why = "all its layers share the weights of one block"
        raise ModelError(
            f"model.train = last:{number}: {type(model).__name__} has fewer blocks",
            why,
            f"--set model.train=last:{len(found)}" if found else "--set model.train=head",
        )
    names = [name for name, _ in model.named_parameters()]
    inside = [name for name in names if any(name.startswith(f"{block}.") for block, _ in found)]
    chosen = {name for name in inside if any(name.startswith(f"{block}.") for block, _ in found[-number:])}
    embeddings = {
        f"{name}.{key}"
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
        for key, _ in module.named_parameters(recurse=False)
    }
    after = set(itertools.islice(names, names.index(inside[-1]) + 1, None))
    return chosen | (after - embeddings)


def _base(model: nn.Module) -> Named:
    """Name and module of the base model; the whole model, named '', where there is none."""
    prefix = getattr(model, "base_model_prefix", "")
    base = getattr(model, prefix, None) if prefix else None
    return (prefix, base) if isinstance(base, nn.Module) else ("", model)


def _lists(module: nn.Module, name: str) -> Iterator[tuple[str, list[Named]]]:
    """The outermost lists of like members inside ``module``."""
    for key, child in module.named_children():
        path = f"{name}.{key}" if name else key
        if isinstance(child, (nn.ModuleList, nn.Sequential)) and _alike(list(child)):
            yield path, [(f"{path}.{index}", member) for index, member in child.named_children()]
        else:
            yield from _lists(child, path)


def _inner(members: list[Named]) -> list[Named]:
    """The members, or when they are stages, the blocks inside them."""
    inside = [list(_lists(member, name)) for name, member in members]
    if not all(inside):
        return members
    if _same_shapes(members) and not all(
        _holds_only(m, n, lists) for (n, m), lists in zip(members, inside, strict=True)
    ):
        return members
    return [block for lists in inside for _, inner in lists for block in _inner(inner)]


def _alike(members: list[nn.Module]) -> bool:
    return len({type(member) for member in members}) == 1 and all(
        sum(parameter.ndim >= 2 for parameter in member.parameters()) >= 2 for member in members
    )


def _same_shapes(members: list[Named]) -> bool:
    return len({tuple(parameter.shape for parameter in member.parameters()) for _, member in members}) == 1


def _holds_only(member: nn.Module, name: str, lists: list[tuple[str, list[Named]]]) -> bool:
    """Whether every parameter of ``member`` is in one of the ``lists``."""
    return all(any(f"{name}.{key}".startswith(f"{path}.") for path, _ in lists) for key, _ in member.named_parameters())


def input_embeddings(model: nn.Module) -> nn.Parameter | None:
    """The table [ids, width] that a transformers model looks tokens up in; None: there is none that is known."""
    find = getattr(model, "get_input_embeddings", None)
    try:
        table = getattr(find(), "weight", None) if find is not None else None
    except (NotImplementedError, AttributeError):  # transformers' way of saying that it has none
        return None
    return table if isinstance(table, nn.Parameter) and table.ndim == 2 else None
