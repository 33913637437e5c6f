"""Effect of pretraining: fine-tunes an exported network and a network with random weights on a small task.

    python benchmarks/fine_tuning.py                       # pretrains bert-tiny first (recipe bert-tiny, THOR)
    python benchmarks/fine_tuning.py --bert exported       # a folder of torch-thor export RUN --format transformers

The task is to name which of eight packages of Python's standard library a paragraph of a docstring is from. All text
comes with Python, so nothing is downloaded. None of it is in the text that bert-tiny is pretrained on (the language
reference). Whole modules are held out. The networks, the data, their order and the number of steps are the same; only
the initial weights differ.
"""

import argparse
import ast
import hashlib
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from torch_thor.bench import describe, write_json
from torch_thor.bench.markdown import each, table
from torch_thor.training.text.text_files import paragraphs_of

OUT = Path(__file__).parent / "results" / "fine_tuning.json"
PACKAGES = ("asyncio", "email", "http", "importlib", "multiprocessing", "unittest", "urllib", "xml")
HELD_OUT = 0.3  # share of the modules
LENGTH, BATCH_SIZE, EPOCHS, LRS = 32, 32, 8, (5e-4, 2e-3)
EXAMPLES = 75  # to train on, of each package at most
STARTS = ("pretrained", "random")


@dataclass
class Split:
    """Paragraphs and the numbers of their packages.

    Args:
        texts: Paragraphs.
        labels: Numbers of packages.
    """

    texts: list[str] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)

    def add(self, texts: Sequence[str], label: int) -> None:
        """Add paragraphs of a package.

        Args:
            texts: The paragraphs.
            label: The package's number.
        """
        self.texts.extend(texts)
        self.labels.extend([label] * len(texts))


def docstrings(file: Path) -> list[str]:
    """Read the docstrings of a module.

    Args:
        file: Python source.

    Returns:
        Their paragraphs of five words or more, each once.
    """
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(file.read_bytes())) if isinstance(node, kinds)]
    found = (paragraph for node in nodes for paragraph in paragraphs_of(ast.get_docstring(node) or ""))
    return list(dict.fromkeys(found))


def read_task(library: Path, examples: int = EXAMPLES) -> tuple[Split, Split]:
    """Read the task.

    Args:
        library: The folder of the standard library.
        examples: Paragraphs of each package to train on, at most.

    Returns:
        What is trained on, and what is tested on; no paragraph is in both.
    """
    train, test = Split(), Split()
    found: list[list[str]] = []  # of each package, what may be tested
    for label, package in enumerate(PACKAGES):
        sides: tuple[list[str], list[str]] = ([], [])
        for file in sorted((library / package).rglob("*.py")):
            digest = hashlib.blake2b(file.relative_to(library).as_posix().encode(), digest_size=8).digest()
            sides[int.from_bytes(digest, "big") < HELD_OUT * 2**64].extend(docstrings(file))
        step = max(1, len(sides[0]) // examples)  # from all of its modules
        train.add(sides[0][::step][:examples], label)
        found.append(sides[1])
    seen = set(train.texts)
    for label, texts in enumerate(found):
        test.add([text for text in texts if text not in seen], label)
    return train, test


def fine_tune(bert: Path, start: str, lr: float, seed: int, train: Split, test: Split) -> dict[str, Any]:
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
        model = AutoModelForSequenceClassification.from_pretrained(bert, num_labels=len(PACKAGES))
    else:
        config = AutoConfig.from_pretrained(bert, num_labels=len(PACKAGES))
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
    print(f"{len(train.labels)} paragraphs to train on, {len(test.labels)} to test on")
    print(text_of(runs))
    settings = {"overrides": options.overrides, "length": LENGTH, "epochs": EPOCHS, "batch_size": BATCH_SIZE}
    sizes = {"train": len(train.labels), "test": len(test.labels)}
    write_json(options.out, {"machine": describe(), "settings": settings, "sizes": sizes, "runs": runs})


if __name__ == "__main__":
    main()
