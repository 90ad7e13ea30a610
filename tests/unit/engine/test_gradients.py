import time

import pytest
import torch
from torch import nn

from paceline.contract.errors import UserError
from paceline.optim.flat import FlatLayout
from paceline.optim.gradients import FlatGradients, norm_of_buffers


def made() -> tuple[nn.Sequential, FlatGradients, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    return model, FlatGradients(list(model.parameters())), torch.randn(6, 4)


def by_backward(model: nn.Module, *losses: torch.Tensor) -> list[torch.Tensor]:
    """The gradients that torch itself accumulates, leaving the model's own alone."""
    kept = [p.grad for p in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None
    for loss in losses:
        loss.backward()
    found = [p.grad for p in model.parameters()]
    for parameter, gradient in zip(model.parameters(), kept, strict=True):
        parameter.grad = gradient
    return found


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if not torch.equal(a, b)] == []


def test_the_first_overwrites_and_the_others_add_with_the_bits_of_backward() -> None:
    model, gradients, inputs = made()
    losses = [lambda k=k: model(inputs[k]).square().sum() for k in range(3)]
    for _ in range(2):  # the second step starts over, though nobody zeroed the first one's gradients
        for index, loss in enumerate(losses):
            gradients.add(loss(), first=index == 0, last=index == 2)
        assert_equal([p.grad for p in model.parameters()], by_backward(model, *(loss() for loss in losses)))


def test_what_gets_no_gradient_is_zero_in_the_first_and_keeps_its_sum_after() -> None:
    model, gradients, inputs = made()
    loss = model(inputs).sum()
    gradients.add(loss, first=True, last=False)
    whole = [p.grad.clone() for p in model.parameters()]
    gradients.add(model[0](inputs).sum() * 0, first=False, last=True)
    assert_equal([p.grad for p in model.parameters()], whole)
    gradients.add(model[0](inputs).sum(), first=True, last=True)
    assert model[0].weight.grad.any()
    assert not model[2].weight.grad.any()
    assert not model[2].bias.grad.any()


def test_a_parameter_used_twice_gets_the_sum() -> None:
    weight = nn.Parameter(torch.ones(3))
    gradients = FlatGradients([weight])
    gradients.add((weight * 2).sum() + (weight * 3).sum(), first=True, last=True)
    assert weight.grad.tolist() == [5.0] * 3


@pytest.mark.parametrize("first", [True, False])
def test_gradients_of_other_strides_and_sparse_ones_are_taken_in(first: bool) -> None:
    convolution = nn.Conv2d(4, 6, 1).to(memory_format=torch.channels_last)
    transposed, table = nn.Parameter(torch.ones(2, 3)), nn.Embedding(5, 2, sparse=True)
    model = nn.ModuleList([convolution, nn.ParameterList([transposed]), table])
    gradients = FlatGradients(list(model.parameters()))
    images = torch.randn(2, 4, 3, 3).to(memory_format=torch.channels_last)
    factors = torch.arange(6.0).view(3, 2)

    def loss() -> torch.Tensor:
        return (
            convolution(images).square().sum() + (transposed.t() * factors).sum() + table(torch.tensor([1, 1, 4])).sum()
        )

    if not first:
        gradients.zero()
    gradients.add(loss(), first=first, last=True)
    expected = [g.to_dense() for g in by_backward(model, loss())]
    assert_equal([p.grad for p in model.parameters()], expected)


def test_channels_last_gradients_have_their_weights_strides() -> None:
    """Fused updates refuse lists in which they differ."""
    convolution = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
    FlatGradients(list(convolution.parameters()))
    assert convolution.weight.grad.stride() == convolution.weight.stride()


def test_the_loss_may_be_differentiated_only_where_it_is_trained() -> None:
    model, _, inputs = made()
    model[0].requires_grad_(False)
    gradients = FlatGradients(list(model[2].parameters()))
    gradients.add(model(inputs).sum(), first=True, last=True)
    assert gradients.norm() > 0


def test_the_norm_has_the_bits_of_clip_grad_norm() -> None:
    model, gradients, inputs = made()
    gradients.add(model(inputs).square().sum(), first=True, last=True)
    expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert torch.equal(gradients.norm(), expected)


def test_the_norm_of_a_shared_layout_leaves_the_padding_out_of_account() -> None:
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2))]
    gradients = FlatGradients(parameters, FlatLayout([[p] for p in parameters]))
    gradients.add(3 * parameters[0].sum() + 4 * parameters[1].sum(), first=True, last=True)
    expected = (3 * 9 + 4 * 16) ** 0.5
    assert gradients.norm() == pytest.approx(expected)
    assert torch.linalg.vector_norm(gradients.flat.buffers[0]) == pytest.approx(expected)


def test_the_norm_of_buffers_is_theirs_together_and_does_not_overflow_in_half_precision() -> None:
    halves, wholes = torch.full((100,), 3e4, dtype=torch.float16), torch.full((4,), 2e5)
    assert norm_of_buffers([halves]) == pytest.approx(3e5, rel=1e-3)
    both = norm_of_buffers([halves, wholes, torch.zeros(3, dtype=torch.float64)])
    assert both.dtype == torch.float32
    assert both == pytest.approx(5e5, rel=1e-3)
    assert norm_of_buffers([wholes, torch.tensor([float("nan")])]).isnan()


def test_scaling_and_zeroing_reach_every_gradient() -> None:
    model, gradients, inputs = made()
    gradients.add(model(inputs).square().sum(), first=True, last=True)
    before = [p.grad.clone() for p in model.parameters()]
    gradients.scale(torch.tensor(0.5))
    assert_equal([p.grad for p in model.parameters()], [g * 0.5 for g in before])
    gradients.zero()
    assert not any(p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("taken", [lambda m: m.zero_grad(), lambda m: setattr(m[2].bias, "grad", torch.ones(2))])
def test_a_gradient_taken_away_is_an_error(taken) -> None:
    model, gradients, _ = made()
    gradients.check()
    model.zero_grad(set_to_none=False)
    gradients.check()
    taken(model)
    with pytest.raises(UserError, match="no longer the engine's"):
        gradients.check()


def test_the_check_is_cheap_enough_for_every_step() -> None:
    gradients = FlatGradients([nn.Parameter(torch.zeros(1)) for _ in range(200)])
    seconds = []
    for _ in range(50):
        start = time.perf_counter()
        gradients.check()
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 60e-6, "about 15 microseconds are usual"
