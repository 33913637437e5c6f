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
WORDS = {
    "build/word_language_model/model.py": """
import torch
from torch import nn

class RNNModel(nn.Module):
    def __init__(self, rnn_type, ntoken, ninp, nhid, nlayers, dropout):
        super().__init__()
        self.encoder, self.drop = nn.Embedding(ntoken, ninp), nn.Dropout(dropout)
        self.rnn = getattr(nn, rnn_type)(ninp, nhid, nlayers, dropout=dropout)
        self.decoder = nn.Linear(nhid, ntoken)
        self.shape = nlayers, nhid

    def forward(self, input, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(input)), hidden)
        return self.decoder(output).flatten(0, 1).log_softmax(dim=1), hidden

    def init_hidden(self, bsz):
        return (torch.zeros(self.shape[0], bsz, self.shape[1]),) * 2

class TransformerModel(nn.Module):
    def __init__(self, ntoken, ninp, nhead, nhid, nlayers, dropout):
        super().__init__()
        self.input_emb, self.decoder = nn.Embedding(ntoken, ninp), nn.Linear(ninp, ntoken)

    def forward(self, src):
        return self.decoder(torch.relu(self.input_emb(src))).log_softmax(dim=-1)
""",
    "build/word_language_model/data.py": """
import torch

class Corpus(object):
    def __init__(self, path):
        self.dictionary = {}
        for name in ("train", "valid", "test"):
            words = open(path + f"/{name}.txt").read().split()
            numbers = [self.dictionary.setdefault(w, len(self.dictionary)) for w in words]
            setattr(self, name, torch.tensor(numbers))
""",
    "build/word_language_model/data/wikitext-2/train.txt": "to be or not to be . " * 10,
    "build/word_language_model/data/wikitext-2/valid.txt": "to be or not to be . " * 4,
    "build/word_language_model/data/wikitext-2/test.txt": "be . ",
}


def write(texts):
    """Write files, in the present folder."""
    for file, text in texts.items():
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text(text)
