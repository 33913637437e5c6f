"""The last stage of preparing a corpus: documents become token ids and lists of examples."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.progress import Progress

from torch_thor.errors import require
from torch_thor.files import whole_file
from torch_thor.training.text.corpus import HELD_OUT, SPECIAL_TOKENS, TOKENIZER, TRAIN, mapped
from torch_thor.training.text.wordpiece import load_tokenizer


def encode(
    files: Sequence[Path], out: Path, settings: dict[str, Any], progress: Progress
) -> dict[str, dict[str, int]]:
    """Encode cleaned units as the two files of a corpus; return what they hold by file name."""
    import numpy as np
    import pyarrow as pa

    tokenizer = load_tokenizer(out / TOKENIZER)
    tokenizer.encode_special_tokens = True  # a "[SEP]" that stands in a text is text
    ids = np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32
    spans_type = pa.list_(pa.list_(pa.int32(), 2))
    types = {"tokens": pa.list_(pa.from_numpy_dtype(ids)), "ends": pa.list_(pa.int32())}
    schema = pa.schema(types | {str(length): spans_type for length in settings["lengths"]})
    totals = {side: Counter[str]() for side in (TRAIN, HELD_OUT)}
    with ExitStack() as stack:
        paths = {side: stack.enter_context(whole_file(out / side)) for side in totals}
        writers = {
            side: stack.enter_context(pa.ipc.new_file(str(path), schema))
            for side, path in paths.items()
        }
        for file in progress.track(files, description="encoding"):
            rows: dict[str, list[dict[str, Any]]] = {side: [] for side in totals}
            for row in mapped(file).read_all().to_pylist():
                encoded = tokenizer.encode_batch_fast(row["sentences"], add_special_tokens=False)
                sentences = [one.ids for one in encoded if one.ids]
                ends = np.cumsum([len(one) for one in sentences], dtype=np.int32)
                tokens = np.array([token for one in sentences for token in one], ids)
                side = (
                    HELD_OUT
                    if is_in_share(row["name"], settings["held_out"], settings["seed"])
                    else TRAIN
                )
                examples = {
                    str(length): spans(ends.tolist(), length) for length in settings["lengths"]
                }
                rows[side].append({"tokens": tokens, "ends": ends, **examples})
                counted = {"documents": 1, "sentences": len(ends), "tokens": len(tokens)}
                totals[side].update(
                    counted | {f"examples of {key}": len(one) for key, one in examples.items()}
                )
            for side, own in rows.items():
                writers[side].write_batch(pa.RecordBatch.from_pylist(own, schema))
        for side, counts in totals.items():
            require(
                counts["tokens"] > 0,
                f"no document is in {side}: with --held-out {settings['held_out']} the corpus is "
                "too small; change --held-out or give more text, and another --out",
            )
    return {side: dict(counted) for side, counted in totals.items()}


def spans(ends: Sequence[int], length: int) -> list[tuple[int, int]]:
    """Divide a document into examples, each a (first, last exclusive) pair of sentences."""
    # `ends` are those of its sentences, in tokens.
    # An example ends with the sentence that fills it, so it usually has more tokens than fit, as in
    # the code of Devlin et al. (2019); what does not fit is cut off when the example is made. It
    # has two sentences or more, so that it can be split into a pair of segments; a last sentence
    # that is left alone is joined by the one before it, in both.
    room, found = length - SPECIAL_TOKENS, []
    first = begin = 0
    for number, end in enumerate(ends):
        if end - begin >= room and number > first:
            found.append((first, number + 1))
            first, begin = number + 1, end
    if first < len(ends):
        alone = len(ends) - first == 1
        found.append((max(0, first - 1) if alone else first, len(ends)))
    return found


def is_in_share(name: str, share: float, seed: int) -> bool:
    """Decide whether a document belongs to a share of all, only from its name and the seed."""
    digest = hashlib.blake2b(
        f"{seed}\n{name}".encode("utf-8", "surrogateescape"), digest_size=8
    ).digest()
    return int.from_bytes(digest, "big") < share * 2**64
