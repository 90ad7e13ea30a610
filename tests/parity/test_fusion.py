"""Blocks with our kernels in their graph compute what they did, as near fp32 as autocast does; others are left alone.

On a CPU the kernels' operators are made of torch's own, so that graphs, gradients and masks are tested here, and the
kernels in tests/unit/kernels and tests/gpu.
"""

from __future__ import annotations

import copy
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from paceline.techniques import compile as technique
from paceline.techniques.compile import TrainingPass, apply_compile, embeddings_of, fused, undo
from paceline.techniques.fused_qkv import apply_fused_qkv
from paceline.techniques.fusion import NARROW, Tally, serves
from paceline.techniques.recompute import apply_recompute
from tests.parity.driving import assembled, recipe, train
from tests.parity.reference import tiny_model
from tests.parity.test_compile import EACH_FAMILY, FAMILIES, TOTALS, WIDTH, made_model, packed_loss, packed_model
from tests.testing.marks import slow_except
from tests.unit.kernels.test_residual_norm import kept

pytestmark = [
    # torch hides both while it compiles, in a way that turning warnings into errors defeats
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
]

ROOT = Path(__file__).resolve().parents[2]

KINDS = {
    "distilbert": "2 norms and 1 GELU a block",
    "bert": "2 norms and 1 GELU a block",
    "roberta": "2 norms and 1 GELU a block",
    "xlm-roberta": "2 norms and 1 GELU a block",
    # its embeddings end in a product, and a CPU's autocast, unlike a GPU's, leaves norms in the format they are given
    "electra": "0 norms and 1 GELU a block",
    # norms before its products, which have no bias
    "modernbert": "0 norms and 0 GELUs a block",
}
"""Kind -> what is found in its blocks on a CPU."""


@pytest.fixture(autouse=True)
def fresh_compilers() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


BACKENDS = {"eager": "eager", "aot_eager": lookup_backend("aot_eager")}
"""Traced only, and differentiated as a compiler does it."""

EACH = ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)]
"""For the many small cases: `make test` differentiates as a compiler does where dropout is, in whole models."""


def fuse(blocks: list[nn.Module], backend: Any = "eager") -> Tally:
    backend = BACKENDS[backend] if isinstance(backend, str) else backend
    return apply_compile(blocks, backend=backend, fusion=True, serves=lambda tensor: True)


