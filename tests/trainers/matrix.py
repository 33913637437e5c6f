"""Install the trainers anew and write what the tests see into the docs:
`python tests/trainers/matrix.py`.

It takes ten minutes, twice: with the newest versions, and with the lowest ones of the extra
`trainers`.
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
    return [
        one.replace(">=", "==")
        for one in project["dependencies"] + project["optional-dependencies"]["trainers"]
    ]


def seen(place, versions):
    """{(trainer, check): whether it passed} and the versions, of a fresh environment."""
    venv.create(place, with_pip=True)
    python = place / "bin/python"
    subprocess.run(
        [python, "-m", "pip", "install", "-q", "-e", f"{ROOT}[dev,trainers]", *versions], check=True
    )
    report = place / "report.xml"
    test = str(Path(__file__).with_name("test_clients.py"))
    subprocess.run(
        [python, "-m", "pytest", "-q", test, f"--junitxml={report}"],
        check=False,
        cwd=ROOT,
    )
    cases = {case.get("name"): not len(case) for case in ElementTree.parse(report).iter("testcase")}
    found = {
        tuple(re.fullmatch(r"test_client\[(.*)-(\w+)\]", name).groups()): ok
        for name, ok in cases.items()
    }
    listed = subprocess.run(
        [python, "-m", "pip", "list", "--format=json"], check=True, capture_output=True
    ).stdout
    return found, {one["name"].replace("_", "-"): one["version"] for one in json.loads(listed)}


def main():
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        both = [seen(Path(one), []), seen(Path(other), lowest())]
    lines = [f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
    for client in dict.fromkeys(client for client, _ in both[0][0]):
        versions = " and ".join(
            dict.fromkeys(own[client.partition(" ")[0]] for _, own in both[::-1])
        )
        cells = []
        for check in CHECKS:
            passed = [found.get((client, check)) for found, _ in both]
            words = {
                (True, True): "yes",
                (True, False): "newest",
                (False, True): "lowest",
                (None, None): "–",
            }
            cells.append(words.get(tuple(passed), "no"))
        lines.append(f"| {client} | {versions} | {' | '.join(cells)} |")
    torches = " and ".join(dict.fromkeys(own["torch"] for _, own in both[::-1]))
    table = "\n".join([*lines, "", f"With torch {torches}."])
    text = re.sub(
        r"(<!-- seen: .*? -->\n).*?(<!-- end -->)",
        lambda m: f"{m[1]}{table}\n{m[2]}",
        PAGE.read_text(),
        flags=re.DOTALL,
    )
    PAGE.write_text(text)
    return int(not all(ok for found, _ in both for ok in found.values()))


if __name__ == "__main__":
    sys.exit(main())
