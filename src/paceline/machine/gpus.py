"""The GPUs that a run can be planned for: what NVIDIA's models have, and what a person means by a GPU's name.

One table for everybody. What could not be found out is None, never a guess.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Final

from paceline.contract.errors import UserError, close_words, excerpt
from paceline.machine.facts import PACKAGES, Facts, Gpu


@dataclass(frozen=True, kw_only=True)
class PeakRates:
    """Rates of the data sheet, without sparsity; no program reaches them."""

    bf16_flops: float | None
    """Dense bf16 tensor-core operations a second, summed in fp32; None where the GPU has no bf16."""
    fp16_flops: float
    """Dense fp16 tensor-core operations a second, summed in fp32."""
    fp32_flops: float | None
    """fp32 operations a second, tensor cores not used; None where no data sheet of NVIDIA's says it."""
    memory_bytes_per_second: float


@dataclass(frozen=True, kw_only=True)
class Model:
    """One model of GPU, in one of the variants that NVIDIA sells."""

    short: str
    """What ``--gpu`` takes: ``a100-80gb``. Where it names no form, the GPU is the SXM one."""
    name: str
    """As nvidia-smi writes it."""
    memory_mebibytes: int
    """As nvidia-smi writes it; CUDA gives programs 0.5 to 2 % less, by GPU and driver."""
    compute_capability: tuple[int, int]
    multiprocessors: int | None
    rates: PeakRates | None

    @property
    def gpu(self) -> Gpu:
        """The GPU as the facts of a machine describe it; without driver and uuid, which no particular one has."""
        return Gpu(
            name=self.name,
            memory_bytes=self.memory_mebibytes * 2**20,
            compute_capability=self.compute_capability,
        )


_Row = tuple[str, str, int, tuple[int, int], int | None, tuple[float | None, float, float | None, float] | None]

