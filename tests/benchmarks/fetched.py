"""Files of others that studies read from build/, as small as they can be."""

from pathlib import Path

NANOGPT = {
    "build/nanogpt/model.py": """
import torch
from dataclasses import make_dataclass
from torch import nn
from torch.nn import functional as F

NAMES = ("vocab_size", "n_layer", "n_head", "n_embd", "block_size", "bias", "dropout")
GPTConfig = make_dataclass("GPTConfig", NAMES)

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        print("what is said is not shown")
        self.table = nn.Embedding(config.vocab_size, config.n_embd)
        self.inside = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def forward(self, x, y):
        logits = self.head(torch.relu(self.inside(self.table(x))))
        return logits, F.cross_entropy(logits.flatten(0, 1), y.flatten())

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        options = {"lr": learning_rate, "betas": betas, "weight_decay": weight_decay}
        return torch.optim.AdamW(self.parameters(), **options)
""",
    "build/nanogpt/train_shakespeare_char.py": """
learning_rate, min_lr, beta2, warmup_iters, lr_decay_iters = 1e-2, 1e-3, 0.99, 2, 12
n_layer, n_head, n_embd, block_size, batch_size, dropout = 1, 1, 8, 8, 4, 0.0
max_iters, eval_interval, eval_iters = 12, 5, 2
""",
    "build/shakespeare/input.txt": "to be or not to be. " * 20,
}
AIRBENCH = """
import sys
import torch
from math import ceil
from torch import nn
from torch.nn import functional as F

own = open(sys.argv[0]).read()

class Muon(torch.optim.SGD):
    def __init__(self, params, lr, momentum, nesterov):
        super().__init__(params, lr=lr)

class CifarNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.whiten, self.norm = nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4)
        self.conv, self.head = nn.Conv2d(4, 4, 2, bias=False), nn.Linear(4, 10, bias=False)
        self.whiten.weight.requires_grad = self.norm.weight.requires_grad = False

    def forward(self, x):
        return self.head(self.conv(self.norm(self.whiten(x))).mean((2, 3)))

def print_training_details(variables, is_final_entry):
    raise AssertionError("replaced")

def main(run, model):
    data = torch.load("cifar10" + "/train.pt", map_location=torch.device("cuda"))
    images, labels = (data["images"] / 255).permute(0, 3, 1, 2), data["labels"]
    rest = [model.norm.bias, model.head.weight]
    first = torch.optim.SGD([{"params": [model.whiten.bias]}, {"params": rest}], lr=0.1)
    second = Muon([model.conv.weight], lr=0.1, momentum=0.6, nesterov=True)
    steps, bias_steps = ceil(8 * 2), ceil(3 * 2)
    for layer in model.children():
        layer.reset_parameters()
    for step in range(steps):
        first.param_groups[0]["lr"] = 0.1 * (1 - step / bias_steps)
        F.cross_entropy(model(images), labels).backward()
        first.step()
        second.step()
        model.zero_grad()
        if step % 2:
            train_acc = val_acc = (model(images).argmax(1) == labels).float().mean().item()
            time_seconds = 0.1 * step
            print_training_details(locals(), is_final_entry=False)
    print_training_details({}, is_final_entry=True)
    return val_acc
"""


def write(texts):
    """Write files, in the present folder."""
    for file, text in texts.items():
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text(text)
