"""A language model small enough to write in a second, and honest enough to queue on.

The demo and the tests need a real engine that does real work: prefill that costs, decoding that costs, slots
that fill up. They do not need sense. So the model is a llama of random weights (width 512, 8 layers: some
fifty megabytes in half precision), with one thing arranged: **it counts down**. Each token's embedding is
the direction of the token that follows it, the layers in between add only a little noise, and so a
prompt that ends in ` 7` is answered with ` 6 5 4 3 2 1` and the end of the text. Any other last word starts
the count somewhere between `SHORTEST_ANSWER` and `LONGEST_ANSWER`.

That is how a replay gives each request its true output length without telling anybody in front of the
engine: the length lies in the prompt, the model alone decides when to stop, and no field of the request
(`max_tokens` and its like) says anything about it.

Invariants: the file is a function of the recipe alone; it is written beside its final name and moved there
whole, so that two processes may make it at once; a cached file whose content hash no longer fits is written
anew. The engine that serves it lives in `engine.py`; which prompts are written for it, in `traffic.py`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RECIPE_VERSION = 2
"""Raised whenever the same shape would give another file."""

LARGEST_NUMBER = 999
"""The longest answer that a prompt can ask for, in tokens: three digits keep every prefix a number too."""

SHORTEST_ANSWER = 12
LONGEST_ANSWER = 31
"""Where the count starts when a prompt ends in a word: long enough to stream, short enough for a test."""

LOGIT_OF_THE_NEXT = 20.0
"""The logit of the next token. Any other is near zero by chance (spread: this over the root of the width), so
that at the usual temperatures none of them is ever drawn."""

LAYER_NOISE = 0.02
"""What each layer adds to the embedding, relative to it: the work is done, and drowns nothing."""

CHUNK_BYTES = 1 << 20

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% if not loop.last %}\n{% endif %}{% endfor %}"
)
"""The last word of the last message stays the last token of the prompt."""

_WORD_TEXT = (
    "a about after again air all along also always an and answer any are as ask at away back be because "
    "bed before begin best better between big bird body book both box boy bring but by call came can car "
    "carry change child city clear close cold come could country cut day did different do does door down "
    "draw dry each early earth eat end enough even ever every example eye face family far fast father "
    "feet few field find fire first fish five follow food for form found four from full game gate gave "
    "get girl give go good great green ground group grow had half hand hard has have he head hear help "
    "her here high him his hold home horse hot house how idea if in is it its just keep kind king know "
    "land large last late learn leave left let letter life light like line list little live long look low "
    "made make man many map may me mean men might mile money more morning most mother move much music "
    "must my name near need never new next night no north not note nothing now number of off often old on "
    "once one only open or order other our out over own page paper part pass people place plain plan "
    "plant play point port power press problem pull put question rain ran reach read ready real rest "
    "right river road rock room round rule run said same saw say school science sea second see seem "
    "sentence serve set she ship short should show side simple sing slow small snow so some song soon "
    "sound spell stand star start state stay step still stop story street study such sun sure table take "
    "talk tell than that the their them then there these they thing think this those though thought three "
    "through time to together told too took top town travel tree turn two under until up us use very "
    "voice walk want war warm was watch water way we week well went were what wheel when where which "
    "while white who whole why will wind with wood word work world would write year yes you young your"
)
WORDS = tuple(_WORD_TEXT.split())
"""The words that prompts are made of: each is one token, so that a prompt of n words is n tokens long."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The size of the model: it sets what a token costs.

    The default gives some hundred tokens a second on one core of a small machine: a request of the demo
    takes from a few tenths of a second to a few seconds. Tests that only need an answer take `SMALLEST`.
    """

    width: int = 512
    layers: int = 8
    heads: int = 8
    feed_forward: int = 1408
    context: int = 8192
    seed: int = 20231116


SMALLEST = ModelShape(width=128, layers=1, heads=2, feed_forward=256)
"""Thousands of tokens a second, two megabytes on disk: for tests of protocols."""


def cache_dir() -> Path:
    """Where models are kept: `$SLUICEGATE_CACHE`, else below `$XDG_CACHE_HOME`, else below `~/.cache`."""
    if own := os.environ.get("SLUICEGATE_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sluicegate"


def ensure_model(shape: ModelShape | None = None, folder: Path | None = None) -> Path:
    """Returns the path of the model file, written first where it is missing or damaged.

    The name carries the recipe's version and hash; a file beside it carries the hash of the content.
    Raises `OSError` where the folder cannot be written or the disk is full, `ImportError` where the `lab`
    extra is not installed.
    """
    shape = shape or ModelShape()
    folder = folder or cache_dir()
    recipe = json.dumps({"version": RECIPE_VERSION, "shape": asdict(shape), "words": WORDS}, sort_keys=True)
    name = f"countdown-v{RECIPE_VERSION}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    path, seal = folder / f"{name}.gguf", folder / f"{name}.sha256"
    with contextlib.suppress(OSError):
        if seal.read_text().strip() == _content_hash(path):
            return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="writing-") as workplace:
        fresh = Path(workplace) / path.name
        write_model(fresh, shape)
        fresh_seal = Path(workplace) / seal.name
        fresh_seal.write_text(_content_hash(fresh) + "\n")
        fresh.replace(path)
        fresh_seal.replace(seal)
    return path


def _content_hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """Pieces of text by token id, and for each the id of the token that follows it."""

    pieces: list[str]
    kinds: list[int]
    followers: list[int]
    end: int


def _vocabulary() -> _Vocabulary:
    """A sentencepiece vocabulary: specials, bytes, ASCII, every prefix of every word, and the numbers.

    Sentencepiece joins neighbours only if the joined piece exists, so each word brings its prefixes; the
    prefixes of a number are numbers.
    """
    from gguf import TokenType  # noqa: PLC0415 - an extra; see ensure_model

    unknown, begin, end = 0, 1, 2
    pieces = ["<unk>", "<s>", "</s>"]
    kinds = [int(TokenType.UNKNOWN), int(TokenType.CONTROL), int(TokenType.CONTROL)]
    pieces += [f"<0x{value:02X}>" for value in range(256)]
    kinds += [int(TokenType.BYTE)] * 256
    plain = dict.fromkeys(chr(code) for code in range(0x20, 0x7F) if chr(code) != " ")
    plain["▁"] = None
    for word in WORDS:
        plain.update(dict.fromkeys(f"▁{word}"[:length] for length in range(2, len(word) + 2)))
    plain.update(dict.fromkeys(f"▁{number}" for number in range(1, LARGEST_NUMBER + 1)))
    pieces += list(plain)
    kinds += [int(TokenType.NORMAL)] * len(plain)

    ids = {piece: index for index, piece in enumerate(pieces)}
    answers = LONGEST_ANSWER - SHORTEST_ANSWER + 1
    followers = [ids[f"▁{SHORTEST_ANSWER + index % answers}"] for index in range(len(pieces))]
    for number in range(2, LARGEST_NUMBER + 1):
        followers[ids[f"▁{number}"]] = ids[f"▁{number - 1}"]
    followers[ids["▁1"]] = end
    # Under a grammar that asks for a JSON object, the shortest one, and then the end. A brace is spelt by two
    # tokens, the plain one and the byte; a grammar lets both pass.
    for brace_open, brace_close in (("{", "}"), ("<0x7B>", "<0x7D>")):
        followers[ids[brace_open]], followers[ids[brace_close]] = ids["}"], end
    followers[unknown] = followers[begin] = followers[end] = end
    return _Vocabulary(pieces, kinds, followers, end)


def write_model(path: Path, shape: ModelShape) -> None:
    """Writes the model to `path` as a GGUF file in half precision."""
    import gguf  # noqa: PLC0415 - an extra; see ensure_model
    import numpy as np  # noqa: PLC0415

    vocabulary = _vocabulary()
    size = len(vocabulary.pieces)
    writer: Any = gguf.GGUFWriter(path, "llama")
    writer.add_name("sluicegate-countdown")
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(shape.width // shape.heads)
    writer.add_vocab_size(size)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(vocabulary.pieces)
    # Longer pieces score higher, so that joining always goes on towards the whole word.
    writer.add_token_scores([float(len(piece)) for piece in vocabulary.pieces])
    writer.add_token_types(vocabulary.kinds)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(vocabulary.end)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)

    random = np.random.default_rng(shape.seed)

    def add(name: str, rows: int, columns: int, scale: float) -> None:
        values = random.standard_normal((rows, columns), dtype=np.float32) * (scale / columns**0.5)
        writer.add_tensor(f"{name}.weight", values.astype(np.float16))

    # A direction for each token, all of one length; random ones are nearly at right angles to each other.
    direction = random.standard_normal((size, shape.width), dtype=np.float32)
    direction *= shape.width**0.5 / np.linalg.norm(direction, axis=1, keepdims=True)
    writer.add_tensor("token_embd.weight", direction[vocabulary.followers].astype(np.float16))
    output = direction * (LOGIT_OF_THE_NEXT / shape.width)
    writer.add_tensor("output.weight", output.astype(np.float16))
    ones = np.ones(shape.width, dtype=np.float32)
    writer.add_tensor("output_norm.weight", ones)
    for layer in range(shape.layers):
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", ones)
        writer.add_tensor(f"blk.{layer}.ffn_norm.weight", ones)
        for part in ("attn_q", "attn_k", "attn_v"):
            add(f"blk.{layer}.{part}", shape.width, shape.width, 1.0)
        add(f"blk.{layer}.attn_output", shape.width, shape.width, LAYER_NOISE)
        add(f"blk.{layer}.ffn_gate", shape.feed_forward, shape.width, 1.0)
        add(f"blk.{layer}.ffn_up", shape.feed_forward, shape.width, 1.0)
        add(f"blk.{layer}.ffn_down", shape.width, shape.feed_forward, LAYER_NOISE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def prompt_of(words: list[str], output_tokens: int) -> str:
    """A prompt of `len(words) + 2` tokens (the beginning of the text counts) answered in `output_tokens`.

    `words` come from `WORDS`. The answer ` n-1 ... 1` and the end of the text are `output_tokens` tokens.
    """
    if not 1 <= output_tokens <= LARGEST_NUMBER:
        raise ValueError(f"output_tokens must lie between 1 and {LARGEST_NUMBER}, not {output_tokens}")
    return " ".join([*words, str(output_tokens)])
