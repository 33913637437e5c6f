"""A run folder as versions without tasks wrote it: no task in recipes, `images` in place of terms and samples."""

import gzip
import hashlib
import json
import re

import torch
import yaml

from sums import sealed, sha256


def _lines(text):
    rows = [json.loads(line) for line in text.splitlines()]
    for row in rows:
        row.pop("primary", None)
        row.pop("higher_is_better", None)
    return "".join(json.dumps({("images" if k == "terms" else k): v for k, v in row.items()}) + "\n" for row in rows)


def _recipe(text):
    comments = [line for line in text.splitlines() if line.startswith("# resolved")]
    keys = yaml.safe_load(text)
    del keys["task"]
    body = "\n".join([*comments, yaml.safe_dump(keys, sort_keys=False)])
    return f"# sha256 {hashlib.sha256(body.encode()).hexdigest()}: of all lines below this one\n{body}"


def write_as_older_version(run, optimizer):
    """Rewrite a run of one optimizer in place."""
    (run / "recipe.yaml").write_text(_recipe((run / "recipe.yaml").read_text()))
    metrics = run / optimizer / "metrics.jsonl"
    metrics.write_text(_lines(metrics.read_text()))
    assert not re.search("terms|primary", metrics.read_text())
    for path in (run / optimizer / "checkpoints").rglob("step-*"):
        for file in list(path.iterdir()):  # the best checkpoint's files are links to those of another
            content = file.read_bytes()
            file.unlink()
            file.write_bytes(content)
        own = path / "metrics.jsonl.gz"
        own.write_bytes(gzip.compress(_lines(gzip.decompress(own.read_bytes()).decode()).encode(), mtime=0))
        state = torch.load(path / "state.pt", weights_only=True)
        for rank in state["ranks"]:
            rank["data"]["images"] = rank["data"].pop("samples")
        torch.save(state, path / "state.pt")
        (path / "recipe.yaml").write_text(_recipe((path / "recipe.yaml").read_text()))
        old = json.loads((path / "manifest.json").read_text())
        assert old["format"] == 3
        sums = {name: sha256(path / name) for name in old["sha256"]}
        values = {key: value for key, value in old.items() if key != "checksum"} | {"sha256": sums}
        (path / "manifest.json").write_text(json.dumps(sealed(values), indent=2) + "\n")