# Short name; nvidia-smi's name; its memory.total in MiB; compute capability; multiprocessors; and TFLOP/s in bf16, fp16
# and fp32, and GB/s.
#
# Memory: nvidia-smi's own answers, as owners of each GPU have published them (2021 to 2026), with drivers from branch
# 510 on. Older drivers kept their own part back: 32510 for a V100 of 32 GB, 15109 for a T4. Error correction (ECC) is
# as it was delivered: it takes memory of GPUs with GDDR6 (an A40 without it has 49140), none of those with HBM.
# Capability and multiprocessors: NVIDIA, CUDA GPUs, and its architecture papers; GB200, B300, A10G and H20 as CUDA
# reports them.
# Rates: NVIDIA's data sheets and, of GeForce and TITAN GPUs, its architecture papers (Turing, GA102, Ada, RTX
# Blackwell; sums in fp32, where GeForce GPUs have half the rate; the reference clock, not the Founders Edition's).
# Where they print rates with 2:4 sparsity, half of that. fp32 does not count tensor cores (TF32).
# H200 (2024): SXM 1,979 and NVL 1,671 TFLOPS with sparsity, both 4.8 TB/s. HGX B200 and B300, GB200 (2025): 4.5, 4.5
# and 5 PFLOPS with sparsity, 7.7, 8 and 8 TB/s.
# H100 (2023): SXM 1,979, PCIe 1,513, NVL 1,671 TFLOPS with sparsity; 3.35, 2.0 and 3.9 TB/s.
# A100 (2021): 312 TFLOPS; 40 GB 1,555 GB/s, 80 GB PCIe 1,935 GB/s, 80 GB SXM 2,039 GB/s.
# V100 (2020): SXM2 125 and PCIe 112 TFLOPS in fp16, 900 GB/s.
# GeForce names that are sold with several sizes of memory (3060, 3080, 4060 Ti) say so in the short name, and have no
# rates: the driver's name, by which rates are found, does not tell them apart.
_TABLE: tuple[_Row, ...] = (
    ("gb300", "NVIDIA GB300", 284208, (10, 3), None, None),
    ("b300", "NVIDIA B300 SXM6 AC", 275040, (10, 3), 148, (2250, 2250, None, 8000)),
    ("gb200", "NVIDIA GB200", 189471, (10, 0), 152, (2500, 2500, 80, 8000)),
    ("b200", "NVIDIA B200", 183359, (10, 0), 148, (2250, 2250, 75, 7700)),
    ("gh200", "NVIDIA GH200 480GB", 97871, (9, 0), 132, (989.5, 989.5, 67, 4000)),
    ("h200", "NVIDIA H200", 143771, (9, 0), 132, (989.5, 989.5, 67, 4800)),
    ("h200-nvl", "NVIDIA H200 NVL", 143771, (9, 0), 132, (835.5, 835.5, 60, 4800)),
    ("h100-80gb", "NVIDIA H100 80GB HBM3", 81559, (9, 0), 132, (989.5, 989.5, 67, 3350)),
    ("h100-pcie", "NVIDIA H100 PCIe", 81559, (9, 0), 114, (756.5, 756.5, 51, 2000)),
    ("h100-nvl", "NVIDIA H100 NVL", 95830, (9, 0), 132, (835.5, 835.5, 60, 3900)),
    ("h20", "NVIDIA H20", 97871, (9, 0), 78, None),
    ("a100-40gb", "NVIDIA A100-SXM4-40GB", 40960, (8, 0), 108, (312, 312, 19.5, 1555)),
    ("a100-40gb-pcie", "NVIDIA A100-PCIE-40GB", 40960, (8, 0), 108, (312, 312, 19.5, 1555)),
    ("a100-80gb", "NVIDIA A100-SXM4-80GB", 81920, (8, 0), 108, (312, 312, 19.5, 2039)),
    ("a100-80gb-pcie", "NVIDIA A100 80GB PCIe", 81920, (8, 0), 108, (312, 312, 19.5, 1935)),
    ("a30", "NVIDIA A30", 24576, (8, 0), 56, (165, 165, 10.3, 933)),
    ("a40", "NVIDIA A40", 46068, (8, 6), 84, (149.7, 149.7, 37.4, 696)),
    ("a10", "NVIDIA A10", 23028, (8, 6), 72, (125, 125, 31.2, 600)),
    ("a10g", "NVIDIA A10G", 23028, (8, 6), 80, (70, 70, 35, 600)),
    ("l40s", "NVIDIA L40S", 46068, (8, 9), 142, (362.05, 362.05, 91.6, 864)),
    ("l40", "NVIDIA L40", 46068, (8, 9), 142, (181.05, 181.05, 90.5, 864)),
    ("l4", "NVIDIA L4", 23034, (8, 9), 58, (121, 121, 30.3, 300)),
    ("t4", "Tesla T4", 15360, (7, 5), 40, (None, 65, 8.1, 320)),
    ("v100-16gb", "Tesla V100-SXM2-16GB", 16384, (7, 0), 80, (None, 125, 15.7, 900)),
    ("v100-16gb-pcie", "Tesla V100-PCIE-16GB", 16384, (7, 0), 80, (None, 112, 14, 900)),
    ("v100-32gb", "Tesla V100-SXM2-32GB", 32768, (7, 0), 80, (None, 125, 15.7, 900)),
    ("v100-32gb-pcie", "Tesla V100-PCIE-32GB", 32768, (7, 0), 80, (None, 112, 14, 900)),
    ("pro-6000", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 97887, (12, 0), 188, (503.8, 503.8, 125, 1792)),
    ("pro-6000-server", "NVIDIA RTX PRO 6000 Blackwell Server Edition", 97887, (12, 0), 188, None),
    ("rtx-6000-ada", "NVIDIA RTX 6000 Ada Generation", 49140, (8, 9), 142, (364.2, 364.2, 91.1, 960)),
    ("a6000", "NVIDIA RTX A6000", 49140, (8, 6), 84, (154.8, 154.8, 38.7, 768)),
    ("a5000", "NVIDIA RTX A5000", 24564, (8, 6), 64, (111.1, 111.1, 27.8, 768)),
    ("a4000", "NVIDIA RTX A4000", 16376, (8, 6), 48, (76.7, 76.7, 19.2, 448)),
    ("titan-rtx", "NVIDIA TITAN RTX", 24576, (7, 5), 72, (None, 130.5, 16.3, 672)),
    ("rtx-5090", "NVIDIA GeForce RTX 5090", 32607, (12, 0), 170, (209.5, 209.5, 104.8, 1792)),
    ("rtx-5080", "NVIDIA GeForce RTX 5080", 16303, (12, 0), 84, (112.6, 112.6, 56.3, 960)),
    ("rtx-5070-ti", "NVIDIA GeForce RTX 5070 Ti", 16303, (12, 0), 70, (87.9, 87.9, 43.9, 896)),
    ("rtx-4090", "NVIDIA GeForce RTX 4090", 24564, (8, 9), 128, (165.2, 165.2, 82.6, 1008)),
    ("rtx-4080", "NVIDIA GeForce RTX 4080", 16376, (8, 9), 76, (97.5, 97.5, 48.7, 716.8)),
    ("rtx-4070", "NVIDIA GeForce RTX 4070", 12282, (8, 9), 46, None),
    ("rtx-4060-ti-16gb", "NVIDIA GeForce RTX 4060 Ti", 16380, (8, 9), 34, None),
    ("rtx-3090", "NVIDIA GeForce RTX 3090", 24576, (8, 6), 82, (71, 71, 35.6, 936)),
    ("rtx-3080-10gb", "NVIDIA GeForce RTX 3080", 10240, (8, 6), None, None),
    ("rtx-3070", "NVIDIA GeForce RTX 3070", 8192, (8, 6), 46, (40.6, 40.6, 20.3, 448)),
    ("rtx-3060-12gb", "NVIDIA GeForce RTX 3060", 12288, (8, 6), 28, None),
    ("rtx-2080-ti", "NVIDIA GeForce RTX 2080 Ti", 11264, (7, 5), 68, (None, 53.8, 13.4, 616)),
)