def in_bf16(function: Callable[[], Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return function()


def padded_loss(model: nn.Module, length: int) -> Tensor:
    """Loss of a made-up padded batch of five."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(5, 100, (5, length), generator=generator)
    mask = (torch.arange(length)[None] < torch.tensor([[length], [3], [length // 2], [length], [7]])).long()
    out = model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state
    return (out * torch.randn(out.shape, generator=generator) * mask[..., None]).sum() / length


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_as_near(exact: nn.Module, plain: nn.Module, found: nn.Module, factor: float = 1.5) -> None:
    """Every gradient of ``found`` is as near ``exact``'s as ``plain``'s is."""
    wanted, peers = gradients(exact), gradients(plain)
    own = gradients(found)
    assert own.keys() == peers.keys() == wanted.keys()
    for name, right in wanted.items():
        if name.endswith(("k_lin.bias", "key.bias")):
            continue  # zero in theory
        error, peer = ((side[name].float() - right).norm() / right.norm() for side in (own, peers))
        assert error < factor * peer + 1e-5, f"{name} is off by {error:.2e}, and by {peer:.2e} without fusion"


# ---- whole models


@pytest.mark.parametrize("backend", EACH)
@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("kind", slow_except(KINDS, "bert", "modernbert"))
def test_gradients_are_as_near_fp32_as_those_of_autocast(kind: str, layout: str, backend: str) -> None:
    make = packed_model if layout == "packed" else made_model
    (exact, _), (plain, _), (found, blocks) = make(kind), make(kind), make(kind)
    names = list(found.state_dict())
    tally = fuse(blocks, backend)
    lengths = (WIDTH, 100) if layout == "packed" else (40, 23)
    for length in lengths:  # added up, as micro-batches are
        losses = []
        for model in (exact, plain, found):
            pass_ = lambda m=model: packed_loss(m, length, 4) if layout == "packed" else padded_loss(m, length)  # noqa: B023, E731
            losses.append(pass_() if model is exact else in_bf16(pass_))
            losses[-1].backward()
        right, peer, loss = (loss.item() for loss in losses)
        assert abs(loss - right) < 2 * abs(peer - right) + 0.02, "the loss is another"
    assert str(tally) == KINDS[kind]
    assert list(found.state_dict()) == names
    if kind == "modernbert":
        assert gradients(found).keys() == gradients(plain).keys()
        for name, gradient in gradients(found).items():
            torch.testing.assert_close(gradient, gradients(plain)[name], rtol=1e-2, atol=1e-4)
    assert_as_near(exact, plain, found)


@pytest.mark.parametrize("kind", EACH_FAMILY)
def test_one_graph_serves_every_length_and_every_equal_block(kind: str) -> None:
    model, blocks = packed_model(kind)
    counter = CompileCounterWithBackend("eager")
    tally = fuse(blocks, counter)
    for index, total in enumerate(TOTALS):
        in_bf16(lambda: packed_loss(model, total, 3 + index % 4))  # noqa: B023
    assert counter.frame_count == FAMILIES[kind], "a length, a number of sequences or a block was traced anew"
    assert len(tally.found) == FAMILIES[kind]
    assert fused(model) == {"fusion": KINDS[kind]}


class Masks(TorchDispatchMode):
    """What dropout keeps, times 1 / (1 - p), in the order of the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.paceline.residual_norm.default and args[5] > 0:
            self.found.append(kept(result[3], args[0].shape, args[5]) / (1 - args[5]))
        return result

    def of(self, backend: str) -> Callable[..., Any]:
        """A backend whose graphs run under this; torch traces nothing while a mode is on."""

        def compiled(module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
            inner = BACKENDS[backend](module, inputs) if backend != "eager" else module.forward

            def call(*given: Any) -> Any:
                with self:
                    return inner(*given)

            return call

        return compiled


class Given(nn.Module):
    """Dropout by masks that are given, one a call."""

    def __init__(self, masks: list[Tensor]) -> None:
        super().__init__()
        self.masks = masks

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.masks.pop(0).to(hidden.dtype)


@pytest.mark.parametrize("backend", EACH)
@pytest.mark.parametrize("kind", ["bert", "distilbert"])
def test_the_backward_pass_uses_the_masks_of_the_forward_pass(kind: str, backend: str) -> None:
    (exact, exact_blocks), (plain, plain_blocks), (found, blocks) = (packed_model(kind) for _ in range(3))
    dropped = {"bert": ("attention.output.dropout", "output.dropout"), "distilbert": ("ffn.dropout",)}[kind]
    for block in blocks:
        for name in dropped:
            block.get_submodule(name).p = 0.3
    masks = Masks()
    fuse(blocks, masks.of(backend))
    in_bf16(lambda: packed_loss(found, 128, 4)).backward()  # traced, and its backward pass with it
    masks.found.clear()
    found.zero_grad()
    loss = in_bf16(lambda: packed_loss(found, 128, 4))
    given = list(masks.found)
    loss.backward()
    assert 0.65 < torch.stack(given).bool().float().mean() < 0.75
    assert not torch.equal(given[0], given[1]), "two calls drop the same"
    for model, held in ((exact, exact_blocks), (plain, plain_blocks)):
        own = list(given)
        for block, name in itertools.product(held, dropped):
            parent, _, child = name.rpartition(".")
            setattr(block.get_submodule(parent), child, Given(own))
        run = lambda m=model: packed_loss(m, 128, 4)  # noqa: E731
        (run() if model is exact else in_bf16(run)).backward()
    assert_as_near(exact, plain, found)


@pytest.mark.parametrize("backend", EACH)
def test_a_recomputed_block_drops_the_same_again(backend: str) -> None:
    """Traced only, too, where torch leaves random states to a compiler that is not there."""
    found = []
    for recomputed in (False, True):
        model, blocks = packed_model("bert")
        for block in blocks:
            block.output.dropout.p = block.attention.output.dropout.p = 0.3
        if recomputed:
            apply_recompute(blocks)
        tally = fuse(blocks, backend)
        for _ in range(2):
            model.zero_grad()
            torch.manual_seed(0)
            in_bf16(lambda: packed_loss(model, 128, 4)).backward()  # noqa: B023
        assert str(tally) == KINDS["bert"], "nothing is fused within a recomputed block"
        found.append(gradients(model))
    for name, one in found[0].items():
        torch.testing.assert_close(found[1][name], one, rtol=1e-2, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}")


def test_with_joined_products_too() -> None:
    (exact, _), (plain, _), (found, blocks) = (packed_model("bert") for _ in range(3))
    apply_fused_qkv(found)
    tally = fuse(blocks)
    packed_loss(exact, 100, 4).backward()
    for model in (plain, found):
        in_bf16(lambda: packed_loss(model, 100, 4)).backward()  # noqa: B023
    assert str(tally) == KINDS["bert"]
    assert_as_near(exact, plain, found)


def test_a_run_through_the_engine_learns_the_same_with_micro_batches() -> None:
    chosen = recipe(techniques={"precision": "bf16"}, loop={"micro_batch_size": 3})
    losses = []
    for fuses in (False, True):
        run = assembled(tiny_model(dropout=0.0), chosen)
        if fuses:
            fuse(list(run.build.blocks))
        losses.append(train(run, chosen))
    assert fused(run.build.model) == {"fusion": KINDS["distilbert"]}
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    assert losses[1] != losses[0], "nothing was fused"


# ---- a block in small


class Block(nn.Module):
    """The second half of an encoder's block."""

    def __init__(self, dropout: float = 0.0, width: int = 24, **settings: Any) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm, self.dropout = nn.LayerNorm(width, **settings), nn.Dropout(dropout)

    def inner(self, hidden: Tensor) -> Tensor:
        return self.dropout(self.narrow(F.gelu(self.wide(hidden))))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden + self.inner(hidden))


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        module = make()
        for parameter in module.parameters():  # norms too
            parameter.data += torch.randn(parameter.shape) / 10
    return module.train()


Between = Callable[[Tensor], Tensor]


def slopes(
    module: nn.Module,
    run: Callable[[nn.Module, Tensor], Tensor] = lambda module, hidden: module(hidden),
    shape: tuple[int, ...] = (3, 5, 24),
    within: Callable[[Callable[[], Tensor]], Tensor] = in_bf16,
) -> dict[str, Any]:
    """Output and gradients of a run, input's included."""
    for parameter in module.parameters():
        parameter.grad = None
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(shape, generator=generator).requires_grad_()
    out = within(lambda: run(module, hidden))
    (out.float() * torch.randn(out.shape, generator=generator)).sum().backward()
    return {"output": out.detach().float(), "input": hidden.grad, **gradients(module)}


def compare(
    make: Callable[[], nn.Module],
    run: Callable[[nn.Module, Tensor], Tensor] = lambda module, hidden: module(hidden),
    *,
    parts: Callable[[nn.Module], list[nn.Module]] = lambda module: [module],
    backend: Any = "eager",
    shape: tuple[int, ...] = (3, 5, 24),
) -> str:
    """With fusion, a run is as near fp32 as with autocast alone; returns what was found."""
    exact, plain, found = (seeded(make) for _ in range(3))
    tally = fuse(parts(found), backend)
    wanted, peers, got = slopes(exact, run, shape, lambda f: f()), slopes(plain, run, shape), slopes(found, run, shape)
    assert got.keys() == peers.keys() == wanted.keys()
    for name, right in wanted.items():
        if right is None:
            assert got[name] is None
            continue
        error, peer = (float((side[name] - right).norm() / right.norm().clamp(min=1e-6)) for side in (got, peers))
        assert error < 2 * peer + 5e-3, f"{name} is off by {error:.1e}, and by {peer:.1e} without fusion"
    return str(tally)


ALL, NO_NORM, NO_GELU = ("1 norm and 1 GELU a block", "0 norms and 1 GELU a block", "1 norm and 0 GELUs a block")


@pytest.mark.parametrize("shape", [(1, 7, 24), (4, 3, 24), (1, 1, 24), (6, 24)])
@pytest.mark.parametrize("backend", EACH)
def test_any_shape_of_input(shape: tuple[int, ...], backend: str) -> None:
    assert compare(Block, shape=shape, backend=backend) == ALL


class Turned(Block):
    """Its residual is no contiguous tensor."""

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden.transpose(0, 1)
        return self.norm(self.inner(hidden) + hidden)


class TwiceUsed(Block):
    def forward(self, hidden: Tensor) -> Tensor:
        normed = super().forward(hidden)
        return self.narrow(F.gelu(self.wide(normed))) + normed * 2 + self.narrow(self.wide(normed))


class WideAfter(Block):
    """A product outside autocast takes the norm's result."""

    def forward(self, hidden: Tensor) -> Tensor:
        normed = super().forward(hidden)
        with torch.autocast("cpu", enabled=False):
            return self.wide(normed)


class Changing(Block):
    """Changes a tensor in place, by a method whose result nobody takes."""

    def forward(self, hidden: Tensor) -> Tensor:
        scale = torch.ones_like(hidden)
        scale.mul_(3)
        return super().forward(hidden) * scale


class Added(Block):
    """The residual itself is changed, and others see it."""

    def forward(self, hidden: Tensor) -> Tensor:
        residual = hidden * 1
        residual += self.inner(hidden)
        return self.norm(residual) + residual


class Tanh(Block):
    def inner(self, hidden: Tensor) -> Tensor:
        return self.narrow(F.gelu(self.wide(hidden), approximate="tanh"))


class Keyword(Block):
    def inner(self, hidden: Tensor) -> Tensor:
        return F.dropout(input=self.narrow(F.gelu(input=self.wide(hidden))), p=0.0)


class SharedProduct(Block):
    def inner(self, hidden: Tensor) -> Tensor:
        wide = self.wide(hidden)
        product = self.narrow(F.gelu(wide) + wide)
        return product + product.sigmoid()


class Rows(Block):
    """The residual is one row, for all."""

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden[:1] + self.inner(hidden))


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (Turned, ALL),
        (TwiceUsed, "1 norm and 2 GELUs a block"),
        (WideAfter, ALL),
        (Changing, ALL),
        (Added, NO_NORM),
        (Tanh, NO_GELU),
        (Keyword, ALL),
        (SharedProduct, "0 norms and 0 GELUs a block"),
        (Rows, NO_NORM),
        (lambda: Block(elementwise_affine=False), NO_NORM),
        (lambda: Block(bias=False), NO_NORM),
        (lambda: Block(eps=0.1), ALL),
        (lambda: Block().half().float(), ALL),
    ],
)
@pytest.mark.parametrize("backend", EACH)
def test_what_is_found_and_what_is_left_alone(make: Callable[[], nn.Module], found: str, backend: str) -> None:
    assert compare(make, backend=backend) == found


