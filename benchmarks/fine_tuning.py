"""Effect of pretraining: fine-tunes an exported network and a network with random weights on a small task.

    python benchmarks/fine_tuning.py                  # pretrains first: the recipe bert-tiny with ThorMuon
    python benchmarks/fine_tuning.py KEY=VALUE ...    # the same with other keys of the recipe
    python benchmarks/fine_tuning.py --bert exported  # a folder of torch-thor export RUN --format transformers

The task is to choose the preposition that is missing in a sentence, one of ten. The sentences are those of docstrings
of Python's standard library, which comes with Python, so nothing is downloaded. Whole modules are held out. The
networks, the data, their order and the number of steps are the same; only the initial weights differ.
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
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from torch_thor.bench import describe, write_json
from torch_thor.bench.markdown import each, table
from torch_thor.training.text.documents import paragraphs_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OUT = Path(__file__).parent / "results" / "fine_tuning.json"
PREPOSITIONS = ("of", "to", "in", "for", "with", "on", "by", "from", "as", "at")
HELD_OUT = 0.3  # share of the modules
WORDS = range(6, 25)  # number of words in a sentence
EXAMPLES, TESTED = 1000, 1500  # sentences to train on and to test on, at most
LENGTH, BATCH_SIZE, EPOCHS, LRS = 64, 32, 5, (5e-4, 2e-3)
STARTS = ("pretrained", "random")
LEFT_OUT = {"test", "tests", "site-packages", "dist-packages", "lib2to3", "idlelib"}  # folders of the library
IGNORED = -100  # the label of a token that is no gap, as the losses of torch have it


@dataclass(frozen=True)
class Gap:
    """A sentence in which a preposition is missing.

    Args:
        before: The words before it.
        after: The words after it.
        label: Its number in ``PREPOSITIONS``.
    """

    before: str
    after: str
    label: int


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


def read_task(library: Path) -> tuple[list[Gap], list[Gap]]:
    """Read the task.

    Args:
        library: The folder of the standard library. Its tests and installed packages are left out.

    Returns:
        What is trained on, and what is tested on. No sentence is in both, and both are drawn from all of their modules.
    """
    from sentencex import segment

    sides: tuple[dict[str, None], dict[str, None]] = ({}, {})  # in order, each sentence once
    for file in sorted(library.rglob("*.py")):
        path = file.relative_to(library)
        if LEFT_OUT & set(path.parts):
            continue
        digest = hashlib.blake2b(path.as_posix().encode(), digest_size=8).digest()
        side = sides[int.from_bytes(digest, "big") < HELD_OUT * 2**64]
        for paragraph in docstrings(file):
            side.update(dict.fromkeys(sentence.strip() for sentence in segment("en", paragraph)))
    held_out = (sentence for sentence in sides[1] if sentence not in sides[0])
    return draw(sides[0], EXAMPLES), draw(held_out, TESTED)


def draw(sentences: Iterable[str], number: int) -> list[Gap]:
    """Remove a preposition from each of some sentences.

    Args:
        sentences: Those without a preposition, or with another number of words than ``WORDS``, are left out.
        number: How many sentences are drawn, at most.

    Returns:
        The sentences in a drawn order, which they alone determine.
    """
    found = []
    for sentence in sentences:
        words = sentence.split()
        places = [place for place, word in enumerate(words) if word in PREPOSITIONS]
        if places and len(words) in WORDS:
            place = random.Random(sentence).choice(places)
            label = PREPOSITIONS.index(words[place])
            found.append(Gap(" ".join(words[:place]), " ".join(words[place + 1 :]), label))
    random.Random(0).shuffle(found)
    return found[:number]


def encode(tokenizer: "PreTrainedTokenizerBase", gaps: Sequence[Gap]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Encode sentences, with a mask token in the place of the missing preposition.

    Args:
        tokenizer: The tokenizer of the exported network.
        gaps: The sentences.

    Returns:
        The inputs of the network, and a label for each token: the number of the preposition at the mask token, and
        ``IGNORED`` elsewhere. A sentence whose mask token lies behind the longest input has no label.
    """
    texts = [f"{gap.before} {tokenizer.mask_token} {gap.after}" for gap in gaps]
    inputs = tokenizer(texts, truncation=True, max_length=LENGTH, padding="max_length", return_tensors="pt")
    numbers = torch.tensor([gap.label for gap in gaps])[:, None]
    return dict(inputs), torch.where(inputs["input_ids"] == tokenizer.mask_token_id, numbers, IGNORED)


def fine_tune(
    bert: Path, start: str, lr: float, seed: int, train: Sequence[Gap], test: Sequence[Gap]
) -> dict[str, Any]:
    """Fine-tune a network that classifies tokens.

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
    from transformers import AutoConfig, AutoModelForTokenClassification, AutoTokenizer

    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(bert)
    if start == "pretrained":
        model = AutoModelForTokenClassification.from_pretrained(bert, num_labels=len(PREPOSITIONS))
    else:
        config = AutoConfig.from_pretrained(bert, num_labels=len(PREPOSITIONS))
        model = AutoModelForTokenClassification.from_config(config)

    inputs, labels = encode(tokenizer, train)
    steps = EPOCHS * (len(labels) // BATCH_SIZE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 1.0 / steps, steps)
    losses = []
    model.train()
    for _ in range(EPOCHS):
        order = torch.randperm(len(labels))
        for rows in order[: len(order) // BATCH_SIZE * BATCH_SIZE].split(BATCH_SIZE):
            scores = model(**{key: value[rows] for key, value in inputs.items()}).logits
            loss = functional.cross_entropy(scores.flatten(0, 1), labels[rows].flatten(), ignore_index=IGNORED)
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    model.eval()
    (tested, labels), right = encode(tokenizer, test), 0
    with torch.inference_mode():
        for rows in torch.arange(len(test)).split(256):
            scores = model(**{key: value[rows] for key, value in tested.items()}).logits
            right += int((scores.argmax(-1) == labels[rows]).sum())
    return {"accuracy": right / len(test), "losses": [round(loss, 4) for loss in losses]}


def pretrain(folder: Path, overrides: Sequence[str]) -> Path:
    """Pretrain bert-tiny and export it, with the commands that users run.

    Args:
        folder: Where the run goes.
        overrides: Keys of the recipe.

    Returns:
        The exported folder.
    """
    run, out = folder / "run", folder / "bert"
    train = ["train", "bert-tiny", "optimizer=thor-muon", *overrides, "--out", str(run)]
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
    most = Counter(gap.label for gap in test).most_common(1)[0][1] / len(test)
    print(
        f"{len(train)} sentences to train on, {len(test)} to test on; always the most frequent preposition: {most:.3f}"
    )
    print(text_of(runs))
    settings = {"overrides": options.overrides, "length": LENGTH, "epochs": EPOCHS, "batch_size": BATCH_SIZE}
    sizes = {"train": len(train), "test": len(test), "most_frequent": most}
    write_json(options.out, {"machine": describe(), "settings": settings, "sizes": sizes, "runs": runs})


if __name__ == "__main__":
    main()
