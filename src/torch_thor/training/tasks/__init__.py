"""Tasks: a task is a network, its data, its loss and its metrics.

A new task is a new file, and a line here.
"""

from typing import NamedTuple

from torch_thor.training.models.bert import BERTS, CONFIGURATION


class TaskEntry(NamedTuple):
    """What is known of a task before its module is imported, which happens when it is used."""

    place: str  # module.Class in this package
    models: tuple[str, ...] = ()  # names of its networks, or what they end in; (): any classifier
    data_sets: tuple[str, ...] = ()  # values of data.name; (): it has data of its own
    keys: tuple[str, ...] = ()  # keys of a recipe that not all tasks use
    has_accuracy: bool = False  # whether its primary metric is a fraction


TASKS = {
    "image-classification": TaskEntry(
        "images.ImageClassification",
        data_sets=("digits", "fashion-mnist", "cifar10", "cifar100", "image-folder"),
        keys=("classes", "label_smoothing"),
        has_accuracy=True,
    ),
    "autoencoder": TaskEntry(
        "autoencoder.Autoencoder",
        models=("deep-autoencoder",),
        data_sets=("digits", "fashion-mnist"),
    ),
    "char-lm": TaskEntry("char_lm.CharLM", models=("char-transformer",)),
    "masked-lm": TaskEntry(
        "masked_lm.MaskedLM",
        models=(*BERTS, CONFIGURATION),
        data_sets=("python-text", "corpus"),
        keys=("phases", "activation_checkpointing"),
        has_accuracy=True,
    ),
}
