"""Small articles, made up, as JSON lines."""

import json
import random

WORDS = [
    "river", "mountain", "council", "station", "century", "village", "player", "engine", "theory",
    "music", "island", "water", "school", "army", "history", "language", "church", "football",
    "government", "album", "species", "railway", "district", "university", "bridge", "castle",
]  # fmt: skip


def paragraphs(number, sentences=12):
    """The paragraphs of an article, a function of its number."""
    draw = random.Random(number)
    for _ in range(3):
        said = [
            " ".join(draw.choices(WORDS, k=9)).capitalize() + "." for _ in range(sentences // 3)
        ]
        yield f"The {draw.choice(WORDS)} of {draw.choice(WORDS)}. {' '.join(said)}"


def plain(number):
    """The text of an article in one line."""
    return " ".join(paragraphs(number))


def row(number):
    return {"title": f"Article {number}", "text": "\n\nHeading\n\n".join(paragraphs(number))}


def write_articles(folder, number):
    """Write articles to four files of a new folder, and two documents without prose."""
    folder.mkdir()
    rows = [*map(row, range(number)), {"text": "See also"}, {"text": None}]
    for part in range(4):
        lines = (json.dumps(entry, ensure_ascii=False) + "\n" for entry in rows[part::4])
        (folder / f"wiki_{part:02}.jsonl").write_text("".join(lines))
    return folder
