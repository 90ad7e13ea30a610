"""Compiled blocks on a GPU: one compilation for every length, bf16, recomputation, and CUDA graphs around them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import ResNetConfig, ResNetForImageClassification

from paceline.engine.compile_cache import kept_cache
from paceline.kernels.convolution_gradients import convolution_gradients
from paceline.techniques.compile import apply_compile, apply_compile_whole, embeddings_of
from paceline.techniques.fully_connected import apply_fully_connected
from paceline.techniques.fused_qkv import apply_fused_qkv
from paceline.techniques.recompute import apply_recompute
from tests.gpu.waiting import waits_are_errors
from tests.parity.test_compile import FAMILIES, LAYERS, TOTALS, WIDTH, packed_loss, packed_model

pytestmark = [
    # torch hides both while it compiles, in a way that turning warnings into errors defeats
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def compilers_running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """torch's compilers keep processes and threads for the life of this one: started here, no test leaves them."""
    with kept_cache(tmp_path_factory.mktemp("kernels")):
        hidden = torch.ones(4, 4, device="cuda", requires_grad=True)
        torch.compile(lambda x: x.sin() + 1)(hidden).sum().backward()
        yield


@pytest.fixture(autouse=True)
def fresh_compilers() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compiled_model(kind: str, *, recomputed: bool = False, joined: bool = False) -> nn.Module:
    model, blocks = packed_model(kind)
    model.cuda()
    if joined:
        apply_fused_qkv(model)
    if recomputed:
        apply_recompute(blocks)
    apply_compile(blocks, embeddings_of(model, blocks))
    return model


def loss_in_bf16(model: nn.Module, total: int, sequences: int = 4) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        return packed_loss(model, total, sequences)


@pytest.mark.parametrize("kind", FAMILIES)
def test_one_compilation_serves_every_length_in_bf16(kind: str) -> None:
    torch._dynamo.pgo.reset_code_state()  # sizes that earlier tests saw to change are remembered
    model = compiled_model(kind, joined=True)
    for index, total in enumerate(TOTALS):
        loss_in_bf16(model, total, 3 + index % 4).backward()
    # transformers 5.17 hands ELECTRA's first block a view, which counts as another input
    spare = 1 if kind == "electra" else 0
    assert 0 <= counters["stats"]["unique_graphs"] - FAMILIES[kind] - 1 <= spare, "blocks, and the embeddings"
    assert not counters["graph_break"]


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("kind", ["distilbert", "bert"])
def test_gradients_are_those_of_the_plain_pass(kind: str, recomputed: bool) -> None:
    plain, compiled = packed_model(kind)[0].cuda(), compiled_model(kind, recomputed=recomputed, joined=True)
    for total in (WIDTH, 512):
        losses = [packed_loss(model, total, 4) for model in (plain, compiled)]
        for loss in losses:
            loss.backward()
        assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-4)
    for (name, one), other in zip(plain.named_parameters(), compiled.parameters(), strict=True):
        if one.grad is not None:
            torch.testing.assert_close(other.grad, one.grad, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_in_bf16_gradients_are_as_near_fp32_as_the_plain_pass() -> None:
    exact, plain = packed_model("bert")[0].cuda(), packed_model("bert")[0].cuda()
    compiled = compiled_model("bert", joined=True)
    packed_loss(exact, 512, 4).backward()
    for model in (plain, compiled):
        loss_in_bf16(model, 512).backward()

    def distance(model: nn.Module) -> float:
        pairs = zip(model.parameters(), exact.parameters(), strict=True)
        return sum((p.grad - q.grad).square().sum().item() for p, q in pairs if q.grad is not None) ** 0.5

    assert distance(compiled) < 1.5 * distance(plain)


def test_a_captured_pass_replays_to_the_same_gradients_and_new_dropout() -> None:
    model = compiled_model("distilbert", joined=True)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
    hidden = torch.randn(1, 256, WIDTH, device="cuda")
    ends = torch.linspace(0, 256, 5).int().cuda()
    stack = model.base_model.transformer

    def passed() -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            out = stack(hidden, cu_seq_lens_q=ends, max_length_q=512)
        loss = getattr(out, "last_hidden_state", out)[0].float().square().mean()
        loss.backward()
        return loss.detach()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            passed()
    torch.cuda.current_stream().wait_stream(stream)
    gradient = stack.layer[0].attention.q_lin.weight.grad
    for parameter in stack.parameters():
        parameter.grad.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = passed()
    seen = []
    for _ in range(2):
        for parameter in stack.parameters():
            parameter.grad.zero_()
        graph.replay()
        seen.append((loss.clone(), gradient.clone()))
    assert stack.layer[0].attention.q_lin.weight.grad is gradient, "a compiled pass took the gradient's buffer away"
    assert all(found.isfinite().all() and found.abs().sum() > 0 for _, found in seen)
    assert not torch.equal(seen[0][1], seen[1][1]), "each replay drops the same values"


def test_no_pass_waits_for_the_device() -> None:
    model = compiled_model("distilbert", joined=True)
    hidden = torch.randn(1, 256, WIDTH, device="cuda")
    ends = torch.linspace(0, 256, 5).int().cuda()
    passed = lambda: model.base_model.transformer(hidden, cu_seq_lens_q=ends, max_length_q=512)  # noqa: E731
    for _ in range(2):
        passed()[0].sum().backward()
    torch.cuda.synchronize()
    with waits_are_errors():
        passed()[0].sum().backward()


def test_a_second_model_finds_its_kernels_kept(tmp_path: Path) -> None:
    with kept_cache(tmp_path / "kernels"):
        for _ in range(2):
            torch._dynamo.reset()
            counters.clear()
            loss_in_bf16(compiled_model("bert", joined=True), 256).backward()
        found = counters["aot_autograd"]
        assert (found["autograd_cache_hit"], found["autograd_cache_bypass"]) == (2, 0)
    assert LAYERS > 1, "or equal blocks were not shared"


def test_a_convolution_network_is_one_graph_channels_last() -> None:
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(0)
        plain, compiled = (
            nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 3))
            for _ in range(2)
        )
    compiled.load_state_dict(plain.state_dict())
    plain.cuda()
    compiled.cuda().to(memory_format=torch.channels_last)
    apply_compile_whole(compiled, static=True)
    for rows in (16, 5, 16):
        images = torch.randn(rows, 3, 8, 8, device="cuda")
        torch.testing.assert_close(
            compiled(images.contiguous(memory_format=torch.channels_last)), plain(images), rtol=1e-3, atol=1e-3
        )
    assert counters["stats"]["unique_graphs"] == 1


