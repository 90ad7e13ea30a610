"""The tokenizer of a model: its own, or a WordPiece vocabulary trained on the training texts."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import tokenizers

from paceline.contract.errors import ModelError, PacelineError, in_a_line
from paceline.contract.files import is_irregular, write_atomically
from paceline.contract.panics import is_failure
from paceline.models.config import max_positions
from paceline.models.hub import CONFIG_FILES, TOKENIZER_FILES, fetch
from paceline.recipe.parts import ModelPart

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerFast

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""Ids 0 to 4 of a trained vocabulary."""

UNLIMITED = int(1e30)
"""What transformers writes as ``model_max_length`` of a model without a limit."""

_READ_AT_THE_END = frozenset({"xlnet"})
"""Families whose head reads a row's last position, so that filling stands before the text."""

_HEAD_CHARACTERS = 4096
"""tokenizer.json says within these how texts are cut, before its vocabulary of megabytes."""

_TRAINING_CHARACTERS = 20_000_000
"""A vocabulary is trained on at most about this many characters, drawn evenly: more changes little and takes longer."""


@final
class Pretrained:
    """Gives a tokenizer that is there already, as ``WordPieceTrainer`` gives one that it trains."""

    def __init__(self, key: str, tokenizer: PreTrainedTokenizerFast, notices: tuple[str, ...] = ()) -> None:
        self.key, self.notices = key, notices
        self._tokenizer = tokenizer

    def get(self, texts: Iterable[str]) -> PreTrainedTokenizerFast:
        return self._tokenizer

    def settle(self, dataset: str) -> PreTrainedTokenizerFast:
        return self._tokenizer


@final
class WordPieceTrainer:
    """Trains a lower-case BERT tokenizer; equal texts and settings give equal vocabularies, on any machine."""

    notices: tuple[str, ...] = ()
    """As ``Pretrained.notices``: sentences about the tokenizer for people."""

    def __init__(
        self,
        vocabulary_size: int,
        max_length: int,
        has_token_types: bool,
        cache: Path | None,
        padding_side: str = "right",
    ) -> None:
        self._vocabulary_size = vocabulary_size
        self._max_length = max_length
        self._has_token_types = has_token_types
        self._padding_side = padding_side
        self._cache = cache
        self._latest: dict[str, int] | None = None

    @property
    def key(self) -> str:
        """Digest of everything but the training texts that decides how a text is encoded."""
        settings = ("wordpiece", self._vocabulary_size, _TRAINING_CHARACTERS, tokenizers.__version__)
        return _digest(repr((*settings, self._has_token_types, self._padding_side)).encode())

    def get(self, texts: Iterable[str]) -> PreTrainedTokenizerFast:
        """A tokenizer from the cache, or trained and put there.

        Raises:
            ModelError: the texts hold no words.
        """
        texts = _sample(list(texts))
        digest = hashlib.sha256(self.key.encode())
        for text in texts:
            encoded = text.encode("utf-8", "surrogatepass")
            digest.update(len(encoded).to_bytes(8, "little") + encoded)
        path = self._cache / "tokenizers" / f"{digest.hexdigest()}.json" if self._cache else None
        vocabulary = _read_vocabulary(path) if path else None
        if vocabulary is None:
            vocabulary = train_wordpiece(texts, self._vocabulary_size)
            if path:
                _write_vocabulary(path, vocabulary)
        self._latest = vocabulary
        return self._around(vocabulary)

    def settle(self, dataset: str) -> PreTrainedTokenizerFast | None:
        """The tokenizer that a data set was encoded with, now or long ago; None: its vocabulary is no longer there.

        Args:
            dataset: fingerprint of the encoded data set: of one out of a cache the texts are not read again.
        """
        path = self._cache / "tokenizers" / f"of-{dataset}.json" if self._cache else None
        vocabulary = self._latest or (_read_vocabulary(path) if path else None)
        if self._latest and path and _read_vocabulary(path) is None:
            _write_vocabulary(path, self._latest)
        return self._around(vocabulary) if vocabulary else None

    def _around(self, vocabulary: dict[str, int]) -> PreTrainedTokenizerFast:
        return bert_tokenizer(vocabulary, self._max_length, self._has_token_types, self._padding_side)


