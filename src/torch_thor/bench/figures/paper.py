"""What the authors of THOR report, with its source: shown beside our figures, never as ours.

Their tasks are ResNet-50 on ImageNet and BERT-large, on 8 to 256 Ascend 910; ours are small, so no number of theirs can
be compared with one of ours. What has no source that could be read is not here: times of THOR_stop and THOR_NT apart
from THOR's, values of the F-norm, training losses, the curves of BERT.
"""

from dataclasses import dataclass

from torch_thor.bench import markdown

PAPER = "paper (Chen et al. 2021), ResNet-50 on ImageNet"
ABSTRACT = "its abstract"
GUIDE = "MindSpore's introduction to THOR, which shows the paper's figures and tables"
RELEASE = "MindSpore's documentation of its ResNet-50 with THOR: a later release, not the paper"


@dataclass(frozen=True)
class Reported:
    """One line of what they report.

    Args:
        what: Optimizer and set-up.
        minutes: Of training to the accuracy.
        top1: The accuracy.
        batch_size: Samples a step, over all devices; `None` where the source does not say.
        devices: What they trained on.
        epochs: To the accuracy; in words, because some are read off a curve.
        source: Paper, section, table or page.
    """

    what: str
    minutes: float | None
    top1: float
    batch_size: int | None
    devices: str
    epochs: str
    source: str


CURVES = (
    Reported("momentum", 117, 0.759, 256, "8 Ascend 910", "about 78, read off a curve", GUIDE),
    Reported("THOR", 66.7, 0.759, 256, "8 Ascend 910", "about 40, read off a curve", ABSTRACT),
    Reported("THOR, release", None, 0.7614, 256, "8 Ascend 910", "42", RELEASE),
    Reported("THOR, release", None, 0.7597, 256, "GPUs", "36", RELEASE),
)
BATCH_SIZES = (
    Reported("THOR", 66.7, 0.759, 256, "8 Ascend 910", "", ABSTRACT),
    Reported("THOR", 4.1, 0.759, 4096, "128 Ascend 910", "", GUIDE),
    Reported("THOR", 2.7, 0.759, 8192, "256 Ascend 910", "", ABSTRACT),
)
BERT_TASK = "MindSpore's BERT-large on the data of MLPerf 0.7"
BERT = (Reported("THOR", 14, 0.713, None, "8 Ascend 910", "", "the README of MindSpore's bert_thor in its model zoo"),)
BERT_NOTE = f"{BERT_TASK}: 71.3 % of the masked tokens after 14 min with THOR (8 Ascend 910)"
CURVES_NOTE = (
    f"{PAPER}: 75.9 % after 117 min with momentum, 66.7 min with THOR (8 Ascend 910),\n"
    "in about half the epochs; its curves of THOR, THOR_stop and THOR_NT lie on each other"
)
NORM_NOTE = (
    f"{PAPER}: the F-norm changes fast early and is stable later;\n"
    "the interval between refreshes grows until there is one an epoch"
)
BATCH_NOTE = (
    f"{PAPER}: THOR to 75.9 %\nin 66.7, 4.1 and 2.7 min at batch size 256, 4096 and 8192 (8, 128 and 256 Ascend 910)"
)
SPLIT_CROSSING = 106.0
SPLIT_LABEL = "theirs, on an Ascend 910: crossing at 106, split_dim=128"
SPLIT_NOTE = f"{PAPER}, on an Ascend 910: the curves cross at 106, which gives 128"


def table(lines: tuple[Reported, ...], task: str = PAPER, accuracy: str = "top-1") -> str:
    """Their numbers as Markdown.

    Args:
        lines: What they report.
        task: What they trained.
        accuracy: Which accuracy it is.

    Returns:
        A table, headed as theirs.
    """
    heads = ("optimizer", "batch size", "devices", accuracy, "epochs", "minutes", "where it stands")
    rows = [
        (
            line.what,
            str(line.batch_size or "-"),
            line.devices,
            f"{line.top1:.2%}",
            line.epochs or "-",
            "-" if line.minutes is None else f"{line.minutes:g}",
            line.source,
        )
        for line in lines
    ]
    warning = f"Theirs, not ours: {task}. Another task on other machines: not to be compared with the above."
    return f"{warning}\n\n{markdown.table(heads, rows)}"
