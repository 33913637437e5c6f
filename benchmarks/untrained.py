"""How dependent the entries of matrices are, in networks that are trained and in those that aren't.

    python -m benchmarks untrained           # runs what is missing, then the table
    python -m benchmarks untrained --table

ThorMuon without a learning rate takes a network for trained if more than a quarter of its matrices
have a dependence above 5 (torch_thor.optim.trained). Here are the networks of the suite, of timm
and of transformers as their libraries initialise them, and those of the study of fine-tuning.
"""

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn

from benchmarks.finetuning_problems import PROBLEMS as TRAINED
from benchmarks.finetuning_problems import gpt, resnet
from benchmarks.finetuning_ways import matrices
from benchmarks.runner.markdown import table as markdown
from benchmarks.suite_problems import PROBLEMS as SUITE
from torch_thor.optim.trained import DEPENDENT, dependence

TIMM = (
    "beit_base_patch16_224", "cait_xxs24_224", "convnext_atto", "densenet121", "dm_nfnet_f0",
    "efficientnet_b0", "eva02_tiny_patch14_224", "gmlp_s16_224", "hrnet_w18_small", "levit_128s",
    "maxvit_nano_rw_256", "mixer_s32_224", "mobilenetv3_small_100", "mobilevit_xxs", "nf_resnet26",
    "poolformer_s12", "regnetx_002", "resmlp_12_224", "resnet50", "swin_tiny_patch4_window7_224",
    "vgg11", "vit_tiny_patch16_224", "xcit_nano_12_p16_224",
)  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "Bert": {"num_hidden_layers": 3}, "GPT2": {"n_layer": 3}, "Mamba": {"num_hidden_layers": 3},
    "Llama": {"num_hidden_layers": 3, "hidden_size": 256, "intermediate_size": 700,
              "num_attention_heads": 4, "vocab_size": 500},
    "T5": {"num_layers": 2}, "Wav2Vec2": {"num_hidden_layers": 2},
}  # fmt: skip
INITIALIZERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "orthogonal": nn.init.orthogonal_, "identity": nn.init.eye_,
    "sparse, nine tenths": partial(nn.init.sparse_, sparsity=0.9), "uniform": nn.init.uniform_,
}  # fmt: skip
Job = dict[str, Any]
Rows = dict[str, dict[str, Any]]


def network(job: Job) -> nn.Module:
    """Return a network of a library, or of a problem."""
    source, name = job["source"], job["name"]
    if source == "timm":
        import timm

        return timm.create_model(name)
    if source == "transformers":
        config = getattr(transformers, f"{name}Config")(**SIZES[name])
        return getattr(transformers, f"{name}Model")(config)
    if source == "initializers":
        layers = [nn.Linear(64, 64) for _ in range(4)]
        for layer in layers:
            INITIALIZERS[name](layer.weight)
        return nn.Sequential(*layers)
    if source == "fine-tuning, untrained":
        return {"gpt": gpt, "resnet": resnet}[name]()
    return (SUITE if source == "suite" else TRAINED)[name].model()


def run(job: Job) -> dict[str, Any]:
    """Look at a network."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    found = [float(dependence(p.detach().double().flatten(1))) for p in matrices(network(job))]
    known = sorted(value for value in found if not math.isnan(value))
    of_known = dict.fromkeys(("least", "median", "value"))
    if known:
        of_known = {"least": known[0], "median": known[len(known) // 2], "value": known[-1]}
    above = sum(value > DEPENDENT for value in known)
    return {"matrices": len(found), "told": len(known), "above": above, **of_known}


def optimizers(job: Job) -> list[str]:
    """Name ours among those that made a network."""
    return ["ThorMuon"] if job["name"].endswith("-thor-muon") else []


def jobs(rows: Rows) -> list[Job]:
    """List the networks."""
    del rows
    # BERT's need a prepared corpus, and are those of transformers
    problems = [name for name in SUITE if name != "fine-tuning" and "bert" not in name]
    sources = {
        "trained": [name for name in TRAINED if "trec" not in name], "suite": problems,
        "timm": TIMM,
        "transformers": SIZES, "initializers": INITIALIZERS,
        "fine-tuning, untrained": ("gpt", "resnet"),
    }  # fmt: skip
    return [{"source": s, "name": name} for s, names in sources.items() for name in names]


def table(rows: Rows) -> str:
    """Return what was seen of each network."""
    heads = [
        "network",
        "matrices",
        "dependence: least",
        "median",
        "largest",
        f"above {DEPENDENT:g}",
    ]
    lines = []
    for row in rows.values():
        numbers = [row["least"], row["median"], row["value"]]
        cells = ["–" if value is None else f"{value:.1f}" for value in numbers]
        name = f"{row['job']['name']} ({row['job']['source']})"
        lines.append([name, str(row["matrices"]), *cells, str(row["above"])])
    new = [row for row in rows.values() if row["job"]["source"] != "trained"]
    usual = [row for row in new if row["job"]["name"] != "uniform"]
    count, above = (sum(row[key] for row in usual) for key in ("told", "above"))
    total = f"{len(usual)} untrained networks, {count} matrices: {above} above {DEPENDENT:g}"
    return markdown(heads, lines) + f"\n\n{total} (uniform, which has no negative entry, apart)."