def tokenizer_source(
    part: ModelPart, config: PretrainedConfig | None, cache: Path | None
) -> Pretrained | WordPieceTrainer:
    """Where the tokenizer of a recipe comes from.

    With ``model.tokenizer: auto`` it is the pretrained model's own; where the weights are random (``model.config``
    alone, or a factory) one is trained. Otherwise ``model.tokenizer`` names a folder or a Hub model.

    Args:
        part: the recipe's ``model``.
        config: what ``read_config`` gave for it.
        cache: folder that trained vocabularies are kept in; None keeps none.

    Raises:
        ModelError: the model comes without a tokenizer, or with one that cannot be used; and whatever ``fetch`` raises.
    """
    limit = max_positions(config)
    if part.tokenizer == "auto" and part.source is None:
        has_token_types = config is None or (getattr(config, "type_vocab_size", 0) or 0) > 1
        # the head reads the last position of a row, filling or not
        side = "left" if getattr(config, "model_type", None) in _READ_AT_THE_END else "right"
        return WordPieceTrainer(part.vocabulary_size, limit or UNLIMITED, has_token_types, cache, side)
    own = part.tokenizer == "auto"
    source = part.source if own else part.tokenizer
    tokenizer = _pretrained(part, source or "", config if own else None)
    if limit is not None:
        tokenizer.model_max_length = min(tokenizer.model_max_length, limit)
    notice = _fill_with_known_token(tokenizer, config)
    return Pretrained(_loaded_key(tokenizer), tokenizer, (notice,) * bool(notice))


def cuts_on_the_left(part: ModelPart) -> bool:
    """Whether the tokenizer of a pretrained model keeps the end of a long text; read from its files, not loaded."""
    source = part.source if part.tokenizer == "auto" else part.tokenizer
    if source is None:
        return False
    revision = part.revision if part.tokenizer == "auto" else None
    setting = "model.source" if part.tokenizer == "auto" else "model.tokenizer"
    patterns = CONFIG_FILES + TOKENIZER_FILES
    folder = fetch(source, patterns, revision=revision, code=part.trust_remote_code, setting=setting)
    with contextlib.suppress(OSError, ValueError, AttributeError):  # whoever loads it says what is wrong
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        if "truncation_side" in settings:
            return bool(settings["truncation_side"] == "left")
    with contextlib.suppress(OSError), (folder / "tokenizer.json").open(encoding="utf-8", errors="replace") as file:
        return re.search(r'"truncation":\s*\{[^{}]*"direction":\s*"Left"', file.read(_HEAD_CHARACTERS)) is not None
    return False


@contextlib.contextmanager
def cutting_on(tokenizer: PreTrainedTokenizerFast, side: str) -> Iterator[None]:
    """Have a tokenizer truncate on ``side`` in this context, also where it is saved and loaded again."""
    before, settings = tokenizer.truncation_side, tokenizer.init_kwargs
    tokenizer.truncation_side = side
    if side != before or "truncation_side" in settings:
        tokenizer.init_kwargs = {**settings, "truncation_side": side}  # what save_pretrained writes
    try:
        yield
    finally:
        tokenizer.truncation_side, tokenizer.init_kwargs = before, settings


def train_wordpiece(texts: Sequence[str], vocabulary_size: int) -> dict[str, int]:
    """A lower-case WordPiece vocabulary, token -> id, the special tokens first.

    The trainer of ``tokenizers`` numbers the pieces of single characters in the order of a hash map, and breaks ties
    between equally frequent pairs by these numbers: two runs give two vocabularies. So it is run twice: once to learn
    which pieces of single characters there are, and again with these in sorted order before everything else.

    Raises:
        ModelError: the texts hold no words.
    """
    normalizer, splitter = _normalizer(), tokenizers.pre_tokenizers.BertPreTokenizer()
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(normalizer.normalize_str(text))
    characters = {c: n for c, n in counts.items() if not c.isspace() and not unicodedata.category(c).startswith("C")}
    if not characters:
        raise ModelError("model.tokenizer = auto: the training texts hold no words", "a vocabulary is trained on them")
    # a third, so that with the pieces inside words there is room left for whole words
    alphabet = sorted(characters, key=lambda c: (-characters[c], c))[: max(1, vocabulary_size // 3)]

    def run(pinned: Sequence[str], size: int) -> dict[str, int]:
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, splitter
        trainer = tokenizers.trainers.WordPieceTrainer(
            vocab_size=size,
            special_tokens=list(pinned),
            initial_alphabet=alphabet,
            limit_alphabet=len(alphabet),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer, length=len(texts))
        vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        return vocabulary

    pieces = sorted(set(run(SPECIAL_TOKENS, 0)) - set(SPECIAL_TOKENS))
    vocabulary = run([*SPECIAL_TOKENS, *pieces], vocabulary_size)
    return dict(sorted(vocabulary.items(), key=lambda item: item[1]))


def bert_tokenizer(
    vocabulary: dict[str, int],
    max_length: int = UNLIMITED,
    has_token_types: bool = True,
    padding_side: str = "right",
) -> PreTrainedTokenizerFast:
    """A lower-case BERT tokenizer: [CLS] text [SEP], or [CLS] first [SEP] second [SEP] with token types 0 and 1."""
    from transformers import PreTrainedTokenizerFast

    pad, unknown, start, end, mask = SPECIAL_TOKENS
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token=unknown))
    backend.normalizer = _normalizer()
    backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    backend.decoder = tokenizers.decoders.WordPiece()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{start} $A {end}",
        pair=f"{start} $A {end} $B:1 {end}:1",
        special_tokens=[(start, vocabulary[start]), (end, vocabulary[end])],
    )
    inputs = ["input_ids", *(["token_type_ids"] if has_token_types else []), "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=pad,
        unk_token=unknown,
        cls_token=start,
        sep_token=end,
        mask_token=mask,
        model_max_length=max_length,
        padding_side=padding_side,
        model_input_names=inputs,
    )


