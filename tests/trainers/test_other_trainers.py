"""The loops of Lightning and of the Hugging Face Trainer: with a closure, with accumulation,
stopped and resumed.
"""

import lightning
import pytest
import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader

from test_hugging_face import gpt2
from tiny import assert_same, batches, cross_entropy, mlp, train, weights
from torch_thor import AGCSGD, LAMB, THOR, ThorMuon, param_groups

OPTIONS = {"update_interval": 3, "trace_thresholds": (0.0, 0.0)}


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = mlp(dtype=torch.float32)

    def training_step(self, batch, _):
        x, labels = batch
        return cross_entropy(labels)(self.net(x))

    def configure_optimizers(self):
        return THOR(self.net, **OPTIONS)


@pytest.mark.filterwarnings("ignore")  # Lightning's own, about workers and loggers
def test_lightning_steps_as_the_plain_loop_and_resumes(tmp_path):
    """It hands `step` a closure that zeroes the gradients between forward and backward.

    One batch over and over: where a resumed epoch begins in the data is Lightning's affair.
    """
    [(x, labels)] = batches(1, dtype=torch.float32)

    def fit(steps, **options):
        trainer = lightning.Trainer(
            max_steps=steps, max_epochs=-1, accelerator="cpu", logger=False,
            enable_progress_bar=False,
            enable_model_summary=False, enable_checkpointing=False, accumulate_grad_batches=2,
            default_root_dir=tmp_path,
        )  # fmt: skip
        module = Module()
        trainer.fit(
            module, DataLoader([(x, labels)] * 4, batch_size=None, shuffle=False), **options
        )
        return module, trainer

    whole, plain = fit(10)[0], Module()
    optimizer = plain.configure_optimizers()
    for _ in range(10):
        for _ in range(2):
            (cross_entropy(labels)(plain.net(x)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(weights(whole), weights(plain))
    fit(5)[1].save_checkpoint(tmp_path / "five.ckpt")
    resumed, _ = fit(10, ckpt_path=tmp_path / "five.ckpt", weights_only=True)
    assert_same(weights(resumed), weights(whole))


def test_the_trainer_accumulates_and_resumes(tmp_path):
    """Bit for bit, between two refreshes; what its N is stands in the checkpoint."""
    tokens = torch.randint(3, 19, (16, 6), generator=torch.Generator().manual_seed(1))
    sentences = [{"input_ids": one, "labels": one} for one in tokens]

    def fit(folder, **options):
        torch.manual_seed(0)
        model = gpt2()
        optimizer = THOR(model, **OPTIONS)
        arguments = transformers.TrainingArguments(
            str(tmp_path / folder), per_device_train_batch_size=2, gradient_accumulation_steps=2,
            max_steps=8,
            save_steps=4, report_to=[], use_cpu=True, disable_tqdm=True, logging_strategy="no",
        )  # fmt: skip
        constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        trainer = transformers.Trainer(
            model, arguments, train_dataset=sentences, optimizers=(optimizer, constant)
        )
        trainer.train(**options)
        return model, optimizer

    whole, optimizer = fit("whole")
    assert {layer.refreshes for layer in optimizer.curvature.values()} == {3}
    assert optimizer.param_groups[0]["last_loss_terms"] == 4
    resumed, _ = fit("other", resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert_same(weights(resumed), weights(whole))


class Loss(nn.Module):
    """What torchrl's loss modules are: they hide parameters, with methods of fewer arguments; names
    are dotted.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.target_net, self.held = mlp(), mlp(), nn.Module()
        self.held._parameters["module.0.scale"] = nn.Parameter(torch.ones((), dtype=torch.float64))

    def named_parameters(self, prefix="", recurse=True):
        for name, parameter in super().named_parameters(prefix=prefix, recurse=recurse):
            if not name.startswith("target_"):
                yield name, parameter

    def parameters(self, recurse=True):
        for _, parameter in self.named_parameters(recurse=recurse):
            yield parameter

    def forward(self, x):
        return self.held._parameters["module.0.scale"] * self.net(x)


class Open(Loss):
    """The same with PyTorch's methods."""

    named_parameters = nn.Module.named_parameters
    parameters = nn.Module.parameters


def test_modules_that_override_the_lists_of_their_parameters():
    for make in (
        lambda model: THOR(
            param_groups(model, no_decay="*.0", weight_decay=0.1), model=model, **OPTIONS
        ),
        lambda model: ThorMuon(param_groups(model, no_decay="*.0", weight_decay=0.1), model=model),
        lambda model: AGCSGD(model, lr=0.1, exclude="*.0.*"),
        lambda model: LAMB(model, lr=0.1, exclude="*.0.*"),
    ):
        model, plain = Loss(), Open()
        plain.target_net.requires_grad_(False)
        for one in (model, plain):
            optimizer = make(one)
            train(one, optimizer, batches(4))
            optimizer.state_dict()
        assert_same(model.state_dict(), plain.state_dict(), type(optimizer).__name__)
        assert not torch.equal(
            model.held._parameters["module.0.scale"], torch.ones((), dtype=torch.float64)
        )
