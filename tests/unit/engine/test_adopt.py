import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.contract.errors import UserError
from paceline.engine.adopt import adopt


class Parallel(DistributedDataParallel):
    """The wrapper without the process group that it would ask for."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module


def sharded() -> nn.Module:
    """What fully_shard does to a module's class."""
    from torch.distributed.fsdp import FSDPModule

    module = nn.Linear(2, 2)
    module.__class__ = type("FSDPLinear", (FSDPModule, nn.Linear), {})
    return module


@pytest.mark.parametrize(
    ("make", "name"), [(lambda: Parallel(nn.Linear(2, 2)), "DistributedDataParallel"), (sharded, "FSDPModule")]
)
@pytest.mark.parametrize("inside", [lambda m: m, lambda m: nn.Sequential(nn.ReLU(), m)])
def test_a_model_whose_gradients_are_summed_by_hooks_is_refused(make, name: str, inside) -> None:
    model = inside(make())
    with pytest.raises(UserError, match=f"wrapped in {name}") as error:
        adopt(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, b: m(b).sum())
    assert "backward()" in error.value.why
    assert error.value.fix


def test_an_ordinary_model_is_adopted() -> None:
    model = nn.Linear(2, 2)
    engine = adopt(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, b: m(b).sum())
    before = model.weight.detach().clone()
    engine.accumulate([torch.ones(1, 2)], 1)
    assert engine.update().finite
    torch.testing.assert_close(model.weight.detach(), before - 0.1)
    assert "eager: the loop is not paceline's" in engine.execution.values()
