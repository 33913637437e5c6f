"""Install the trainers anew, at their newest and their lowest versions, for ten minutes each, and
write what the tests see into the docs: `python tests/trainers/matrix.py`.
"""

import json
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/how-to/in-a-trainer.md"
CHECKS = ("trains", "resume", "accumulation", "bf16")
HEADS = ("trainer", "versions", "trains", "resumes", "accumulates", "bf16")


def lowest():
    """The lower bounds of torch and of the extra `trainers`, as exact versions."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    every = project["dependencies"] + project["optional-dependencies"]["trainers"]
    return [name.replace(">=", "==") for name in every]


def seen(place, versions):
    """{(trainer, check): whether it passed} and the versions, of a fresh environment."""
    venv.create(place, with_pip=True)
    python = place / "bin/python"
    pip = [python, "-m", "pip"]
    subprocess.run([*pip, "install", "-q", "-e", f"{ROOT}[dev,trainers]", *versions], check=True)
    report, test = place / "report.xml", Path(__file__).with_name("test_clients.py")
    words = [python, "-m", "pytest", "-q", test, f"--junitxml={report}"]
    subprocess.run(words, check=False, cwd=ROOT)
    cases = {case.get("name"): not len(case) for case in ElementTree.parse(report).iter("testcase")}
    found = {
        tuple(re.fullmatch(r"test_client\[(.*)-(\w+)\]", name).groups()): ok
        for name, ok in cases.items()
    }
    listed = subprocess.check_output([*pip, "list", "--format=json"])
    return found, {own["name"].replace("_", "-"): own["version"] for own in json.loads(listed)}


def main():
    with tempfile.TemporaryDirectory() as new, tempfile.TemporaryDirectory() as old:
        both = [seen(Path(new), []), seen(Path(old), lowest())]
    lines = [f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
    for client in dict.fromkeys(client for client, _ in both[0][0]):
        versions = " and ".join(
            dict.fromkeys(own[client.partition(" ")[0]] for _, own in both[::-1])
        )
        cells = []
        for check in CHECKS:
            passed = [found.get((client, check)) for found, _ in both]
            words = {(True, True): "yes", (True, False): "newest", (False, True): "lowest"}
            cells.append({**words, (None, None): "–"}.get(tuple(passed), "no"))
        lines.append(f"| {client} | {versions} | {' | '.join(cells)} |")
    torches = " and ".join(dict.fromkeys(own["torch"] for _, own in both[::-1]))
    table = "\n".join([*lines, "", f"With torch {torches}."])
    pattern = re.compile(r"(<!-- seen: .*? -->\n).*?(<!-- end -->)", re.DOTALL)
    text = pattern.sub(lambda m: f"{m[1]}{table}\n{m[2]}", PAGE.read_text())
    PAGE.write_text(text)
    return int(not all(ok for found, _ in both for ok in found.values()))


if __name__ == "__main__":
    sys.exit(main())
