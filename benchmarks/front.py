"""README's table and picture, from the raw data of the studies.

    python -m benchmarks front

The table has tasks that chose no default in use there. *Steps* and *seconds* are those after which
ThorMuon has reached AdamW's result, as shares of AdamW's. Fine-tuning has no curves.
"""

import json
from typing import Any

from benchmarks import finetuning, nanogpt, peers, suite, suite_report
from benchmarks.gpu.nanogpt import best, first_at
from benchmarks.runner.drawing import save
from benchmarks.runner.markdown import table as markdown
from benchmarks.runner.stores import Lines
from benchmarks.runner.study import RESULTS
from benchmarks.training import cell

STUDIES = ("nanogpt", "finetuning", "peers", "suite")
PICTURE = suite_report.PICTURES / "front.png"
# those with a star chose the rates of trained weights
MINILM = {"minilm-sst2": "SST-2*", "minilm-trec": "TREC*", "minilm-subj": "films"}
UNSEEN = "minilm-subj"
NONE, OURS, ADAMW, MUON = "–", "ThorMuon", "AdamW, tuned", "Muon, tuned"
FONT = 14  # legible where the picture is 400 pixels wide
Row = dict[str, Any]
Rows = dict[str, Row]


def main() -> None:
    """Print the table, and draw the picture."""
    of_gpt, of_minilm, of_peers, of_problems = map(rows_of, STUDIES)
    print(table(of_gpt, of_minilm, of_peers, of_problems, of_gpu()))
    draw(of_gpt, of_minilm)


def rows_of(study: str) -> Rows:
    """Return the raw data of a study."""
    return Lines(RESULTS / f"{study}.jsonl").rows


def of_gpu() -> list[Row]:
    """Return the trainings of nanoGPT's example for a GPU."""
    return json.loads((RESULTS / "gpu-h200.json").read_text())["Shakespeare with nanoGPT"]


def table(
    of_gpt: Rows, of_minilm: Rows, of_peers: Rows, of_problems: Rows, trained: list[Row]
) -> str:
    """Return the table of tasks that chose no default, from the raw data of each study."""
    heads = ("task", "AdamW", "Muon, tuned", "ThorMuon", "steps", "seconds")
    films = of_finetuning(of_minilm, of_peers)
    lines = [*of_nanogpt(of_gpt), *of_suite(of_problems), films]
    return markdown(heads, [*lines, of_the_gpu(trained)])


def of_nanogpt(rows: Rows) -> list[list[str]]:
    """Return the line of nanoGPT's example for a CPU."""
    ends = {cells[0]: cells for cells in nanogpt.ends(rows)}
    _, _, loss, steps, seconds, *_ = ends[ADAMW]
    title = "nanoGPT's CPU example (0.8 M), characters: loss ↓"
    return [[title, loss, ends[MUON][2], ends[OURS][2], steps, seconds]]


def of_suite(rows: Rows) -> list[list[str]]:
    """Return a line for each problem of the suite that README shows."""
    found = suite_report.contests(rows, suite.chosen(rows), suite.same_settings(rows))
    by_name = {contest.problem: contest for contest in found}
    lines = []
    for problem, title in suite_report.README.items():
        contest = by_name[problem]
        names = ("adamw", "muon", "thor-muon")
        shown = [contest.shown(contest.setting(name)) for name in names]
        lines.append([title, *shown, *shares(contest)])
    return lines


def shares(contest: suite_report.Contest) -> tuple[str, str]:
    """Return the shares of AdamW's steps and seconds after which ThorMuon is where it ends."""
    return suite_report.ratio(contest.steps("adamw")), suite_report.ratio(contest.seconds("adamw"))


def of_finetuning(rows: Rows, of_peers: Rows) -> list[str]:
    """Return the line of the sentences that chose nothing; AdamW's rate is the best of all."""
    adamw, muon = finetuning.adamw(rows, UNSEEN), peers.chosen(of_peers, UNSEEN, "muon")
    assert muon is not None
    ours = {"task": UNSEEN, "optimizer": "thor-muon"}
    ends = [cell(rows, adamw), cell(of_peers, muon), cell(rows, ours)]
    return ["MiniLM, fine-tuned on films: accuracy ↑", *ends, NONE, NONE]


def of_the_gpu(trained: list[Row]) -> list[str]:
    """Return the line of nanoGPT's example for a GPU: where ThorMuon is at AdamW's best."""
    theirs, ours = (
        [row for row in trained if row["job"]["optimizer"] == n] for n in ("AdamW", OURS)
    )
    step, loss, seconds = best(theirs[0])
    there = first_at(ours[0], loss)
    assert there is not None
    title = "nanoGPT's GPU example (10.7 M), H200, its own AdamW: lowest loss ↓"
    ends = [title, f"{loss:.4f}", NONE, f"{best(ours[0])[1]:.4f}"]
    return [*ends, f"{there[0] / step:.2f}", f"{there[1] / seconds:.2f}"]


# ---- the picture ---------------------------------------------------------------------------------


def draw(of_nanogpt: Rows, of_finetuning: Rows) -> None:
    """Draw nanoGPT's example against seconds, and the accuracies of fine-tuning."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"font.size": FONT}):
        figure = Figure(figsize=(11, 4.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        nanogpt.against(left, of_nanogpt, timed=True)
        left.set(title="nanoGPT's CPU example", ylabel="validation loss")
        left.legend(frameon=False, fontsize=FONT - 1)
        problems = MINILM | {f"{problem}-lora": f"{name}, LoRA" for problem, name in MINILM.items()}
        finetuning.compare(right, of_finetuning, problems, finetuning.FRONT)
        right.set(title="MiniLM, fine-tuned", xlabel="accuracy (* chose ThorMuon's rates)")
        right.legend(frameon=False, fontsize=FONT - 1)
        save(figure, PICTURE)
