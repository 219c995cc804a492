"""This module turns text on the machine into batches of tokens; one number says how far a run has come in them.

A file that is called *.bin holds tokens already, as uint16: it is mapped into memory instead of being read. The text is
cut into windows of `sequence + 1` tokens, each beginning with the last token of the one before. An epoch takes each
window once, in an order that follows from the seed and the epoch alone.
"""

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mezzotint.trainer.console import CommandError

try:
    import tokenizers
except ModuleNotFoundError:  # only --tokenizer needs it, so it is not in the extra
    HAS_TOKENIZERS = False
else:
    HAS_TOKENIZERS = True

NUM_BYTES = 256
TOKENS = ".bin"  # the suffix of a file of tokens
# These folders under the standard library do not belong to it, or hold mostly its tests.
LEFT_OUT = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3"})


@dataclass(frozen=True, slots=True)
class Text:
    """A `Text` holds tokens [n] (uint8, uint16 or int32), the size of their vocabulary, and a hash that
    tells one text from another."""

    tokens: torch.Tensor
    vocab: int
    fingerprint: str


def read_text(path: str | None = None, tokenizer: str | None = None) -> Text:
    """Read a file, all files of a folder, or Python's own sources if `path` is None, as
    bytes or as a tokenizer's tokens."""
    if path is not None and Path(path).suffix == TOKENS:
        return _map_tokens(Path(path), tokenizer)
    text = read_bytes(path)
    if tokenizer is None:
        return Text(torch.frombuffer(bytearray(text), dtype=torch.uint8), NUM_BYTES, _hash(text, NUM_BYTES))
    ids, vocab = _tokenize(text, tokenizer)
    return Text(ids, vocab, _hash(ids.numpy().tobytes(), vocab))


def hold_out(text: Text, part: float) -> tuple[Text, Text]:
    """Split a text into the beginning, which is trained on, and its last `part` (a fraction), which is not."""
    count = round(text.tokens.numel() * (1.0 - part))
    return replace(text, tokens=text.tokens[:count]), replace(text, tokens=text.tokens[count:])


def as_words(tokens: list[int], tokenizer: str | None = None) -> str:
    """Return the text that tokens stand for, with U+FFFD for control characters that a terminal would obey."""
    if tokenizer is None:
        said = bytes(tokens).decode("utf-8", errors="replace")
    else:
        said = tokenizers.Tokenizer.from_file(tokenizer).decode(tokens)
    return "".join(sign if sign.isprintable() or sign in "\n\t" else "\ufffd" for sign in said)


def _hash(data: bytes | memoryview, vocab: int) -> str:
    found = hashlib.sha256(data)
    found.update(vocab.to_bytes(8, "little"))
    return found.hexdigest()


def _map_tokens(path: Path, tokenizer: str | None) -> Text:
    """Map a file of tokens that a tokenizer made before: uint16, little-endian."""
    if tokenizer is None:
        raise CommandError(f"--data {path} holds tokens: give the tokenizer.json that made them as --tokenizer")
    if not path.is_file():
        raise CommandError(f"--data {path} does not exist: give a file of uint16 tokens")
    size = path.stat().st_size
    if size == 0 or size % 2:
        raise CommandError(f"--data {path} has {size} bytes: give a file of uint16 tokens, two bytes each")
    vocab = _open_tokenizer(tokenizer).get_vocab_size(with_added_tokens=True)
    tokens = torch.from_file(str(path), size=size // 2, dtype=torch.uint16)
    largest = int(tokens.numpy().max())
    if largest >= vocab:
        raise CommandError(
            f"--data {path} has the token {largest}, and {tokenizer} has {vocab}: give the tokenizer that made the file"
        )
    return Text(tokens, vocab, _hash(tokens.numpy().data, vocab))


def read_bytes(path: str | None) -> bytes:
    """Return the files one after another, in the order of their paths, so that every call gives the same text."""
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        text = b"".join(_read_all(sorted(_sources(root))))
        if not text:
            raise CommandError(f"there are no Python sources under {root}: give text with --data PATH")
        return text
    root = Path(path)
    if not root.exists():
        raise CommandError(f"--data {path} does not exist: give a text file or a folder of them")
    # Files with zero bytes in a folder are left out, as they may be pictures; a file that was named is taken as text.
    files = sorted(_visible(root)) if root.is_dir() else [root]
    text = b"".join(part for part in _read_all(files) if root.is_file() or b"\0" not in part)
    if not text:
        what = "has no text file in it" if root.is_dir() else "is empty"
        raise CommandError(f"--data {path} {what}: give a file or folder with text in it")
    return text


def _sources(root: Path) -> Iterator[Path]:
    for file in root.rglob("*.py"):
        if LEFT_OUT.isdisjoint(file.relative_to(root).parts):
            yield file


def _visible(root: Path) -> Iterator[Path]:
    for file in root.rglob("*"):
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(root).parts):
            yield file


