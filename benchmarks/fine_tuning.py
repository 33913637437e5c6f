"""Effect of pretraining: fine-tunes an exported network and a network with random weights on a small task.

    python benchmarks/fine_tuning.py                       # pretrains bert-tiny first (recipe bert-tiny, THOR)
    python benchmarks/fine_tuning.py KEY=VALUE ...         # the same with other keys of the recipe
    python benchmarks/fine_tuning.py --bert exported       # a folder of torch-thor export RUN --format transformers

The task is to find the sentences in which two neighbouring words have been exchanged, which is known as bigram shift
(Conneau et al. 2018, section 2.2). The sentences are those of docstrings of Python's standard library, which comes with
Python, so nothing is downloaded. Half of them are changed. Whole modules are held out. The networks, the data, their
order and the number of steps are the same; only the initial weights differ.
"""

import argparse
import ast
import hashlib
import random
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from torch_thor.bench import describe, write_json
from torch_thor.bench.markdown import each, table
from torch_thor.training.text.text_files import paragraphs_of

OUT = Path(__file__).parent / "results" / "fine_tuning.json"
HELD_OUT = 0.3  # share of the modules
WORDS = range(6, 15)  # number of words in a sentence
EXAMPLES = 2000  # sentences to train on, at most
LENGTH, BATCH_SIZE, EPOCHS, LRS = 48, 32, 6, (2e-4, 5e-4, 1e-3)
STARTS = ("pretrained", "random")


@dataclass
class Sentences:
    """Sentences, and whether two neighbouring words of each have been exchanged.

    Args:
        texts: The sentences.
        labels: 1 for those that were changed, otherwise 0.
    """

    texts: list[str] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)


def docstrings(file: Path) -> Iterator[str]:
    """Read the docstrings of a module.

    Args:
        file: Python source.

    Yields:
        Their paragraphs of five words or more.
    """
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, kinds):
            yield from paragraphs_of(ast.get_docstring(node) or "")