def test_everything_dropped_is_left_alone() -> None:
    assert compare(lambda: Block(dropout=1.0)) == NO_NORM


def test_without_autocast_nothing_is_touched() -> None:
    block, plain = seeded(Block), seeded(Block)
    tally = fuse([block])
    hidden = torch.randn(3, 24)
    torch.testing.assert_close(block(hidden), plain(hidden), rtol=0, atol=0)
    assert str(tally) == "0 norms and 0 GELUs a block"


def test_a_device_without_the_kernels_is_left_alone() -> None:
    assert not serves(torch.zeros(3))
    block = seeded(Block)
    tally = apply_compile([block], backend="eager", fusion=True)
    slopes(block)
    assert str(tally) == "0 norms and 0 GELUs a block"
    assert fused(block) == {"fusion": "0 norms and 0 GELUs a block"}
    other = seeded(Block)
    apply_compile([other], backend="eager")
    slopes(other)
    assert fused(other) == {}, "nobody asked for fusion"


@pytest.mark.parametrize("frozen", ["wide", "narrow", "norm", "norm.bias", "narrow.weight", "all"])
@pytest.mark.parametrize("backend", EACH)
def test_frozen_weights_get_no_gradient(frozen: str, backend: str) -> None:
    def make() -> nn.Module:
        block = Block()
        for name, parameter in block.named_parameters():
            parameter.requires_grad_(not (frozen == "all" or name.startswith(frozen)))
        return block

    assert compare(make, backend=backend) == ALL


