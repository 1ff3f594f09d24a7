"""The model that counts down: written whole, written once, and the same file each time."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluicegate_lab import tiny_model
from sluicegate_lab.tiny_model import LARGEST_NUMBER, SMALLEST, WORDS, ensure_model, prompt_of, write_model


def test_the_file_is_a_function_of_the_recipe(tmp_path: Path) -> None:
    first, second = ensure_model(SMALLEST, tmp_path / "a"), ensure_model(SMALLEST, tmp_path / "b")
    assert first.name == second.name
    assert first.read_bytes() == second.read_bytes()


def test_a_cached_file_is_left_alone(tmp_path: Path) -> None:
    path = ensure_model(SMALLEST, tmp_path)
    written = path.stat().st_mtime_ns
    assert ensure_model(SMALLEST, tmp_path).stat().st_mtime_ns == written


def test_a_damaged_file_is_written_anew(tmp_path: Path) -> None:
    path = ensure_model(SMALLEST, tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert ensure_model(SMALLEST, tmp_path).read_bytes() == whole


def test_a_file_without_its_seal_is_written_anew(tmp_path: Path) -> None:
    path = ensure_model(SMALLEST, tmp_path)
    path.with_suffix(".sha256").unlink()
    ensure_model(SMALLEST, tmp_path)
    assert path.with_suffix(".sha256").exists()


def test_nothing_but_model_and_seal_is_left_in_the_folder(tmp_path: Path) -> None:
    path = ensure_model(SMALLEST, tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([path, path.with_suffix(".sha256")])


def test_another_shape_is_another_file(tmp_path: Path) -> None:
    other = tiny_model.ModelShape(width=32, layers=1, heads=1, feed_forward=64)
    assert ensure_model(SMALLEST, tmp_path) != ensure_model(other, tmp_path)


def test_the_file_is_a_gguf_that_its_own_reader_accepts(tmp_path: Path) -> None:
    import gguf

    path = tmp_path / "model.gguf"
    write_model(path, SMALLEST)
    reader = gguf.GGUFReader(path)
    names = {tensor.name for tensor in reader.tensors}
    assert {"token_embd.weight", "output.weight", "blk.0.attn_q.weight"} <= names
    assert "tokenizer.chat_template" in reader.fields


def test_every_number_is_followed_by_the_next_lower_one_and_one_by_the_end() -> None:
    vocabulary = tiny_model._vocabulary()
    ids = {piece: index for index, piece in enumerate(vocabulary.pieces)}
    for number in range(2, LARGEST_NUMBER + 1):
        assert vocabulary.pieces[vocabulary.followers[ids[f"▁{number}"]]] == f"▁{number - 1}"
    assert vocabulary.followers[ids["▁1"]] == vocabulary.end


def test_every_prefix_of_a_word_is_a_token_so_that_the_word_can_be_joined() -> None:
    pieces = set(tiny_model._vocabulary().pieces)
    for word in (*WORDS, *map(str, range(1, LARGEST_NUMBER + 1))):
        assert all(f"▁{word}"[:length] in pieces for length in range(1, len(word) + 2))


def test_pieces_are_unique() -> None:
    pieces = tiny_model._vocabulary().pieces
    assert len(set(pieces)) == len(pieces)


@pytest.mark.parametrize("length", [0, LARGEST_NUMBER + 1, -3])
def test_an_answer_that_the_model_cannot_count_is_an_error(length: int) -> None:
    with pytest.raises(ValueError, match="output_tokens"):
        prompt_of(["the"], length)


def test_the_cache_folder_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SLUICEGATE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tiny_model.cache_dir() == tmp_path / "sluicegate"
    monkeypatch.setenv("SLUICEGATE_CACHE", str(tmp_path / "own"))
    assert tiny_model.cache_dir() == tmp_path / "own"
