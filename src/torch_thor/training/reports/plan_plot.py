"""The plot of `torch-thor plan`: predicted times against the number of processes."""

from collections.abc import Sequence
from pathlib import Path

from torch_thor.training.reports.pictures import save_picture
from torch_thor.training.reports.plan_times import DDP, FSDP, Times

COLOURS = {DDP: "#0072b2", FSDP: "#009e73"}  # colour-blind safe
# Minutes of the training of ResNet-50 on ImageNet to 75.9 % top-1 in 40 epochs, by devices (Chen et al. 2021)
PAPER = {8: 66.7, 128: 4.1, 256: 2.7}
PAPER_MODEL = "resnet50"


def draw_times(word: str, times: Sequence[Times], path: Path) -> None:
    """Draw the times of steps, and how much shorter a training becomes, against the number of processes.

    Args:
        word: The model. For ResNet-50 the times of the paper are drawn beside, each relative to that on 8 devices,
            because they were measured on other devices.
        times: The predictions.
        path: The file to write; its suffix determines the format.
    """
    from matplotlib.figure import Figure  # slow to import; without pyplot, which may open windows

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    steps, speed = figure.subplots(1, 2)
    for form in (DDP, FSDP):
        own = sorted((one for one in times if one.form == form), key=lambda one: one.processes)
        if not own:
            continue
        counts, colour = [one.processes for one in own], COLOURS[form]
        steps.plot(
            counts, [one.refresh for one in own], color=colour, marker="s", ms=4, ls="--", label=f"{form}, refresh"
        )
        steps.plot(counts, [one.ordinary for one in own], color=colour, marker="o", ms=4, label=f"{form}, ordinary")
        speed.plot(counts, relative(own), color=colour, marker="o", ms=4, label=f"{form}, predicted")
    base = base_of(times)
    counts = sorted({one.processes for one in times})
    speed.plot(counts, [base / count for count in counts], color="#bbbbbb", lw=1, label="in proportion")
    if word == PAPER_MODEL and base == 8:
        minutes = [PAPER[count] / PAPER[base] for count in PAPER]
        speed.plot([*PAPER], minutes, color="#d55e00", marker="D", ls="", label="Chen et al. 2021, measured")
    steps.set(title=f"{word}: time of a step", ylabel="seconds")
    speed.set(title="Time of a training", ylabel=f"relative to that on {base} processes")
    for axes in (steps, speed):
        axes.set(yscale="log", xlabel="processes")
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    save_picture(figure, path, dpi=110)


def base_of(times: Sequence[Times]) -> int:
    """Return the number of processes to which times are relative.

    Args:
        times: The predictions.

    Returns:
        8 as in the paper, or the smallest if 8 is not among them.
    """
    counts = {one.processes for one in times}
    return 8 if 8 in counts else min(counts)


def relative(times: Sequence[Times]) -> list[float]:
    """Return the time of a training relative to that on the processes of `base_of`.

    Args:
        times: The predictions for one form, by number of processes, with the same batch.

    Returns:
        For each the ratio of the time of an epoch; of an ordinary step if epochs are not predicted.
    """
    taken = {one.processes: one.ordinary if one.epoch is None else one.epoch for one in times}
    return [seconds / taken[base_of(times)] for seconds in taken.values()]