def test_evaluation_runs_as_written_and_undoing_leaves_nothing() -> None:
    block = seeded(lambda: Block(dropout=0.5))
    tally = fuse([block])
    hidden = torch.randn(3, 24)
    with torch.no_grad():
        block(hidden)
    block.eval()
    assert torch.equal(block(hidden), copy.deepcopy(seeded(lambda: Block(dropout=0.5))).eval()(hidden))
    assert not tally.found
    assert undo(block) == 1
    assert "forward" not in vars(block)


def test_a_block_fused_twice_is_fused_once() -> None:
    tallies = []

    def parts(module: nn.Module) -> list[nn.Module]:
        tallies.append(fuse([module]))
        return [module]

    tallies.append(compare(Block, parts=parts))
    assert sorted(map(str, tallies)) == [ALL, "no block traced"]


# ---- from block to block


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))


def doubled(hidden: Tensor) -> Tensor:
    hidden.register_hook(lambda gradient: gradient * 2)
    return hidden


def retained(hidden: Tensor) -> Tensor:
    hidden.retain_grad()
    return hidden


BETWEEN: dict[str, Between] = {
    "nothing": lambda hidden: hidden,
    "another tensor": lambda hidden: hidden * 1.5,
    "a clone": lambda hidden: hidden.clone(),
    "a view": lambda hidden: hidden[:2],
    "added in place": lambda hidden: hidden.add_(1.0),
    "a row set in place": lambda hidden: hidden.index_fill_(1, torch.tensor([0]), 0.5),
    "detached": lambda hidden: hidden.detach(),
    "detached in place": lambda hidden: hidden.detach_(),
    "a hook on its gradient": doubled,
    "its gradient retained": retained,
}


