"""This module trains a BPE tokenizer on texts, and writes a file of their tokens, uint16, those held out last."""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import tokenizers

VOCAB = 32768
END = "<|end|>"  # after each file; token 0
BATCH = 500  # files that are tokenized at once
SAMPLE = 4  # one file of so many trains the tokenizer
HELD_OUT = 4  # so many of 256 files are held out, by their hashes
TRAINED_TOKENS = 1536 * 64 * 1024 + 1  # 1536 batches of 64 windows of 1024 tokens: each is seen once
HELD_OUT_TOKENS = 20 * 64 * 1024 + 1  # 20 batches of 64 windows of 1024 tokens: each evaluation sees each window once


def train_tokenizer(texts: Mapping[str, str]) -> tokenizers.Tokenizer:
    """Train a byte-level BPE tokenizer on a sample, chosen by hash, of the texts that are not held out."""
    sample = [text for key, text in texts.items() if not is_held_out(key) and int(key[-4:-2], 16) % SAMPLE == 0]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[END],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample, trainer)
    return tokenizer


def is_held_out(key: str) -> bool:
    """Return whether a text is for evaluation, by the end of its hash: the beginning decides
    what is taken of large packages."""
    return int(key[-2:], 16) < HELD_OUT


def write_tokens(texts: Mapping[str, str], tokenizer: tokenizers.Tokenizer, path: Path) -> tuple[int, int]:
    """Write as many tokens of the texts as are wanted, in the order of their hashes read backwards.

    It returns how many tokens are trained on, and how many are held out.
    """
    counts = []
    with path.open("wb") as file:
        for is_held, room in ((False, TRAINED_TOKENS), (True, HELD_OUT_TOKENS)):
            keys = sorted((key for key in texts if is_held_out(key) == is_held), key=lambda key: key[::-1])
            written = 0
            for ids in _encode(texts, keys, tokenizer):
                kept = ids[: room - written]
                kept.tofile(file)
                written += kept.size
                if written == room:
                    break
            counts.append(written)
    return counts[0], counts[1]


def _encode(texts: Mapping[str, str], keys: list[str], tokenizer: tokenizers.Tokenizer) -> Iterator[np.ndarray]:
    end = tokenizer.token_to_id(END)
    for start in range(0, len(keys), BATCH):
        some = [texts[key] for key in keys[start : start + BATCH]]
        for encoding in tokenizer.encode_batch_fast(some, add_special_tokens=False):
            yield np.array([*encoding.ids, end], dtype=np.uint16)


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
