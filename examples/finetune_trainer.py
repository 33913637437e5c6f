"""Fine-tune with the Trainer of Hugging Face, all weights or adapters (``--lora``).

An optimizer that reads the inputs of layers is given to the Trainer as an object, with a callback
that tells it loss terms and padding. ``learning_rate`` of the arguments is for the Trainer's own.

    pip install "transformers>=5" accelerate peft
    python examples/finetune_trainer.py --lora --optimizer adamw thor-muon

Model: from the Hugging Face hub, or a folder with ``--model``. Data: a folder with train.tsv and
dev.tsv (sentence, tab, label), such as the 6,920 sentences that the error names.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

from torch_thor import THOR, ThorMuon
from torch_thor.trainers.hugging_face import CurvatureCallback

HUB = "https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2"
URL = "https://raw.githubusercontent.com/clairett/pytorch-sentiment-classification/master/data/SST2"


def make_optimizer(name: str, model: torch.nn.Module) -> torch.optim.Optimizer | None:
    """Return what trains the model; the Trainer makes AdamW itself where it is None."""
    if name == "thor-muon":
        return ThorMuon(model, weight_decay=0.01)  # the one line; it finds its rates itself
    if name == "thor":
        return THOR(model, lr=0.005, max_update_ratio=0.001, update_interval=20, weight_decay=0.01)
    return None


def read(file: Path, tokenizer: Any) -> list[dict[str, Any]]:
    """Return tokens and labels of the lines of a file."""
    if not file.exists():
        raise SystemExit(f"no {file}: save {URL}/{file.name} there")
    rows = [line.rsplit("\t", 1) for line in file.read_text(encoding="utf-8").splitlines()]
    rows = rows[rows[0][1] == "label" :]  # without the heads of GLUE's files
    return [
        {**tokenizer(sentence, truncation=True, max_length=64), "labels": int(label)}
        for sentence, label in rows
    ]


def accuracy(found: Any) -> dict[str, float]:
    """Return the accuracy of the predictions of the Trainer."""
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}


def train(name: str, args: argparse.Namespace) -> dict[str, float]:
    """Fine-tune with an optimizer, and return what the Trainer finds on dev.tsv."""
    torch.manual_seed(args.seed)
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        model = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=2)
    except OSError as error:
        why = str(error).partition("\n")[0]
        said = f"no model {args.model}: give a folder with --model, such as {HUB} ({why})"
        raise SystemExit(said) from None
    train, dev = (read(args.data / f"{part}.tsv", tokenizer) for part in ("train", "dev"))
    if args.lora:  # before the optimizer is made, which trains what is trainable then
        lora = peft.LoraConfig("SEQ_CLS", r=8, lora_alpha=16, target_modules=["query", "value"])
        model = peft.get_peft_model(model, lora)
        model.print_trainable_parameters()

    options: dict[str, Any] = {}
    if name == "adamw":  # the best for MiniLM
        options["learning_rate"] = 5e-3 if args.lora else 2e-4
    arguments = TrainingArguments(
        args.out / name,
        num_train_epochs=args.epochs,
        max_steps=args.steps,
        per_device_train_batch_size=args.batch,
        per_device_eval_batch_size=64,
        warmup_steps=0.1,  # of all steps
        weight_decay=0.01,
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=20,
        report_to=[],
        seed=args.seed,
        **options,
    )
    optimizer = make_optimizer(name, model)
    trainer = Trainer(
        model,
        arguments,
        train_dataset=train,
        eval_dataset=dev,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=accuracy,
        optimizers=(optimizer, None),
        callbacks=[CurvatureCallback()] if optimizer else [],
    )
    trainer.train()
    trainer.save_model()
    return trainer.evaluate()


def main(words: Sequence[str] | None = None) -> dict[str, dict[str, float]]:
    """Fine-tune with each optimizer in turn, and return what the Trainer finds."""
    parser = argparse.ArgumentParser(description="fine-tune with the Trainer of Hugging Face")
    add, known = parser.add_argument, ["adamw", "thor-muon", "thor"]
    add("--optimizer", nargs="+", default=["adamw", "thor-muon"], choices=known)
    add("--model", default="sentence-transformers/all-MiniLM-L6-v2", help="name or folder")
    add("--data", type=Path, default=Path("corpora/sst2"), help="folder")
    add("--lora", action="store_true", help="train only adapters of rank 8 and the head")
    add("--epochs", type=float, default=1.0)
    add("--steps", type=int, default=-1, help="stop after so many")
    add("--batch", type=int, default=32)
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=Path("runs/finetune_trainer"), help="folder for the models")
    args = parser.parse_args(words)

    print(f"fine-tunes {args.model}: {args.epochs:g} epochs, batches of {args.batch} sentences")
    results = {name: train(name, args) for name in args.optimizer}
    for name, found in results.items():
        accuracy, loss = found["eval_accuracy"], found["eval_loss"]
        print(f"{name:10} dev accuracy {accuracy:.4f}, loss {loss:.4f}")
    return results


if __name__ == "__main__":
    main()
