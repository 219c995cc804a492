"""Text: read in one order, cut into windows that an epoch takes once, errors that say what to give."""

from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch

from mezzotint.trainer import data
from mezzotint.trainer.console import CommandError
from mezzotint.trainer.data import Batches, Text, hold_out, read_bytes, read_text


def text_of(length: int) -> Text:
    return Text(torch.arange(length, dtype=torch.int32), length, "")


def test_python_sources_are_read_in_one_order() -> None:
    text = read_bytes(None)
    assert text == read_bytes(None)
    assert len(text) > 2_000_000
    assert b"import" in text


def test_a_folder_is_its_text_files_by_path(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name, content in {"c.txt": b"3", "a.txt": b"1", "b/z.txt": b"2", ".hidden": b"-", "picture": b"\0"}.items():
        (tmp_path / name).write_bytes(content)
    assert read_bytes(str(tmp_path)) == b"123"


def test_bytes_are_tokens(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"ab\0\xff")
    text = read_text(str(path))
    assert (text.tokens.tolist(), text.vocab) == ([97, 98, 0, 255], 256)
    path.write_bytes(b"ab\0\xfe")
    assert read_text(str(path)).fingerprint != text.fingerprint


def test_tokens_of_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("one two two one four")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"one": 0, "two": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    text = read_text(str(tmp_path / "text"), str(tmp_path / "tokenizer.json"))
    assert (text.tokens.tolist(), text.vocab) == ([0, 1, 1, 0, 2], 3)
    assert text.fingerprint != read_text(str(tmp_path / "text")).fingerprint


def test_a_file_of_tokens_is_mapped(tmp_path: Path) -> None:
    vocab = 50_000
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(vocab)}, unk_token="0"))
    words.save(str(tmp_path / "tokenizer.json"))
    path, given = tmp_path / "tokens.bin", str(tmp_path / "tokenizer.json")
    np.array([0, 1, 255, 256, 49_999, 7], dtype="<u2").tofile(path)
    text = read_text(str(path), given)
    assert (text.tokens.dtype, text.vocab) == (torch.uint16, vocab)
    tokens, targets = Batches(text, 5, 1, 0).next()
    assert (tokens.tolist(), targets.tolist()) == ([[0, 1, 255, 256, 49_999]], [[1, 255, 256, 49_999, 7]])
    trained, held_out = hold_out(text, 2 / 6)
    assert (trained.tokens.tolist(), held_out.tokens.tolist()) == ([0, 1, 255, 256], [49_999, 7])
    np.array([0, 1, 255, 256, 49_999, 8], dtype="<u2").tofile(path)
    assert read_text(str(path), given).fingerprint != text.fingerprint


def test_a_wrong_file_of_tokens_says_what_to_give(tmp_path: Path) -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    words.save(str(tmp_path / "tokenizer.json"))
    path, given = tmp_path / "tokens.bin", str(tmp_path / "tokenizer.json")
    for content, tokenizer, message in (
        (b"\0\0\1\0", None, "holds tokens: give the tokenizer.json that made them as --tokenizer"),
        (b"\0\0\1", given, "has 3 bytes: give a file of uint16 tokens, two bytes each"),
        (b"", given, "has 0 bytes: give a file of uint16 tokens"),
        (b"\0\0\2\0", given, "has the token 2, and .* has 2: give the tokenizer that made the file"),
    ):
        path.write_bytes(content)
        with pytest.raises(CommandError, match=message):
            read_text(str(path), tokenizer)
    with pytest.raises(CommandError, match="does not exist: give a file of uint16 tokens"):
        read_text(str(tmp_path / "absent.bin"), given)


def test_a_long_text_is_tokenized_in_lines() -> None:
    text = "ab\n" * 50 + "the end"
    pieces = list(data._pieces(text, 10))
    assert "".join(pieces) == text
    assert pieces[:2] == ["ab\n" * 4, "ab\n" * 4]
    assert all(piece.endswith("\n") for piece in pieces[:-1])


def test_what_cannot_be_read_says_what_to_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("text")
    with pytest.raises(CommandError, match="does not exist: give a text file"):
        read_text(str(tmp_path / "missing"))
    with pytest.raises(CommandError, match="is empty: give a file"):
        read_text(str(tmp_path / "empty"))
    with pytest.raises(CommandError, match="has no text file in it"):
        read_text(str(tmp_path / "folder"))
    with pytest.raises(CommandError, match=r"give the tokenizer\.json"):
        read_text(str(tmp_path / "text"), str(tmp_path / "missing"))
    with pytest.raises(CommandError, match="is no tokenizer"):
        read_text(str(tmp_path / "text"), str(tmp_path / "text"))
    monkeypatch.setattr(data, "HAS_TOKENIZERS", False)
    with pytest.raises(CommandError, match="pip install tokenizers"):
        read_text(str(tmp_path / "text"), str(tmp_path / "text"))
    monkeypatch.setattr(data.sysconfig, "get_path", lambda name: str(tmp_path / "folder"))
    with pytest.raises(CommandError, match="give text with --data"):
        read_text()


def test_an_epoch_takes_every_window_once() -> None:
    batches = Batches(text_of(41), sequence=4, batch=5, seed=0)  # 10 windows
    epochs = []
    for _ in range(2):
        starts = []
        for _ in range(2):
            tokens, targets = batches.next()
            assert torch.equal(tokens[:, 1:], targets[:, :-1])
            assert torch.equal(targets[:, -1], tokens[:, -1] + 1)
            starts += tokens[:, 0].tolist()
        assert sorted(starts) == list(range(0, 40, 4))
        epochs.append(starts)
    assert epochs[0] != epochs[1]
    assert Batches(text_of(41), 4, 5, seed=1).next()[0][:, 0].tolist() != epochs[0][:5]


def test_a_position_is_all_there_is_to_go_on_from() -> None:
    whole = Batches(text_of(41), sequence=4, batch=3, seed=0)
    expected = [whole.next() for _ in range(9)]
    later = Batches(text_of(41), sequence=4, batch=3, seed=0, position=12)
    for tokens, targets in expected[4:]:
        found = later.next()
        assert torch.equal(found[0], tokens)
        assert torch.equal(found[1], targets)
    assert later.position == whole.position


def test_replicas_share_the_batches_of_one_process() -> None:
    whole = Batches(text_of(41), sequence=4, batch=6, seed=0)  # 10 windows: a batch goes over the end of an epoch
    parts = [Batches(text_of(41), sequence=4, batch=2, seed=0, replica=i, replicas=3) for i in range(3)]
    for _ in range(4):
        expected = whole.next()
        found = [torch.cat(each) for each in zip(*[part.next() for part in parts], strict=True)]
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])
    assert {part.position for part in parts} == {whole.position}


def test_a_text_that_is_too_short() -> None:
    Batches(text_of(5), sequence=4, batch=1, seed=0)
    with pytest.raises(CommandError, match="the text has 4 tokens: a sequence needs 5"):
        Batches(text_of(4), sequence=4, batch=1, seed=0)
