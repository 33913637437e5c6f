"""README's first table and picture, from the raw data of four studies.

    python -m benchmarks front

The table answers what somebody gains who uses AdamW today: AdamW is tuned on each task, ThorMuon
is not, and *steps* and *seconds* are what ThorMuon needs to be where AdamW ends, as a share of what
AdamW needs. Fine-tuning has no curves in its raw data.
"""

from typing import Any

from benchmarks import cifar10, finetuning, nanogpt, suite, suite_report
from benchmarks.gpu_airbench import OWN, THOR_MUON
from benchmarks.runner.drawing import save
from benchmarks.runner.markdown import table as markdown
from benchmarks.runner.markdown import with_error
from benchmarks.runner.stores import Lines, key_of
from benchmarks.runner.study import RESULTS

STUDIES = ("nanogpt", "finetuning", "suite", "cifar10")
PICTURE = suite_report.PICTURES / "front.png"
MINILM = {"minilm-sst2": "SST-2", "minilm-trec": "TREC", "minilm-subj": "films"}
NONE, OURS, PEERS = "–", "ThorMuon", ("Muon", "SOAP")
AIRBENCH_EPOCHS = 8
FONT = 14  # legible where the picture is 400 pixels wide
Rows = dict[str, dict[str, Any]]


def main() -> None:
    """Print the table, and draw the picture."""
    of_gpt, of_minilm, of_problems, of_images = map(rows_of, STUDIES)
    print(table(of_gpt, of_minilm, of_problems, of_images))
    draw(of_gpt, of_minilm)


def rows_of(study: str) -> Rows:
    """Return the raw data of a study."""
    return Lines(RESULTS / f"{study}.jsonl").rows


def table(of_gpt: Rows, of_minilm: Rows, of_problems: Rows, of_images: Rows) -> str:
    """Return the table from the raw data of each study."""
    heads = ("task", "AdamW, tuned", "ThorMuon", "steps", "seconds", "Muon, tuned", "SOAP, tuned")
    lines = [*of_nanogpt(of_gpt), *of_suite(of_problems), *of_finetuning(of_minilm)]
    return markdown(heads, [*lines, of_airbench(of_images)])


def of_nanogpt(rows: Rows) -> list[list[str]]:
    """Return the lines of nanoGPT's example: its own AdamW, and the tuned one."""
    ends = {cells[0]: cells for cells in nanogpt.ends(rows)}
    if OURS not in ends:
        return []
    titles = {
        "nanoGPT's AdamW": "nanoGPT's CPU example (0.8 M), its own AdamW untuned: loss ↓",
        "AdamW, tuned": "nanoGPT's CPU example (0.8 M), AdamW tuned: loss ↓",
    }
    lines = []
    for name in titles:
        if name in ends:
            _, _, loss, steps, seconds, *_ = ends[name]
            others = [
                ends[f"{one}, tuned"][2] if f"{one}, tuned" in ends else NONE for one in PEERS
            ]
            lines.append([titles[name], loss, ends[OURS][2], steps, seconds, *others])
    return lines


def of_suite(rows: Rows) -> list[list[str]]:
    """Return a line for each problem of the suite that README shows."""
    found = suite_report.contests(rows, suite.chosen(rows), suite.one_rates(rows))
    by_name = {one.problem: one for one in found}
    lines = []
    for problem, title in suite_report.README.items():
        if problem in by_name:
            one = by_name[problem]
            shown = {
                name: suite_report.shown(one, one.setting(name))
                for name in ("adamw", "thor-muon", "muon", "soap")
            }
            own = shown["adamw"], shown["thor-muon"]
            cells = [*own, *shares(one), shown["muon"], shown["soap"]]
            lines.append([title, *cells])
    return lines


def shares(one: suite_report.Contest) -> tuple[str, str]:
    """Return the shares of AdamW's steps and seconds after which ThorMuon is where it ends."""
    steps, slower = one.steps("adamw"), one.relative("adamw")
    seconds = None if steps is None or slower is None else steps * slower
    return suite_report.ratio(steps), suite_report.ratio(seconds)


def of_finetuning(rows: Rows) -> list[list[str]]:
    """Return a line for each set of sentences; AdamW's rate is the best of all."""
    lines = []
    for problem, name in MINILM.items():
        adamw = {"optimizer": "adamw", "lr": finetuning.chosen_rate(rows, problem, None)}
        cells = [
            finetuning.cell(rows, problem, job, finetuning.SEEDS)
            for job in (adamw, finetuning.FINALISTS[0])
        ]
        title = f"MiniLM, fine-tuned on {name}: accuracy ↑"
        lines.append([title, *cells, NONE, NONE, NONE, NONE])
    return lines


def of_airbench(rows: Rows) -> list[str]:
    """Return the line of airbench94, with its own optimizers in the place of Muon."""
    jobs = [{"epochs": AIRBENCH_EPOCHS, "seed": seed} for seed in cifar10.SEEDS]
    theirs, ours = (
        with_error([rows[key_of({**job, "optimizer": name})]["value"] for job in jobs])
        for name in (OWN, THOR_MUON)
    )
    title = f"airbench94, {AIRBENCH_EPOCHS} epochs of CIFAR-10 (JPEG copies): accuracy ↑"
    return [title, NONE, ours, NONE, NONE, f"its own {theirs}", NONE]


# ---- the picture ---------------------------------------------------------------------------------


def draw(of_nanogpt: Rows, of_finetuning: Rows) -> None:
    """Draw nanoGPT's example against seconds, and the accuracies of fine-tuning."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    times = of_nanogpt.get(key_of(nanogpt.SINGLE_PROCESS))
    if times is None:
        return
    with rc_context({"font.size": FONT}):
        figure = Figure(figsize=(11, 4.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        nanogpt.against(left, of_nanogpt, times)
        left.set(title="nanoGPT's CPU example", ylabel="validation loss")
        left.legend(frameon=False, fontsize=FONT - 1)
        problems = MINILM | {f"{problem}-lora": f"{name}, LoRA" for problem, name in MINILM.items()}
        finetuning.compare(right, of_finetuning, problems, finetuning.FRONT)
        right.set(title="MiniLM, fine-tuned", xlabel="held-out accuracy")
        right.legend(frameon=False, fontsize=FONT - 1)
        save(figure, PICTURE)