def read_task(library: Path, examples: int = EXAMPLES) -> tuple[Sentences, Sentences]:
    """Read the task.

    Args:
        library: The folder of the standard library. Its tests and installed packages are left out.
        examples: Sentences to train on, at most; they are spread over all modules.

    Returns:
        What is trained on, and what is tested on; no sentence is in both.
    """
    from sentencex import segment

    sides: tuple[dict[str, None], dict[str, None]] = ({}, {})  # in order, each sentence once
    for file in sorted(library.rglob("*.py")):
        path = file.relative_to(library)
        if {"test", "tests", "site-packages", "dist-packages", "lib2to3"} & set(path.parts):
            continue
        digest = hashlib.blake2b(path.as_posix().encode(), digest_size=8).digest()
        side = sides[int.from_bytes(digest, "big") < HELD_OUT * 2**64]
        for paragraph in docstrings(file):
            side.update(dict.fromkeys(one.strip() for one in segment("en", paragraph)))
    train = shifted(sides[0])
    step = max(1, len(train.texts) // examples)
    few = Sentences(train.texts[::step][:examples], train.labels[::step][:examples])
    return few, shifted(text for text in sides[1] if text not in sides[0])


def shifted(texts: Iterable[str]) -> Sentences:
    """Exchange two neighbouring words in half of the sentences.

    Args:
        texts: Sentences. Those with another number of words than ``WORDS`` are left out.

    Returns:
        The sentences with their labels. The text of a sentence determines what happens to it.
    """
    found = Sentences()
    for text in texts:
        words, draw = text.split(), random.Random(text)
        pairs = [n for n in range(len(words) - 1) if words[n].lower() != words[n + 1].lower()]
        if len(words) not in WORDS or not pairs:
            continue
        changed = draw.random() < 0.5
        if changed:
            place = draw.choice(pairs)
            words[place : place + 2] = words[place + 1], words[place]
        found.texts.append(" ".join(words))
        found.labels.append(int(changed))
    return found


def fine_tune(bert: Path, start: str, lr: float, seed: int, train: Sentences, test: Sentences) -> dict[str, Any]:
    """Fine-tune a classifier.

    Args:
        bert: The exported network.
        start: `pretrained`, or `random`: the same network with weights of its own.
        lr: Learning rate of AdamW, falling linearly to zero.
        seed: Decides the new weights, the order of the data and dropout.
        train: What is trained on.
        test: What is tested on.

    Returns:
        `accuracy` on what is tested, and the `losses` of the steps.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(bert)
    if start == "pretrained":
        model = AutoModelForSequenceClassification.from_pretrained(bert, num_labels=2)
    else:
        config = AutoConfig.from_pretrained(bert, num_labels=2)
        model = AutoModelForSequenceClassification.from_config(config)

    def encode(texts: list[str]) -> dict[str, torch.Tensor]:
        return tokenizer(texts, truncation=True, max_length=LENGTH, padding="max_length", return_tensors="pt")

    inputs, labels = encode(train.texts), torch.tensor(train.labels)
    steps = EPOCHS * (len(labels) // BATCH_SIZE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 1.0 / steps, steps)
    losses = []
    model.train()
    for _ in range(EPOCHS):
        order = torch.randperm(len(labels))
        for rows in order[: len(order) // BATCH_SIZE * BATCH_SIZE].split(BATCH_SIZE):
            scores = model(**{key: value[rows] for key, value in inputs.items()}).logits
            loss = functional.cross_entropy(scores, labels[rows])
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    model.eval()
    tested, right = encode(test.texts), 0
    with torch.inference_mode():
        for first in range(0, len(test.labels), 256):
            scores = model(**{key: value[first : first + 256] for key, value in tested.items()}).logits
            right += int((scores.argmax(-1) == torch.tensor(test.labels[first : first + 256])).sum())
    return {"accuracy": right / len(test.labels), "losses": [round(loss, 4) for loss in losses]}


def pretrain(folder: Path, overrides: Sequence[str]) -> Path:
    """Pretrain bert-tiny and export it, with the commands that users run.

    Args:
        folder: Where the run goes.
        overrides: Keys of the recipe.

    Returns:
        The exported folder.
    """
    run, out = folder / "run", folder / "bert"
    train = ["train", "bert-tiny", "optimizer=thor-spectral", *overrides, "--out", str(run)]
    for words in (train, ["export", str(run), "--format", "transformers", "--out", str(out)]):
        subprocess.run([sys.executable, "-m", "torch_thor", *words], check=True)
    return out


def text_of(runs: Sequence[dict[str, Any]]) -> str:
    """Write the table.

    Args:
        runs: Results with `start`, `lr`, `seed` and `accuracy`.

    Returns:
        Markdown.
    """
    rows = []
    for start in STARTS:
        for lr in sorted({run["lr"] for run in runs}):
            own = [run["accuracy"] for run in runs if (run["start"], run["lr"]) == (start, lr)]
            rows.append([start, f"{lr:g}", f"{statistics.fmean(own):.3f}", each(own, ".3f")])
    return table(["weights to begin with", "lr", "accuracy, mean", "of each seed"], rows)


def main() -> None:
    """Pretrain where no network is given, fine-tune, print the table and write the raw numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bert", type=Path, help="an exported network (default: pretrain one)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="keys of the recipe of the pretraining")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        bert = options.bert or pretrain(Path(folder), options.overrides)
        train, test = read_task(Path(sysconfig.get_path("stdlib")))
        runs = []
        for seed in range(options.seeds):
            for lr in LRS:
                for start in STARTS:
                    began = time.monotonic()
                    found = fine_tune(bert, start, lr, seed, train, test)
                    runs.append({"start": start, "lr": lr, "seed": seed, **found, "seconds": time.monotonic() - began})
                    print(f"{start}, lr {lr:g}, seed {seed}: {found['accuracy']:.3f}", flush=True)
    print(f"{len(train.labels)} sentences to train on, {len(test.labels)} to test on")
    print(text_of(runs))
    settings = {"overrides": options.overrides, "length": LENGTH, "epochs": EPOCHS, "batch_size": BATCH_SIZE}
    sizes = {"train": len(train.labels), "test": len(test.labels)}
    write_json(options.out, {"machine": describe(), "settings": settings, "sizes": sizes, "runs": runs})


if __name__ == "__main__":
    main()
