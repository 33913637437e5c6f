"""What each process of `torchrun` does in the tests of several: every rank writes what it found into RESULTS."""

import json
import sys
from pathlib import Path

import torch
from torch import nn

from torch_thor import THOR
from torch_thor.training import ElsewhereError, Run, RunConfig, UserError, evaluate, train
from torch_thor.training.data import DataBundle, EvaluationOrder, MemoryLoader
from torch_thor.training.engine import parallel
from torch_thor.training.tasks import ImageClassification

CPU = torch.device("cpu")
EVALUATIONS = ((10, 1), (3, 1), (50, 4), (1, 8))  # images, batch of a process


def evaluated(images, batch_size):
    """Score of fixed outputs for so many images, shared by all ranks."""
    generator = torch.Generator().manual_seed(5)
    scores = torch.randn(images, 7, generator=generator)
    labels = torch.randint(7, (images,), generator=generator)
    loader = MemoryLoader((scores, labels), EvaluationOrder(images, batch_size, parallel.shard()))
    sizes = [len(labels) for _, labels in loader]
    task = ImageClassification(DataBundle(scores, labels, scores, labels, 7), RunConfig())
    return {**evaluate(task, nn.Identity(), loader).metrics, "sizes": sizes}


def trained(*, norm=False, thor=False, accumulation=1):
    """Losses, evaluations and final weights of a training in float64."""
    generator = torch.Generator().manual_seed(5)
    images = torch.randn(48, 6, generator=generator, dtype=torch.float64)
    labels = torch.randint(3, (48,), generator=generator)
    data = DataBundle(images[:32], labels[:32], images[32:], labels[32:], 3)
    torch.manual_seed(1)
    middle = nn.BatchNorm1d(8) if norm else nn.LayerNorm(8)
    model = nn.Sequential(nn.Linear(6, 8), middle, nn.Tanh(), nn.Linear(8, 3)).double()
    if thor:
        optimizer = THOR(model, lr=0.01, damping=0.1, update_interval=3, factor_decay=0.5, split_dim=4)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    config = RunConfig(epochs=3, batch_size=8, eval_interval=5, accumulation=accumulation)
    run = Run(model, optimizer, ImageClassification(data, config), config)
    record = train(run)
    with torch.no_grad():
        own = nn.functional.cross_entropy(model.eval()(images[32:]), labels[32:]).item()
    return {
        "losses": [point.loss for point in record.steps],
        "images": [point.terms for point in record.steps],
        "evaluations": [point.loss for point in record.evaluations],
        "own": own,
        "weights": [parameter.tolist() for parameter in model.parameters()],
    }


def refused(*failing):
    """What a rank hears where some fail: the kind of error, and its words."""
    rank = parallel.shard().rank
    try:
        with parallel.agreed():
            if rank in failing:
                raise UserError(f"rank {rank} cannot")
    except UserError as error:
        return [type(error) is ElsewhereError, str(error)]
    return None


def main():
    """Run everything and write it down."""
    with parallel.processes(CPU):
        shard = parallel.shard()
        found = {
            "shard": [shard.rank, shard.world_size, parallel.is_first(), parallel.local_processes()],
            "evaluated": [evaluated(images, batch) for images, batch in EVALUATIONS],
            "total": parallel.total([0.1 * (shard.rank + 1), 2.0**53], CPU),
            "gathered": parallel.gathered({"rank": shard.rank}),
            "refused": [refused(), refused(1), refused(0, 1), refused(shard.world_size - 1)],
            "sgd": trained(),
            "sgd, parts": trained(accumulation=3),
            "thor": trained(thor=True),
            "thor, parts": trained(thor=True, accumulation=3),
            "norm": trained(norm=True),
        }
    Path(sys.argv[1], f"{shard.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