def _read_all(files: list[Path]) -> Iterator[bytes]:
    for file in files:
        try:
            yield file.read_bytes()
        except OSError as error:
            raise CommandError(f"{file} cannot be read: {error.strerror}; give --data that can be") from None


def _open_tokenizer(path: str) -> Any:
    if not HAS_TOKENIZERS:
        raise CommandError("--tokenizer needs the package tokenizers: pip install tokenizers")
    if not Path(path).is_file():
        raise CommandError(f"--tokenizer {path} does not exist: give the tokenizer.json of a Hugging Face model")
    try:
        return tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # the library raises plain Exceptions
        raise CommandError(f"--tokenizer {path} is no tokenizer: {error}; give a Hugging Face tokenizer.json") from None


def _tokenize(text: bytes, path: str) -> tuple[torch.Tensor, int]:
    tokenizer = _open_tokenizer(path)
    ids: list[int] = []
    for piece in _pieces(text.decode("utf-8", errors="replace")):
        ids += tokenizer.encode(piece, add_special_tokens=False).ids
    return torch.tensor(ids, dtype=torch.int32), tokenizer.get_vocab_size(with_added_tokens=True)


def _pieces(text: str, length: int = 2**16) -> Iterator[str]:
    """Yield whole lines, `length` characters or more at a time, because a tokenizer's output takes a hundred
    times the memory of its text."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + length) + 1 or len(text)
        yield text[start:end]
        start = end


def draw_seed(*numbers: int) -> int:
    """Return a seed of 32 bits, as many as torch's generator on the CPU reads, that follows from the numbers."""
    digest = hashlib.sha256(" ".join(map(str, numbers)).encode()).digest()
    return int.from_bytes(digest[:4], "little")


class Batches:
    """`Batches` gives tokens and targets, int64 [batch, sequence] each, without end; `position`
    counts the windows taken so far.

    Each of several replicas takes its share of a batch that is `replicas` times as large: together they see the same
    windows in the same steps as one rank with that larger `batch`.
    """

    def __init__(
        self,
        text: Text,
        sequence: int,
        batch: int,
        seed: int,
        position: int = 0,
        *,
        replica: int = 0,
        replicas: int = 1,
    ) -> None:
        self.num_windows = (text.tokens.numel() - 1) // sequence
        if self.num_windows < 1:
            raise CommandError(
                f"the text has {text.tokens.numel()} tokens: a sequence needs {sequence + 1}; give more text with "
                "--data, or a smaller --sequence"
            )
        self.tokens, self.sequence, self.batch, self.seed = text.tokens, sequence, batch, seed
        self.position, self.replica, self.replicas = position, replica, replicas
        self._epoch, self._order = -1, torch.empty(0)

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next batch, which may end one epoch and begin another."""
        first = self.position + self.replica * self.batch
        starts = torch.stack([self._window(first + i) for i in range(self.batch)]) * self.sequence
        self.position += self.replicas * self.batch
        windows = self.tokens[starts[:, None] + torch.arange(self.sequence + 1)].long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def _window(self, place: int) -> torch.Tensor:
        epoch, index = divmod(place, self.num_windows)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(draw_seed(self.seed, epoch))
            self._epoch, self._order = epoch, torch.randperm(self.num_windows, generator=generator)
        return self._order[index]
