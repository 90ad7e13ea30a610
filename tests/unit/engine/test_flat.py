import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from paceline.optim.flat import ALIGNMENT, FlatLayout
from tests.parity.reference import tiny_model


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(180, 3))


def test_weights_become_aligned_views_and_nothing_else_changes() -> None:
    model = network()
    plain = copy.deepcopy(model)
    parameters = list(model.parameters())
    flat = FlatLayout([parameters[:2], parameters[2:]]).move_in()
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
    (buffer,) = flat.buffers
    for parameter, view in zip(parameters, flat.views, strict=True):
        assert parameter.data_ptr() == view.data_ptr()
        assert (parameter.data_ptr() - buffer.data_ptr()) % (ALIGNMENT * 4) == 0
        assert parameter.untyped_storage().data_ptr() == buffer.data_ptr()
    for name, tensor in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    images = torch.randn(2, 3, 8, 8)
    assert torch.equal(model.eval()(images), plain.eval()(images))
    buffer.zero_()
    assert not any(p.any() for p in parameters)


def test_the_groups_are_the_whole_buffer_and_padding_is_zero() -> None:
    parameters = [nn.Parameter(torch.ones(n)) for n in (3, 64, 65, 1)]
    flat = FlatLayout([parameters[:1], parameters[1:3], parameters[3:]]).move_in()
    assert [[t.numel() for t in group] for group in flat.groups] == [[64], [64 + 128], [64]]
    assert torch.equal(torch.cat([t for group in flat.groups for t in group]), flat.buffers[0])
    assert flat.buffers[0].sum() == 3 + 64 + 65 + 1


def test_a_compiler_finds_no_buffer_behind_a_gradient() -> None:
    """It looks at the .grad of every weight that a frame reads, and would trace what it is a view of."""
    flat = FlatLayout([list(network().parameters())]).allocate()
    assert not any(view._is_view() for view in flat.views)
    flat.buffers[0].fill_(1)
    assert all(view.all() for view in flat.views), "memory is the buffer's all the same"


def test_each_number_format_has_a_buffer_of_its_own() -> None:
    halves, wholes = (
        [nn.Parameter(torch.ones(2, dtype=dtype)) for _ in range(2)] for dtype in (torch.float16, torch.float32)
    )
    flat = FlatLayout([[halves[0], wholes[0]], [wholes[1], halves[1]]]).move_in()
    assert [b.dtype for b in flat.buffers] == [torch.float16, torch.float32]
    assert [[t.dtype for t in group] for group in flat.groups] == [
        [torch.float16, torch.float32],
        [torch.float32, torch.float16],
    ]
    assert all(
        p.dtype == v.dtype for p, v in zip((halves[0], wholes[0], wholes[1], halves[1]), flat.views, strict=True)
    )


def test_channels_stay_last_in_weights_and_in_what_is_laid_out_like_them() -> None:
    model = network().to(memory_format=torch.channels_last)
    plain = copy.deepcopy(model)
    layout = FlatLayout([list(model.parameters())])
    layout.move_in()
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert not model[0].weight.is_contiguous()
    assert torch.equal(model[0].weight, plain[0].weight)
    assert layout.allocate().views[0].stride() == plain[0].weight.stride()


def shared() -> tuple[list[nn.Parameter], torch.Tensor]:
    """Two parameters in one memory, as a fused projection's are, beside an ordinary one."""
    memory = torch.arange(12.0)
    return [nn.Parameter(memory[:6].view(2, 3)), nn.Parameter(torch.ones(5)), nn.Parameter(memory[6:])], memory


