"""Models for `torch-thor split-dim benchmarks/split_dim_models.py:FUNCTION` whose weights have been trained.

Nothing is downloaded: weights of ImageNet are not at hand, Fashion-MNIST is.
"""

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional

from torch_thor.training.data import load_data
from torch_thor.training.recipe import load_recipe

STEPS, BATCH, PIXELS = 40, 32, 64


def resnet50_fashion_mnist() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Train torchvision's ResNet-50 for 40 steps of SGD on Fashion-MNIST, enlarged to 64 x 64 in three channels.

    Returns:
        The model and the next 32 images with their labels.
    """
    data = load_data(load_recipe("fashion-mnist").data)
    model = torchvision.models.resnet50(num_classes=data.classes).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    order = torch.randperm(len(data.train_images))

    def batch(step: int) -> tuple[Tensor, Tensor]:
        chosen = order[step * BATCH : (step + 1) * BATCH]
        images = functional.interpolate(data.train_images[chosen].float(), size=PIXELS, mode="bilinear")
        return images.expand(-1, 3, -1, -1).contiguous(), data.train_labels[chosen]

    for step in range(STEPS):
        images, labels = batch(step)
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"ResNet-50 after {STEPS} steps on Fashion-MNIST: training loss {float(loss):.2f}")
    return model, batch(STEPS)
