"""docs/quickstart.md, "The first minute": its commands are run, and its outputs are what came, but for figures."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import paceline as library
from tests.e2e.commands import Paceline, in_process, read_csv

PAGE = Path(__file__).resolve().parents[2] / "docs" / "quickstart.md"

PRAISE = (
    "这家店的{}很好吃，服务员也热情，下次还会再来",
    "{}做得特别用心，味道鲜美，价格也公道，强烈推荐给大家",
    "带家人来吃{}，大家都很满意，环境干净，上菜也快",
)
BLAME = (
    "{}又冷又硬，等了一个小时才上菜，服务态度很差",
    "点的{}根本不新鲜，吃完肚子不舒服，再也不会来了",
    "{}太咸了，分量也少，价格却不便宜，非常失望",
)
DISHES = ("火锅", "烤鱼", "面条", "饺子", "米线", "炒饭", "小笼包", "麻辣烫", "豆腐", "烤鸭")
LABELS = ("好评", "差评")


def sentence(number: int, at: int = 0) -> str:
    return (PRAISE, BLAME)[number % 2][(number // 2 + at) % 3].format(DISHES[(number // 6 + at) % 10])


def review(number: int, sentences: int | None = None) -> str:
    """A text of 14 to 25 sentences, the longest of which are more than most models read."""
    return "。".join(sentence(number, at) for at in range(sentences or 14 + number % 12)) + "。"


def write_reviews(path: Path, numbers: range, *, labelled: bool) -> Path:
    """A table as a Chinese Excel saves it: GBK, semicolons, Chinese column names."""
    rows = [f'"{review(number)}"' + f";{LABELS[number % 2]}" * labelled for number in numbers]
    path.write_bytes("\r\n".join(["内容" + ";类别" * labelled, *rows, ""]).encode("gbk"))
    return path


def write_model(folder: Path) -> Path:
    """A BERT of one layer, whose tokens are characters; it has been trained on such reviews of other lengths."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    texts = [review(number, 1 + number // 2 % 16) for number in range(120)]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {piece: at for at, piece in enumerate([*special, *sorted({*"".join(texts)})])}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), special, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=backend, **names).save_pretrained(folder / "tokenizer")
    config = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config |= {"intermediate_size": 64, "max_position_embeddings": 512, "initializer_range": 0.1}
    recipe: dict[str, Any] = {
        "model": {"config": config, "tokenizer": str(folder / "tokenizer")},
        "loop": {"epochs": 8, "batch_size": 16},
        "optimizer": {"lr": 5e-3},
        "observe": {"console": "off", "report": False},
    }
    rows = [{"text": text, "label": LABELS[number % 2]} for number, text in enumerate(texts)]
    library.train(recipe, data=rows, out=folder / "run")
    return folder / "run" / "model"


def section() -> list[tuple[str, str]]:
    """Language and text of each fenced block of the section."""
    found = re.search(r"^## The first minute\n(.*?)^## ", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert found, "docs/quickstart.md has no section 'The first minute'"
    return re.findall(r"^```(\w*)\n(.*?)^```$", found[1], re.MULTILINE | re.DOTALL)


def masked(line: str) -> str:
    """A line without its figures, which are another machine's; what is shown of lengths has none."""
    line = re.sub(r"[ ▁▂▃▄▅▆▇█]*[▁▂▃▄▅▆▇█][ ▁▂▃▄▅▆▇█]*", " ", line)
    return " ".join(re.sub(r"\d[\d,.e-]*", "0", line).split())


def test_the_page_shows_what_its_commands_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    write_model(tmp_path / "made").rename(home / "chinese-bert")
    write_reviews(home / "reviews.csv", range(60), labelled=True)
    write_reviews(home / "new.csv", range(100, 104), labelled=False)
    monkeypatch.chdir(home)
    paceline: Paceline = in_process(monkeypatch, capsys)
    seen: list[str] = []
    commands = []
    for language, text in section():
        if language == "bash":
            for line in text.splitlines():
                folders = [str(path.relative_to(home)) for path in (home / "runs").glob("*")]
                words = [
                    folders[0] if re.fullmatch(r"runs/reviews-[\d-]+", word) else word for word in shlex.split(line)
                ]
                done = paceline(*words[1:])
                assert done.code == 0, done.err
                seen = [*done.out.splitlines(), *done.err.splitlines()]
                commands.append(words[1])
            continue
        for line in text.splitlines():
            if language == "csv":
                seen = (home / "labelled.csv").read_text(encoding="utf-8").splitlines()
            parts = [masked(part) for part in line.split("...") if part.strip()]
            assert not parts or any(all(part in masked(had) for part in parts) for had in seen), f"{line}\n{seen}"
    assert commands == ["train", "predict"]
    options = re.findall(r"(--[\w-]+)", "".join(text for language, text in section() if language == "bash"))
    assert options == ["--model"], "the first minute needs no other option"
    rows = read_csv(home / "labelled.csv")
    assert [row["内容"] for row in rows] == [review(number) for number in range(100, 104)]
    assert [row["prediction"] for row in rows] == [LABELS[number % 2] for number in range(100, 104)]
