"""Small articles, made up, as the published ones of Wikipedia are: JSON lines or Parquet."""

import json
import random

import pyarrow as pa
import pyarrow.parquet as pq

from torch_thor.training.text import corpus

WORDS = [
    "river", "mountain", "council", "station", "century", "village", "player", "engine", "theory",
    "music", "island",
    "water", "school", "army", "history", "language", "church", "football", "government", "album",
    "species",
    "railway", "district", "university", "bridge", "castle",
]  # fmt: skip


def small_units(patch):
    """Make units so small that a few articles have several."""
    patch.setattr(corpus, "UNIT", 10_000)


def paragraphs(number, sentences=12):
    """The paragraphs of an article, a function of its number."""
    draw = random.Random(number)
    for _ in range(3):
        said = [
            " ".join(draw.choices(WORDS, k=9)).capitalize() + "." for _ in range(sentences // 3)
        ]
        yield f"The {draw.choice(WORDS)} of {draw.choice(WORDS)}. {' '.join(said)}"


def plain(number):
    """The text of an article in a line."""
    return " ".join(paragraphs(number))


def row(number):
    text = "\n\nHeading\n\n".join(paragraphs(number))
    return {"id": str(number), "url": f"u{number}", "title": f"Article {number}", "text": text}


def write_articles(path, number):
    """Write articles to a file, or to several in a folder, and two documents without prose."""
    rows = [*map(row, range(number)), *({**row(n), "text": "See also"} for n in (900, 901))]
    if not path.suffix:
        path.mkdir(exist_ok=True)
        for part in range(4):
            lines = (json.dumps(one, ensure_ascii=False) + "\n" for one in rows[part::4])
            (path / f"wiki_{part:02}").write_text("".join(lines))
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in rows))
    return path