def _model(row: _Row) -> Model:
    short, name, memory, capability, multiprocessors, rates = row
    return Model(
        short=short,
        name=name,
        memory_mebibytes=memory,
        compute_capability=capability,
        multiprocessors=multiprocessors,
        rates=rates
        and PeakRates(
            bf16_flops=rates[0] and rates[0] * 1e12,
            fp16_flops=rates[1] * 1e12,
            fp32_flops=rates[2] and rates[2] * 1e12,
            memory_bytes_per_second=rates[3] * 1e9,
        ),
    )


def _without_brand(name: str) -> str:
    return re.sub(r"^(NVIDIA|Tesla)\s+", "", name.strip())


def _plain(text: str) -> str:
    """Letters and digits of a name, in lower case and without the brand."""
    return re.sub(r"[\s_\-]|nvidia|tesla|geforce|rtx", "", text.lower())


MODELS: Final = tuple(map(_model, _TABLE))
_BY_NAME: Final = {_without_brand(model.name): model for model in MODELS}
_BY_PLAIN_NAME: Final = {_plain(name): model for model in MODELS for name in (model.short, model.name)}

_UNITS: Final = {"GiB": 2**30, "GB": 10**9, "MiB": 2**20, "MB": 10**6}
_AMOUNT: Final = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)\s*([gm]i?b)", re.IGNORECASE)
_BARE_NUMBER: Final = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)\s*(?:([gm])i?)?", re.IGNORECASE)

_COMMAND: Final = "paceline plan RECIPE --gpu"

MOST_WORDS: Final = 8
"""No GPU's name has more."""


def model_named(gpu_name: str) -> Model | None:
    """The model of a GPU named as nvidia-smi names it; None for one that is not in the table.

    A GPU's own memory is in its machine's facts: one name may be sold with several sizes of it.
    """
    return _BY_NAME.get(_without_brand(gpu_name))


def peak_rates(gpu_name: str) -> PeakRates | None:
    """The data sheet's rates of a GPU named as nvidia-smi names it; None for a GPU whose rates are not known."""
    model = model_named(gpu_name)
    return model.rates if model else None


