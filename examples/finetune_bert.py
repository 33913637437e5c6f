"""Fine-tune a pretrained encoder on the sentiment of sentences (SST-2), in a plain loop.

ThorMuon gets no learning rate: it sees in the weights that they are trained already, and takes
smaller steps there than in the new head. ``make_optimizers`` is where the optimizers differ.

    pip install transformers
    python examples/finetune_bert.py --optimizer adamw thor-muon

Model: from the Hugging Face hub, or a folder with ``--model``. Data: 6,920 sentences, which the
first run downloads; or ``--data FOLDER`` with train.tsv and dev.tsv (sentence, tab, label).
"""

import argparse
import time
import urllib.request
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from torch_thor import THOR, ThorMuon, follow_labels

DATA = Path("corpora/sst2")
HUB = "https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2"
URL = "https://raw.githubusercontent.com/clairett/pytorch-sentiment-classification/master/data/SST2"


def make_optimizers(name: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return what trains the model."""
    if name == "thor-muon":
        thor_muon = ThorMuon(model, weight_decay=0.01)  # the one line; it finds its rates itself
        follow_labels(thor_muon)  # padding has no part in the curvature
        return [thor_muon]
    if name == "thor":  # its default rate is for new networks
        thor = THOR(model, lr=0.005, max_update_ratio=0.001, update_interval=20)
        follow_labels(thor)
        return [thor]
    # the best of 2e-5 to 2e-4 for MiniLM (docs/how-to/fine-tuning.md); BERT's is 2e-5 to 5e-5
    lr = 2e-4
    if name == "adamw":
        return [torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)]
    inside = [p for n, p in model.named_parameters() if p.ndim == 2 and "encoder" in n]
    chosen = {id(p) for p in inside}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return [  # Muon's steps are given the size of AdamW's
        torch.optim.Muon(inside, lr=lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=lr, weight_decay=0.01),
    ]


def read(folder: Path, name: str) -> tuple[list[str], Tensor]:
    """Return sentences and labels; those of the example are downloaded where they are missing."""
    file = folder / f"{name}.tsv"
    try:
        if folder == DATA and not file.exists():
            folder.mkdir(parents=True, exist_ok=True)
            file.write_bytes(urllib.request.urlopen(f"{URL}/{name}.tsv").read())
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise SystemExit(f"no {file}: save {URL}/{name}.tsv there ({error})") from None
    rows = [line.rsplit("\t", 1) for line in lines]
    rows = rows[rows[0][1] == "label" :]  # without the heads of GLUE's files
    return [sentence for sentence, _ in rows], torch.tensor([int(label) for _, label in rows])


def load(name: str) -> tuple[Any, Any]:
    """Return tokenizer and model."""
    try:
        return (
            AutoTokenizer.from_pretrained(name),
            AutoModelForSequenceClassification.from_pretrained(name, num_labels=2),
        )
    except OSError as error:
        why = str(error).partition("\n")[0]
        raise SystemExit(
            f"no model {name}: give a folder with --model, such as {HUB} ({why})"
        ) from None


def rate(step: int, steps: int) -> float:
    """Return the schedule: up in a tenth of the steps, then down to 0."""
    return min((step + 1) / (0.1 * steps), (steps - step) / (0.9 * steps), 1.0)


def train(name: str, args: argparse.Namespace) -> float:
    """Fine-tune with an optimizer, and return the accuracy on dev.tsv."""
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer, model = load(args.model)
    model.to(device).train()
    (sentences, labels), dev = read(args.data, "train"), read(args.data, "dev")

    def encode(some: list[str]) -> Any:
        options = {"padding": True, "truncation": True, "max_length": 64, "return_tensors": "pt"}
        return tokenizer(some, **options).to(device)

    @torch.no_grad()
    def accuracy() -> float:
        model.eval()
        parts = [encode(dev[0][i : i + 64]) for i in range(0, len(dev[0]), 64)]
        found = torch.cat([model(**part).logits.argmax(1).cpu() for part in parts])
        model.train()
        return (found == dev[1]).double().mean().item()

    batches = [b for _ in range(args.epochs) for b in torch.randperm(len(labels)).split(args.batch)]
    batches = batches[: args.steps]
    optimizers = make_optimizers(name, model)
    schedulers = [LambdaLR(each, partial(rate, steps=len(batches))) for each in optimizers]
    for step, index in enumerate(batches, 1):
        x = encode([sentences[i] for i in index])
        loss = model(**x, labels=labels[index].to(device)).loss
        loss.backward()
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
        model.zero_grad()
        if step % 50 == 0 or step == len(batches):
            print(f"{name}, step {step}: loss {loss:.4f}, accuracy {accuracy():.4f}", flush=True)
    if args.out:
        model.save_pretrained(args.out / name)
        tokenizer.save_pretrained(args.out / name)
    return accuracy()


def main(words: Sequence[str] | None = None) -> dict[str, float]:
    """Fine-tune with each optimizer in turn, and return the accuracies on dev.tsv."""
    parser = argparse.ArgumentParser(description="fine-tune an encoder on SST-2")
    add, known = parser.add_argument, ["adamw", "muon", "thor-muon", "thor"]
    add("--optimizer", nargs="+", default=["adamw", "thor-muon"], choices=known)
    add("--model", default="sentence-transformers/all-MiniLM-L6-v2", help="name or folder")
    add("--data", type=Path, default=DATA, help="folder")
    add("--epochs", type=int, default=1)
    add("--steps", type=int, help="stop after so many")
    add("--batch", type=int, default=32)
    add("--seed", type=int, default=0)
    add("--out", type=Path, help="folder for the trained models")
    args = parser.parse_args(words)

    print(f"fine-tunes {args.model}: {args.epochs} epochs, batches of {args.batch} sentences")
    results = {}
    for name in args.optimizer:
        started = time.perf_counter()
        results[name] = train(name, args), time.perf_counter() - started
    for name, (accuracy, seconds) in results.items():
        print(f"{name:10} dev accuracy {accuracy:.4f} after {seconds:.0f} s")
    return {name: accuracy for name, (accuracy, _) in results.items()}


if __name__ == "__main__":
    main()
