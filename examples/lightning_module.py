"""A LightningModule that is trained by ThorMuon: ``configure_optimizers`` is all that changes.

A small convolutional network reads handwritten digits of 8 x 8 pixels.

    pip install lightning scikit-learn
    python examples/lightning_module.py --optimizer adamw thor-muon

Data: 1,797 digits, which are part of scikit-learn.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

from torch_thor import THOR, ThorMuon


class Classifier(lightning.LightningModule):
    """Three layers, and how they are trained in so many steps."""

    def __init__(self, optimizer: str, width: int, steps: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2 * width * 4 * 4, 10),
        )

    def configure_optimizers(self) -> Any:
        """Return what trains the model, with a rate that falls to 0."""
        optimizer: torch.optim.Optimizer
        if self.hparams["optimizer"] == "thor-muon":
            optimizer = ThorMuon(self, weight_decay=0.01)  # the one line; no rate to tune
        elif self.hparams["optimizer"] == "thor":
            optimizer = THOR(self, lr=0.05, update_interval=10)
        else:
            optimizer = torch.optim.AdamW(self.parameters(), lr=4e-3, weight_decay=0.01)
        steps = self.hparams["steps"]
        decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
        return [optimizer], [{"scheduler": decay, "interval": "step"}]

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """Return the loss of a batch."""
        x, y = batch
        loss = F.cross_entropy(self.network(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        """Log loss and accuracy."""
        x, y = batch
        logits = self.network(x)
        self.log("val_loss", F.cross_entropy(logits, y))
        self.log("val_accuracy", (logits.argmax(1) == y).float().mean(), prog_bar=True)


def train(name: str, args: argparse.Namespace) -> dict[str, float]:
    """Train with an optimizer, and return loss and accuracy on the held-out fifth."""
    lightning.seed_everything(args.seed)
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    digits = TensorDataset(x, torch.tensor(labels))
    first, held_out = random_split(digits, [0.8, 0.2])
    loader = DataLoader(first, args.batch, shuffle=True, drop_last=True)
    model = Classifier(name, args.width, args.epochs * len(loader))
    trainer = lightning.Trainer(
        max_epochs=args.epochs, logger=False, enable_checkpointing=False, log_every_n_steps=1
    )
    trainer.fit(model, loader, DataLoader(held_out, 512))
    if args.out:  # weights and the optimizer's state: Classifier.load_from_checkpoint reads them
        trainer.save_checkpoint(args.out / f"{name}.ckpt")
    return {key: float(value) for key, value in trainer.callback_metrics.items()}


def main(words: Sequence[str] | None = None) -> dict[str, dict[str, float]]:
    """Train with each optimizer in turn, and return what Lightning has measured."""
    parser = argparse.ArgumentParser(description="a LightningModule trained by ThorMuon")
    add, known = parser.add_argument, ["adamw", "thor-muon", "thor"]
    add("--optimizer", nargs="+", default=["adamw", "thor-muon"], choices=known)
    add("--width", type=int, default=32)
    add("--epochs", type=int, default=10)
    add("--batch", type=int, default=64)
    add("--seed", type=int, default=0)
    add("--out", type=Path, help="folder for the checkpoints")
    args = parser.parse_args(words)

    print(f"a network reads handwritten digits: {args.epochs} epochs, batches of {args.batch}")
    results = {name: train(name, args) for name in args.optimizer}
    for name, found in results.items():
        values = (f"{key} {value:.4f}" for key, value in found.items())
        print(f"{name:10} {', '.join(values)}")
    return results


if __name__ == "__main__":
    main()