def test_parameters_in_somebody_elses_memory_stay_there() -> None:
    parameters, memory = shared()
    layout = FlatLayout([parameters])
    flat = layout.move_in()
    assert [p.untyped_storage().data_ptr() == memory.data_ptr() for p in parameters] == [True, False, True]
    assert [tuple(t.shape) for t in flat.groups[0]] == [(64,), (2, 3), (6,)]
    assert flat.buffers[0].numel() == 64, "no room is kept for weights that are elsewhere"
    flat.groups[0][1].zero_()
    assert memory.tolist() == [0.0] * 6 + [6.0, 7.0, 8.0, 9.0, 10.0, 11.0]
    gradients = layout.allocate()
    assert [t.shape for t in gradients.groups[0]] == [t.shape for t in flat.groups[0]]
    assert gradients.buffers[0].numel() == 3 * 64


@pytest.mark.parametrize("make", [lambda t: t[:, :3], lambda t: t[:, 0], lambda t: t[:1].expand(4, 6)])
def test_a_parameter_with_gaps_stays_where_it_is(make) -> None:
    parameter = nn.Parameter(make(torch.randn(4, 6)))
    place = parameter.data_ptr()
    layout = FlatLayout([[parameter]])
    layout.move_in()
    assert parameter.data_ptr() == place
    assert layout.allocate().views[0].shape == parameter.shape


def test_a_transposed_parameter_keeps_its_strides() -> None:
    parameter = nn.Parameter(torch.arange(6.0).view(2, 3).t())
    flat = FlatLayout([[parameter]]).move_in()
    assert parameter.stride() == (1, 3)
    assert parameter.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert flat.buffers[0][:6].tolist() == [0, 1, 2, 3, 4, 5]


def test_tied_weights_are_laid_out_once_and_stay_tied() -> None:
    model = nn.ModuleDict({"one": nn.Linear(4, 4), "other": nn.Linear(4, 4)})
    model["other"].weight = model["one"].weight
    flat = FlatLayout([list(model.parameters())]).move_in()
    assert flat.buffers[0].numel() == 3 * 64
    assert model["other"].weight is model["one"].weight


def test_a_model_moved_in_twice_still_works() -> None:
    """As when a second engine is made of one model: its weights stay in the first one's buffers."""
    model = network()
    images, expected = torch.randn(2, 3, 8, 8), copy.deepcopy(model)
    for _ in range(2):
        flat = FlatLayout([list(model.parameters())]).move_in()
    assert torch.equal(model(images), expected(images))
    assert [t.data_ptr() for t in flat.groups[0]] == [p.data_ptr() for p in model.parameters()]


def test_a_model_in_a_flat_buffer_is_saved_in_plain_files(tmp_path) -> None:
    """Neither transformers nor safetensors may write the whole buffer, or refuse what shares it."""
    model = tiny_model()
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    FlatLayout([list(model.parameters())]).move_in()
    model.save_pretrained(tmp_path / "pretrained", state_dict=model.state_dict())
    save_file(model.state_dict(), tmp_path / "plain.safetensors")
    size = sum(tensor.nbytes for tensor in expected.values())
    for file in (tmp_path / "pretrained" / "model.safetensors", tmp_path / "plain.safetensors"):
        assert size <= file.stat().st_size < size + 16384
        loaded = load_file(file)
        assert sorted(loaded) == sorted(expected)
        assert [name for name, tensor in expected.items() if not torch.equal(loaded[name], tensor)] == []


def test_channels_last_weights_in_a_flat_buffer_are_saved(tmp_path) -> None:
    model = network().to(memory_format=torch.channels_last)
    expected = model[0].weight.detach().clone()
    FlatLayout([list(model.parameters())]).move_in()
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, tmp_path / "m.safetensors")
    assert torch.equal(load_file(tmp_path / "m.safetensors")["0.weight"], expected)


def test_a_weight_whose_memory_others_look_at_stays_where_it_is() -> None:
    module = nn.Linear(3, 3)
    module.register_buffer("seen", module.weight.data)
    FlatLayout([[module.weight], [module.bias]], [module.seen]).move_in()
    with torch.no_grad():
        module.weight.fill_(7)
    assert bool((module.seen == 7).all())