def _pretrained(part: ModelPart, source: str, config: PretrainedConfig | None) -> PreTrainedTokenizerFast:
    from transformers import AutoTokenizer

    own = part.tokenizer == "auto"
    what = f"model.source = {source}" if own else f"model.tokenizer = {source}"
    revision = part.revision if own else None
    setting = "model.source" if own else "model.tokenizer"
    patterns = CONFIG_FILES + TOKENIZER_FILES
    folder = fetch(source, patterns, revision=revision, code=part.trust_remote_code, setting=setting)
    if not _has_tokenizer(folder):
        raise ModelError(
            f"{what}: comes without a tokenizer",
            "no tokenizer.json, vocabulary or sentencepiece model is in it",
            "set model.tokenizer to a folder or Hub model that has one, such as the model it was trained from",
        )
    try:
        tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(
            folder, config=config, trust_remote_code=part.trust_remote_code, local_files_only=True
        )
    except BaseException as error:  # converters raise whatever they meet
        if not is_failure(error):
            raise
        raise ModelError(f"{what}: its tokenizer cannot be loaded", in_a_line(error),
            "set model.tokenizer to a folder or Hub model that has a tokenizer.json") from error  # fmt: skip
    if not tokenizer.is_fast:
        raise ModelError(
            f"{what}: only has a tokenizer written in Python",
            "encoding with it would take longer than training",
            "set model.tokenizer to a folder or Hub model that has a tokenizer.json",
        )
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ModelError(
                f"{what}: its tokenizer has no padding token", "", "add a pad_token to tokenizer_config.json"
            )
        tokenizer.pad_token = tokenizer.eos_token  # decoders are pretrained without filling
    return tokenizer


def _fill_with_known_token(tokenizer: PreTrainedTokenizerFast, config: PretrainedConfig | None) -> str:
    """Have texts filled with a token that the model has an embedding for, and say so; empty where they are already.

    A padding token that was added to a tokenizer alone has none. Filling is masked, so that another token does.
    """
    rows = getattr(config.get_text_config(), "vocab_size", None) if config is not None else None
    added, number = tokenizer.pad_token, tokenizer.pad_token_id
    if rows is None or number is None or number < rows:
        return ""
    for name in ("eos_token", "unk_token", "sep_token"):
        if getattr(tokenizer, f"{name}_id") is not None and getattr(tokenizer, f"{name}_id") < rows:
            tokenizer.pad_token = getattr(tokenizer, name)
            lacks = f"the tokenizer's padding token {added!r} (id {number:,}) has no embedding in the model"
            return f"{lacks}, which has {rows:,}: texts are filled with {tokenizer.pad_token!r}, which is masked"
    return ""


def _has_tokenizer(folder: Path) -> bool:
    settings = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
    vocabularies = [pattern for pattern in TOKENIZER_FILES if pattern not in settings]
    names = [path.name for path in folder.iterdir() if path.is_file()]
    return any(fnmatch(name, pattern) for name in names for pattern in vocabularies)


def _loaded_key(tokenizer: Any) -> str:
    """Return the digest of a tokenizer as it was loaded: its files may be others by now."""
    # a class of the model's own code is in a module that is named after the code's digest
    kind = (type(tokenizer).__module__, type(tokenizer).__qualname__)
    # texts are cut by data.overflow, whatever the tokenizer's truncation_side
    sides = (tokenizer.padding_side, "right", tokenizer.pad_token_type_id)
    parts = [tokenizers.__version__, str(tokenizer.pad_token), repr((*kind, *sides, *tokenizer.model_input_names))]
    return _digest("\n".join([*parts, tokenizer.backend_tokenizer.to_str()]).encode())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _normalizer() -> Any:
    return tokenizers.normalizers.BertNormalizer(lowercase=True)


def _sample(texts: Sequence[str]) -> Sequence[str]:
    """Every text, or where they are too long in all, every k-th."""
    total = sum(map(len, texts))
    return texts[:: max(1, -(-total // _TRAINING_CHARACTERS))]


def _write_vocabulary(path: Path, vocabulary: dict[str, int]) -> None:
    """Keep a vocabulary for the next time; a cache is a convenience, and the run goes on where it cannot be written."""
    with contextlib.suppress(OSError, PacelineError):
        write_atomically(path, json.dumps(vocabulary, ensure_ascii=False).encode())


def _read_vocabulary(path: Path) -> dict[str, int] | None:
    """A vocabulary from the cache; None when it cannot be read or was damaged, and is trained anew."""
    if is_irregular(path):
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and all(token in found for token in SPECIAL_TOKENS) else None