def test_gradients_of_a_whole_network_are_those_of_the_plain_pass() -> None:
    """Small kernels are joined there, and layers that see one pixel are matrix products."""
    config = ResNetConfig(
        num_labels=10, embedding_size=16, hidden_sizes=[16, 32, 64], depths=[2, 2, 2], layer_type="basic"
    )
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(0)
        plain, compiled = (ResNetForImageClassification(config).train() for _ in range(2))
        images = torch.randn(64, 3, 16, 16).cuda().contiguous(memory_format=torch.channels_last)
    compiled.load_state_dict(plain.state_dict())
    for model in (plain, compiled):
        model.cuda().to(memory_format=torch.channels_last)
    assert len(apply_fully_connected(compiled, (3, 16, 16))) == 5
    apply_compile_whole(compiled, static=True)
    labels = torch.arange(64, device="cuda") % 10
    with torch.backends.cudnn.flags(allow_tf32=False):
        for model in (plain, compiled):
            nn.functional.cross_entropy(model(images).logits, labels).backward()
    for (name, one), other in zip(plain.named_parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-2, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
        if other.ndim == 4 and other.shape[-1] > 1:  # of one pixel any order is both
            assert other.grad.stride() == other.stride(), name
    for (name, one), other in zip(plain.named_buffers(), compiled.buffers(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_both_gradients_of_a_convolution_side_by_side_have_the_bits_of_one_after_the_other(captured: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    images, weight, grad = (
        torch.randn(*shape, generator=generator, device="cuda").bfloat16().contiguous(memory_format=torch.channels_last)
        for shape in ((64, 32, 8, 8), (48, 32, 3, 3), (64, 48, 8, 8))
    )
    options = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    both = torch.ops.aten.convolution_backward.default
    expected = both(grad, images, weight, None, *options, [True, True, False])[:2]

    def passed() -> tuple[Tensor, ...]:
        """Eight times, each of tensors of its own, which are freed at once and written over by whoever comes next."""
        made: list[Tensor] = []
        for _ in range(8):
            mine = grad.clone(), images.clone()
            made += convolution_gradients(*mine, weight, *options)
            del mine
            for like in (grad, images):
                torch.full_like(like, 7.0)
        return tuple(made)

    if not captured:
        found = passed()
    else:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            passed()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = passed()
        graph.replay()
    torch.cuda.synchronize()
    for one, other in zip(found, expected * 8, strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
