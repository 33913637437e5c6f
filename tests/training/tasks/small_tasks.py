"""A task that holds nothing of images: mappings of padded rows, a mean over the rows that count."""

import torch
from torch import nn
from torch.nn import functional

from torch_thor.training import Loss, Metric, Terms
from torch_thor.training.data import EvaluationOrder, MemoryLoader, Streams, TrainingOrder, TrainingStream

SAMPLES, LENGTH, WIDTH, CLASSES = 12, 5, 4, 3


class PaddedRows:
    """Sequences of rows with labels; every sequence has another number of rows that count, some none."""

    unit = "rows"
    device = torch.device("cpu")

    def __init__(self, config):
        self.config = config
        generator = torch.Generator().manual_seed(4)
        rows = torch.randn(SAMPLES, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
        labels = torch.randint(CLASSES, (SAMPLES, LENGTH), generator=generator)
        counts = torch.arange(SAMPLES) % (LENGTH + 1)
        self.data = {"rows": rows, "truth": (labels, torch.arange(LENGTH) < counts[:, None])}
        self.seen = []  # the mask that the optimizer had in each forward pass

    def build_model(self):
        return nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, CLASSES)).double()

    def open_data(self, shard):
        order = TrainingOrder(SAMPLES, self.config.batch_size, self.config.seed, shard)
        evaluation = EvaluationOrder(SAMPLES, 5, shard)
        return Streams(TrainingStream(MemoryLoader(self.data, order), order), MemoryLoader(self.data, evaluation))

    def terms(self, batch):
        mask = batch["truth"][1]
        return Terms(int(mask.sum()), mask)

    def loss(self, model, batch):
        scores = model(batch["rows"])
        return Loss(self._sum(scores, batch) / max(1, self.terms(batch).number), scores, dim=-1)

    def measure(self, model, batch):
        return {"loss": self._sum(model(batch["rows"]), batch)}

    def metrics(self):
        return (
            Metric("loss", "loss", "held-out loss", higher_is_better=False, primary=True),
            Metric("double", "twice the loss", "double", False, derived=lambda means: 2 * means["loss"]),
        )

    def _sum(self, scores, batch):
        labels, mask = batch["truth"]
        each = functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="none")
        return (each * mask.flatten()).sum()
