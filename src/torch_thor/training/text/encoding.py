"""The last stage of preparing a corpus: encodes the documents of a unit as shards of token ids and lists of examples.

The file `NAME.arrow` of a shard holds one document per row: `tokens` contains the ids of all its sentences, and `ends`
the end offset of each sentence in `tokens`. `NAME.128.arrow` holds one example of length 128 per row: the sentences
`first` to `last` (exclusive) of `document`, which together with [CLS] and two [SEP] fill the example. The split of an
example into a pair of segments, what is cut off, and the choice of masked tokens are decided at random in each epoch
(see :mod:`torch_thor.training.text.pairs`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_thor.training.checksums import sha256
from torch_thor.training.text.arrow_files import read_table, write_table
from torch_thor.training.text.cleaning import DOCUMENTS, unit_file

TRAIN, HELD_OUT = "train", "held-out"
SPECIAL_TOKENS = 3  # [CLS] A [SEP] B [SEP]
_BATCH = 256  # number of sentences encoded at a time


@dataclass(frozen=True)
class ShardReport:
    """The description of a shard in the manifest.

    Args:
        name: The name of the shard, such as `train-000000` or `held-out-000000`.
        documents: Number of documents.
        sentences: Number of sentences.
        tokens: Number of tokens.
        examples: Number of examples, by their length in tokens.
        checksums: The SHA-256 checksum of each file of the shard, by file name.
    """

    name: str
    documents: int
    sentences: int
    tokens: int
    examples: dict[int, int]
    checksums: dict[str, str]


def encode_unit(number: int, clean: Path, out: Path, tokenizer_file: Path, lengths: Sequence[int]) -> list[ShardReport]:
    """Encode the documents of a unit.

    Args:
        number: The number of the unit.
        clean: The output folder of the first stage.
        out: The folder to which shards are written.
        tokenizer_file: The path of a `tokenizer.json`.
        lengths: The lengths of the examples, in tokens.

    Returns:
        The reports of the training shard and of the held-out shard; a side without documents has no shard.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    tokenizer.encode_special_tokens = True  # a "[SEP]" that stands in a text is text
    table = read_table(unit_file(clean, number, DOCUMENTS))
    held_out = table["held_out"].to_pylist()
    reports = []
    for side, wanted in ((TRAIN, False), (HELD_OUT, True)):
        rows = [row for row, is_held_out in enumerate(held_out) if is_held_out is wanted]
        if rows:
            reports.append(_write_shard(f"{side}-{number:06d}", table, rows, out, tokenizer, lengths))
    return reports


def _write_shard(
    name: str, table: Any, rows: list[int], out: Path, tokenizer: Any, lengths: Sequence[int]
) -> ShardReport:
    import numpy as np
    import pyarrow as pa

    ids = np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32
    tokens: list[Any] = []
    ends: list[Any] = []
    for row in rows:
        document = table["sentences"][row].as_py()
        own: list[list[int]] = []
        for first in range(0, len(document), _BATCH):
            encoded = tokenizer.encode_batch_fast(document[first : first + _BATCH], add_special_tokens=False)
            own += [pieces for one in encoded if (pieces := one.ids)]
        tokens.append(np.array([piece for pieces in own for piece in pieces], ids))
        ends.append(np.cumsum([len(pieces) for pieces in own], dtype=np.int32) if own else np.zeros(0, np.int32))
    types = {"tokens": pa.list_(pa.from_numpy_dtype(ids)), "ends": pa.list_(pa.int32())}
    write_table(out / f"{name}.arrow", {"tokens": tokens, "ends": ends}, types)
    names, counts = [f"{name}.arrow"], {}
    for length in lengths:
        examples = [(i, first, last) for i, own in enumerate(ends) for first, last in spans(own, length)]
        columns = {key: [one[i] for one in examples] for i, key in enumerate(("document", "first", "last"))}
        names.append(f"{name}.{length}.arrow")
        write_table(out / names[-1], columns, dict.fromkeys(columns, pa.int32()))
        counts[length] = len(examples)
    return ShardReport(
        name,
        len(rows),
        sum(map(len, ends)),
        sum(map(len, tokens)),
        counts,
        {file: sha256(out / file) for file in names},
    )


def spans(ends: Any, length: int) -> list[tuple[int, int]]:
    """Divide a document into examples of consecutive sentences.

    An example ends with the sentence that fills it, so it usually has more tokens than fit, as in the code of Devlin et
    al. (2019); what does not fit is cut off when the example is made. It has two sentences or more, so that it can be
    split into a pair of segments.

    Args:
        ends: The end offset of each sentence in the document, in tokens.
        length: Number of tokens per example, including special tokens.

    Returns:
        The first and last (exclusive) sentence of each example. Each sentence is in one example, except that a last
        sentence that is left alone forms an example with the sentence before it. Only the last example of a document
        may have fewer tokens than fit, and only a document of one sentence has an example of one sentence.
    """
    room, found = length - SPECIAL_TOKENS, []
    first = begin = 0
    for number, end in enumerate(ends):
        if end - begin >= room and number > first:
            found.append((first, number + 1))
            first, begin = number + 1, int(end)
    if first < len(ends):
        alone = len(ends) - first == 1
        found.append((max(0, first - 1) if alone else first, len(ends)))
    return found
