"""A training of bert-tiny that takes seconds, for the tests of figures."""

from torch_thor.bench.figures import bert

RECIPE = """
task: masked-lm
model: bert-tiny
data: {name: python-text, text: {length: 128, vocab_size: 300}}
steps: 4
batch_size: 2
eval_interval: 2
threads: 1
optimizers: {thor: {lr: 0.1}, thor-muon: {lr: 0.05}, lamb: {lr: 0.001}}
"""


def use_small_recipe(folder, monkeypatch):
    """Let the figure train this recipe, with its text in the folder."""
    (folder / "small.yaml").write_text(RECIPE)
    monkeypatch.setattr(bert, "RECIPE", str(folder / "small.yaml"))
    monkeypatch.setenv("HOME", str(folder))  # where prepared text is kept