@pytest.mark.parametrize("backend", EACH)
@pytest.mark.parametrize("between", BETWEEN)
def test_what_happens_between_blocks_is_seen(between: str, backend: str) -> None:
    def run(module: nn.Module, hidden: Tensor) -> Tensor:
        for block in module.blocks:
            hidden = BETWEEN[between](block(hidden))
        return hidden * torch.ones((), requires_grad=True)

    compare(
        Stack,
        run,
        parts=lambda module: list(module.blocks),
        backend=backend,
    )


def test_the_gradient_that_is_retained_is_whole() -> None:
    seen = []

    def run(module: nn.Module, hidden: Tensor) -> Tensor:
        hidden = retained(module.blocks[0](hidden))
        seen.append(hidden)
        return module.blocks[1](hidden)

    compare(Stack, run, parts=lambda module: list(module.blocks))
    torch.testing.assert_close(seen[1].grad, seen[0].grad, rtol=3e-2, atol=0.05)


def test_a_result_used_by_two_blocks() -> None:
    def run(module: nn.Module, hidden: Tensor) -> Tensor:
        first, second, third = module.blocks
        hidden = first(hidden)
        return second(hidden) + third(hidden) * hidden

    compare(Stack, run, parts=lambda module: list(module.blocks))


def test_the_narrow_copy_goes_on_where_nothing_comes_between() -> None:
    """Every input of a graph that comes from a block is the copy that the block made."""
    stack, gone = seeded(Stack), []

    def recording(module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            gone.append(given[-1])
            return module.forward(*given)

        return call

    fuse(list(stack.blocks), recording)
    hidden, copies = torch.randn(3, 5, 24), []
    with torch.autocast("cpu", torch.bfloat16):
        for block in stack.blocks:
            hidden = block(hidden)
            copies.append(getattr(hidden, NARROW)[0])
            assert torch.equal(copies[-1], hidden.bfloat16()), "the copy is another tensor's"
    assert gone[1] is copies[0]
    assert gone[2] is copies[1]


@pytest.mark.parametrize("kind", slow_except(["distilbert", "bert"], "bert"))
def test_the_embeddings_hand_their_copy_to_the_first_block(kind: str) -> None:
    (exact, _), (plain, _), (found, blocks) = (made_model(kind) for _ in range(3))
    taken: list[Any] = []

    def recording(module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            results = module.forward(*given)
            taken.append((given[-1], results[-1]))
            return results

        return call

    embeddings = embeddings_of(found, blocks)
    assert len(embeddings) == 1
    apply_compile(blocks, embeddings, backend=recording, fusion=True, serves=lambda tensor: True)
    padded_loss(exact, 40).backward()
    for model in (plain, found):
        in_bf16(lambda: padded_loss(model, 40)).backward()  # noqa: B023
    (_, given), (first, _) = taken[0], taken[1]
    assert given.dtype == torch.bfloat16
    assert first is given, "the first block's products have cast the embeddings' result again"
    assert_as_near(exact, plain, found)


def test_without_autocast_embeddings_have_no_copy() -> None:
    model, blocks = made_model("bert")
    apply_compile(blocks, embeddings_of(model, blocks), backend="eager", fusion=True, serves=lambda tensor: True)
    hidden = model.base_model.embeddings(torch.ones(2, 5, dtype=torch.long))
    assert hidden.dtype == torch.float32
    assert not hasattr(hidden, NARROW)


@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
def test_recomputing_around_and_inside_a_block(inside: bool) -> None:
    def run(module: nn.Module, hidden: Tensor) -> Tensor:
        for block in module.blocks:
            hidden = block(hidden) if inside else checkpoint(block, hidden, use_reentrant=False)
        return hidden

    def parts(module: nn.Module) -> list[nn.Module]:
        if inside:
            apply_recompute(list(module.blocks))
        return list(module.blocks)

    assert compare(Stack, run, parts=parts) == ALL


# ---- in a run


def test_the_path_says_where_there_is_nothing_to_fuse() -> None:
    build = assembled(tiny_model(), recipe()).build
    assert "fusion" not in technique.apply(build, False).execution
    assert technique.apply(build, False, fusion=True).execution["compile"] == "off"
    assert fused(build.model) == {"fusion": "no block traced"}
    assert undo(build.model) == 2, "embeddings have nothing to fuse, and nothing was to be compiled"
    convolutions = replace(build, model=nn.Sequential(nn.Conv2d(3, 4, 3)), blocks=())
    assert technique.apply(convolutions, False, fusion=True).execution["fusion"].startswith("off: ")
    assert not any(isinstance(vars(module).get("forward"), TrainingPass) for module in convolutions.model.modules())


class Looking(Block):
    """Cannot be one graph: it looks at a value."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) * (2.0 if hidden.sum().item() > 0 else 1.0)


def test_what_cannot_be_traced_runs_as_written_whoever_asked() -> None:
    """Compiling was switched off: its setting is not to blame, and there is nothing to refuse."""
    block = Looking()
    build = replace(
        assembled(tiny_model(), recipe()).build, model=block, blocks=(block,), execution={"layout": "padded"}
    )
    build = technique.apply(build, False, fusion=True)
    with pytest.raises(torch._dynamo.exc.TorchDynamoException) as caught:
        block(torch.ones(3, 24))
    fallen = technique.fall_back(build, True, caught.value)
    assert fallen.execution["compile"] == "off"
    assert fallen.execution["fusion"].startswith("off: ")
    assert (fallen.decisions[-1].setting, fallen.decisions[-1].value) == ("techniques.fusion", "false")
    assert block(torch.ones(3, 24)).shape == (3, 24), "still traced"


KEPT = """
import sys
from pathlib import Path

import torch
from paceline.engine.compile_cache import kept_cache
from paceline.techniques.compile import apply_compile, embeddings_of
from tests.parity.test_compile import packed_loss, packed_model
from tests.parity.test_fusion import KINDS, assert_as_near, in_bf16

kind = sys.argv[2]
(exact, _), (plain, _), (found, blocks) = (packed_model(kind) for _ in range(3))
with kept_cache(Path(sys.argv[1])):
    serves = lambda tensor: True
    tally = apply_compile(blocks, embeddings_of(found, blocks), fusion=True, serves=serves)
    for total in (64, 100, 256):
        packed_loss(exact, total, 4).backward()
        for model in (plain, found):
            in_bf16(lambda: packed_loss(model, total, 4)).backward()
assert_as_near(exact, plain, found)
assert str(tally) == KINDS[kind], tally
assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2, "a length was compiled for anew"
counted = torch._dynamo.utils.counters["aot_autograd"]
print(*(counted[f"autograd_cache_{what}"] for what in ("hit", "miss", "bypass")))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["distilbert", "bert"])
def test_compiled_graphs_agree_and_a_second_run_finds_them_kept(kind: str, tmp_path: Path) -> None:
    """The whole chain, C++ compiler included; processes of their own, since torch's compilers keep threads running."""
    counted = []
    for _ in range(2):
        command = [sys.executable, "-c", KEPT, str(tmp_path / "kernels"), kind]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
        assert done.returncode == 0, done.stderr
        counted.append(done.stdout.split()[-3:])
    assert counted == [["0", "2", "0"], ["2", "0", "0"]], "hits, misses and bypasses of the two runs"