def gpu_for(text: str) -> Gpu:
    """The GPU that a person means by ``text``.

    A short name (``h200``, ``A100 80GB``, ``a100_80gb``) or nvidia-smi's (``NVIDIA L40S``), in any case, with or
    without the brand and what stands between words; or the beginning of one, if only one model begins so (``4090``).
    Or an amount of memory (``24GiB``, ``40960 MiB``): a GPU of which nothing else is known, so that what depends on
    its compute capability is chosen as on an unknown GPU. ``24 GB`` are 24 * 10^9 bytes: a GPU sold as such has them.

    Raises:
        UserError: no such GPU, or several; an amount without a unit.
    """
    if amount := _AMOUNT.fullmatch(text.strip()):
        return _gpu_of(Fraction(amount[1]), amount[2])
    found = _meant(text)
    if len(found) == 1:
        return found[0].gpu
    what = f"--gpu {excerpt(text)}"
    if found:
        raise UserError(what, f"it may be {_either(found)}", f"{_COMMAND} {found[0].short}")
    if number := _BARE_NUMBER.fullmatch(text.strip()):
        unit = "MiB" if (number[2] or "").lower() == "m" or Fraction(number[1]) > 1000 else "GiB"
        why = "it names no GPU, and an amount of memory needs its unit"
        raise UserError(what, why, f"{_COMMAND} {number[1]}{unit}")
    if near := _near(text):
        raise UserError(f"{what}: unknown GPU", f"near it: {_either(near)}", f"{_COMMAND} {near[0].short}")
    known = f"known: {', '.join(model.short for model in MODELS)}"
    raise UserError(f"{what}: unknown GPU", known, f"its memory instead: {_COMMAND} 24GiB")


def facts_with(gpus: Sequence[Gpu], facts: Facts) -> Facts:
    """This machine's ``facts`` as they would be with other ``gpus``: what ``plan`` takes the run's machine to be.

    Taken to be so, whatever is here:

    - The process sees these GPUs and no others, and their driver is new enough for its torch.
    - torch has this machine's version, in a build for a CUDA that these GPUs run with.
    - triton is installed, as it is with every build of torch for CUDA on Linux; so is each optional package, such as
      those of 8-bit optimizers, since each is asked for by name alone. What is installed here keeps its version.

    Processors, main memory, Python and the scheduler are this machine's.

    Args:
        gpus: one a process of the run, or all that one process sees (``parallel.strategy: dp``).
    """
    versions = {name: facts.versions.get(name) or "assumed" for name in (*facts.versions, *PACKAGES)}
    # a version without its build: '2.13.0' of '2.13.0+cpu'
    versions["torch"] = str(versions["torch"]).partition("+")[0]
    return replace(
        facts,
        gpus=tuple(replace(gpu, driver=None, uuid=None) for gpu in gpus),
        versions=versions,
        torch_cuda=_cuda_for(gpus),
    )


def _cuda_for(gpus: Sequence[Gpu]) -> str:
    """The CUDA of torch's builds that run these GPUs: from torch 2.11 on, Volta needs the one for 12.6.

    Source: PyTorch, RELEASE.md, CUDA support matrix.
    """
    capabilities = [gpu.compute_capability for gpu in gpus if gpu.compute_capability is not None]
    return "12.6" if any(capability < (7, 5) for capability in capabilities) else "13.0"


def _gpu_of(number: Fraction, unit: str) -> Gpu:
    (spelled,) = (known for known in _UNITS if known.lower() == unit.lower())
    size = f"{float(number):.12g} {spelled}"
    if not number:
        raise UserError(f"--gpu {size}", "every GPU has memory", f"{_COMMAND} 24GiB")
    return Gpu(name=f"a GPU of {size}", memory_bytes=int(number * _UNITS[spelled]))


def _meant(text: str) -> list[Model]:
    """The model with this name, else all whose name begins so; a short number is no name."""
    wanted = _plain(text)
    if not wanted or (wanted.isdecimal() and len(wanted) < 4):
        return []
    if wanted in _BY_PLAIN_NAME:
        return [_BY_PLAIN_NAME[wanted]]
    return list(dict.fromkeys(model for name, model in _BY_PLAIN_NAME.items() if name.startswith(wanted)))


def _near(text: str) -> list[Model]:
    """Models that are meant by the first words of ``text``, as many as mean any; else those spelled nearly so."""
    words = re.split(r"[\s_\-]+", text)[:MOST_WORDS]
    for end in range(len(words) - 1, 0, -1):
        if found := _meant(" ".join(words[:end])):
            return found
    near = close_words(_plain(text), _BY_PLAIN_NAME, most=4)
    return list(dict.fromkeys(_BY_PLAIN_NAME[name] for name in near))


def _either(models: Sequence[Model]) -> str:
    *others, last = (model.short for model in models)
    return f"{', '.join(others)} or {last}" if others else last
