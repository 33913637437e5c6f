"""Recipes: typed, overridable, written as short as they are meant, and mistakes are named with what
was meant.
"""

from pathlib import Path

import pytest
from pydantic import ValidationError

from torch_thor.errors import UserError, first_line
from torch_thor.training.optimizers import OPTIMIZERS
from torch_thor.training.recipe_model import (
    FREE_ON_RESUME,
    Phase,
    Recipe,
    Schedule,
    Transform,
    absolute,
    path_of,
)
from torch_thor.training.recipes import (
    PARTS,
    differences,
    keys,
    load_recipe,
    override,
    parse,
    recipe_list,
    recipe_names,
    to_yaml,
)

PHASES = (
    "phases=[{steps: 4, length: 32}, {steps: 2, lr_factor: 0.5, schedule: {kind: linear, "
    "warmup_epochs: 1}}]"
)


def refused(name, *words):
    """Load what cannot be right, and return the lines of the error."""
    with pytest.raises(UserError) as caught:
        load_recipe(name, words)
    return str(caught.value).splitlines()


def test_the_recipes_of_the_package_say_what_they_are_and_are_written_in_forty_lines():
    assert [name for name, _ in recipe_list()] == recipe_names()
    for name, about in recipe_list():
        recipe = load_recipe(name)
        assert (recipe.name, recipe.about) == (name, about)
        assert len(about) > 20 < len(recipe.reaches)
        text = to_yaml(recipe)
        assert len(text.splitlines()) <= 40
        assert parse(text, "other name") == recipe


def test_what_is_written_are_the_differences_from_the_defaults():
    assert to_yaml(Recipe()) == "{}\n"
    recipe = load_recipe(
        "digits",
        ["optimizer=sgd", "lr=1e-4", "data.root=$HOME/x", "model=small-resnet", "about='ä: #'"],
    )
    assert to_yaml(recipe) == (
        f"name: digits\nabout: 'ä: #'\nreaches: {recipe.reaches}\ndata: {{root: $HOME/x}}\nmodel: "
        "small-resnet\noptimizer: [sgd]\noptimizers:\n  sgd: {lr: 0.0001}\nepochs: 20\nbatch_size: "
        "64\nschedule: {kind: cosine}\ntargets: [0.95, 0.97, 0.98]\nthreads: 1\n"
    )
    for words in (
        [
            "lr=0.123",
            "targets=[0.5,0.75]",
            "optimizers.thor.split_dim=null",
            "decay_filter=['*.weight', -head]",
        ],
        ["data.name=cifar10", "data.transform={}", "ema_decay=0.5", "name='3'"],
        [
            "optimizer=thor-muon",
            "update_interval={kind: piecewise, boundaries: [3], intervals: [1, 2]}",
        ],
    ):
        recipe = load_recipe("digits", words)
        assert parse(to_yaml(recipe), "other") == recipe
        assert override(recipe, []) == recipe
    recipe = load_recipe("bert-tiny", ["epochs=1", PHASES])
    assert recipe.phases[1] == Phase(
        steps=2, lr_factor=0.5, schedule=Schedule(kind="linear", warmup_epochs=1)
    )
    assert parse(to_yaml(recipe), "other") == recipe
    assert override(recipe, ["phases=[]"]).phases == ()


def test_words_reach_their_keys_and_replace_what_stood_there():
    recipe = load_recipe(
        "digits", ["epochs=7", "schedule.warmup_epochs=2", "data.root=/x", "batch_size=2_56"]
    )
    assert (recipe.epochs, recipe.data.root, recipe.batch_size) == (7, "/x", 256)
    assert recipe.schedule == Schedule(kind="cosine", warmup_epochs=2)
    assert override(recipe, ["schedule={kind: linear}"]).schedule == Schedule(kind="linear")
    for word, value in (("1e-4", 1e-4), ("2E3", 2e3), ("+.5e-1", 0.05), ("3", 3)):
        assert load_recipe("digits", [f"schedule.power={word}"]).schedule.power == value


def test_a_number_sign_in_quotes_or_inside_a_name_is_no_comment():
    for text, root in (("'data #2'", "data #2"), ("data#2", "data#2"), ("'#' ", "#")):
        assert load_recipe("digits", [f"data.root={text}"]).data.root == root
    about = load_recipe("digits", ["about=|\n  a\n  # b\n"]).about
    assert about == "a\n# b\n"  # a block of text


def test_names_that_look_like_numbers_are_kept_as_they_are_written(tmp_path):
    for text in ("2024_01_01", "1e5", "1.10", "0x10", "+5", "007", "12", "1.", "-.inf"):
        words = ["weights=x", f"weights_except=[{text}, a]", f"about={text}"]
        keys = f"data: {{root: {text}}}\nweights_except: [{text}, a]\nabout: {text}\n"
        (tmp_path / "mine.yaml").write_text(f"{keys}weights: x\nseed: 0x10\n")
        for recipe in (
            load_recipe("digits", [*words, f"data.root={text}", "seed=0x10"]),
            load_recipe("digits", [*words, f"data={{root: {text}}}", "seed=1_6"]),
            load_recipe(str(tmp_path / "mine.yaml")),
        ):
            assert (recipe.data.root, recipe.weights_except) == (text, (text, "a"))
            assert (recipe.about, recipe.seed) == (text, 16)
            assert parse(to_yaml(recipe), "other") == recipe


def test_a_setting_goes_to_the_chosen_optimizers_that_have_it():
    # the order does not matter
    recipe = load_recipe("digits", ["lr=0.7", "damping=2", "optimizer=thor,adamw"])
    assert recipe.optimizer == ("thor", "adamw")
    assert recipe.optimizers == {
        "thor": {"lr": 0.7, "damping": 2, "update_interval": 20},
        "adamw": {"lr": 0.7},
    }
    # only those in use
    assert load_recipe("digits", ["optimizer=muon"]).optimizers == {"muon": {"lr": 0.005}}
    assert load_recipe("digits", ["optimizer=muon", "optimizers.muon.lr=2"]).optimizers == {
        "muon": {"lr": 2}
    }
    interval = "update_interval={kind: constant, interval: 3}"  # a mapping in the place of a number
    recipe = load_recipe("digits", ["optimizer=thor", interval])
    assert recipe.optimizers["thor"]["update_interval"] == {"kind": "constant", "interval": 3}


WRONG = {
    "epoch=3": "there is no key epoch (did you mean epochs?)",
    "schedule.knd=linear": "there is no key schedule.knd (did you mean schedule.kind?)",
    "dampin=1": "there is no key dampin (did you mean damping?)",
    "optimizers.thor.dampin=1": (
        "there is no key optimizers.thor.dampin (did you mean optimizers.thor.damping?)"
    ),
    "optimizers.tohr.lr=1": "there is no key optimizers.tohr (did you mean optimizers.thor?)",
    "optimizers.adam.betas=1": (
        "there is no key optimizers.adam.betas (did you mean optimizers.adam.beta"
    ),
    "clip_factor=1": "clip_factor is a setting of some optimizers: name one in",
    "optimizer=tohr": "optimizer=[tohr]: must name one or more of thor-muon, ",
    "optimizer=sgd,sgd": "optimizer=[sgd, sgd]: names an optimizer twice",
    "optimizer=[]": "optimizer=[]: must name",
    "optimizer=3": "optimizer=3 should be a valid list",
    "optimizers.thor=3": "optimizers.thor=3 should be a valid mapping",
    "epochs=many": "epochs=many should be a valid integer (passes over",
    "epochs=null": "epochs=null should be",
    "epochs=true": "epochs=true should be",
    "epochs=0": "epochs=0 should be greater than or equal to 1",
    "seed=-1": "seed=-1 should be",
    "seed=9223372036854775808": "seed=9223372036854775808 should be less than",
    "batch_size=2.5": "batch_size=2.5 should be",
    "keep_best=maybe": "keep_best=maybe should be a valid true or false",
    "label_smoothing=1": "label_smoothing=1 should be less than 1",
    "stop_at=76": "stop_at=76.0 must lie in (0, 1]",
    "targets=[95]": "targets=[95.0] must lie in (0, 1]",
    "targets=[0.5, -1]": "targets[1]=-1 should be greater than 0 (values of the primary metric",
    "accumulation=65": "accumulation=65 is more than batch_size=64",
    "shards=2": "shards=2 needs parallel=hsdp",
    "loss_scale=2": "loss_scale=2.0 needs precision=fp16",
    "weights_except=[head]": "weights is not set, but weights_except",
    "data.name=mnist": "data.name=mnist should be 'digits', ",
    "data.transform={}": "data.transform is set, but digits is used without crops",
    "data.max_broken=1": "data.max_broken=1 should be",
    "data.workers.count=-1": "data.workers.count=-1 should be",
    "data.text.length=3": "data.text.length=3 should be",
    "schedule=3": "schedule=3 should be a valid mapping",
    "schedule.kind=stpe": "schedule.kind=stpe should be 'constant', ",
    "damping_schedule.kind=step": "damping_schedule.kind=step needs milestones",
    "schedule.milestones=[2, 2]": "schedule.milestones=[2.0, 2.0] must increase",
    "schedule={end: 1, final: 0.5}": "schedule.end=1.0 and final=0.5 both set",
    "schedule={horizon_steps: 1, horizon_epochs: 2}": (
        "schedule.horizon_epochs=2.0 and horizon_steps=1 say the same"
    ),
    "schedule={warmup_steps: 1, warmup_epochs: 2}": (
        "schedule.warmup_epochs=2.0 and warmup_steps=1 say the same"
    ),
    "lr=much": "optimizers.thor.lr=much should be a valid number",
    "lr=.nan": "optimizers.thor.lr=NaN should be a finite number",
    "lr=0": "optimizers.thor.lr=0 should be greater than 0",
    "momentum=1": "optimizers.thor.momentum=1: must be in [0, 1) (μ; 0 switches",
    "trace_thresholds=[0, 1]": "optimizers.thor.trace_thresholds=[0, 1]: must be a pair",
    "trace_thresholds=paper": "optimizers.thor.trace_thresholds=paper: must be",
    "split_dim=automatic": "optimizers.thor.split_dim=automatic: must be",
    "layers=3": "optimizers.thor.layers=3: must be a name, a pattern",
    "update_interval=0": "optimizers.thor.update_interval=0: must be a whole number",
    "update_interval={first: 3}": (
        "optimizers.thor.update_interval={first: 3}: kind must be one of constant, "
    ),
    "update_interval={kind: geometric, frist: 5}": (
        "optimizers.thor.update_interval={kind: geometric, frist: 5}: geometric takes first, last, "
        "factor, not frist"
    ),
    "update_interval={kind: geometric, first: 5, last: 3, factor: 2}": (
        "optimizers.thor.update_interval={kind: geometric, first: 5, last: 3, factor: 2}: last=3: "
        "last must be first=5"
    ),
    "epochs=[1": "epochs=[1: the value is not YAML",
    "about=*a": "about=*a: the value is not YAML (an alias",
    "about={a: 1, a: 2}": (
        "about={a: 1, a: 2}: the value is not YAML (the key a is given twice, in lines 1 and 1"
    ),
    "epochs=010": "epochs='010' is text and should be a valid integer (passes over",
    "epochs='2'": "epochs='2' is text and should be a valid integer (passes over",
    "epochs=1__0": "epochs='1__0' is text and should be a valid integer",
    "lr=1:30": "optimizers.thor.lr='1:30' is text and should be a valid number",
    "about=" + "[" * 500: "about=[[",
    "data.root=data #2": (
        "data.root=data #2: YAML takes #2 for a comment: leave it out, or quote the value, as in "
        "\"data.root='data #2'\""
    ),
    "weights=#best": "weights=#best: YAML takes #best for a comment: leave it out, or quote",
    "schedule={kind: linear} # 3": "schedule={kind: linear} # 3: YAML takes # 3 for a comment",
    "=3": "'=3' is not key=value",
    "lr": "'lr' is not key=value",
}


def test_a_fault_is_one_line_with_the_full_key_the_rule_and_the_remedy():
    for word, said in WRONG.items():
        lines = refused("digits", "optimizer=thor,sgd", word)
        assert lines[0].startswith(said), (word, lines)
    for word, said in {
        "data.transform.resize=1": "data.transform.resize=1 must be size=32 or more",
        "data.transform.std=[0, 1, 1]": (
            "data.transform.std[0]=0 should be greater than 0 (deviation"
        ),
        "data.transform.scale=[1, 0.5]": "data.transform.scale=[1.0, 0.5] must be two shares",
        "data.transform.ratio=[2, 1]": "data.transform.ratio=[2.0, 1.0] must be",
    }.items():
        (line,) = refused("resnet18-cifar10", word)
        assert line.startswith(said)


def test_all_faults_are_named_at_once():
    lines = refused(
        "digits",
        "epochs=0",
        "schedule.kind=x",
        "lr=-1",
        "damping=true",
        "nosuch=1",
        "optimizer=thor,lamb",
    )
    assert [line.split(" should")[0] for line in lines[:-1]] == [
        "epochs=0", "schedule.kind=x", "optimizers.thor.lr=-1", "optimizers.thor.damping=true",
        "optimizers.lamb.lr=-1",
    ]  # fmt: skip
    assert lines[-1].startswith("there is no key nosuch")
    several = [
        "parallel=fsdp",
        "optimizer=muon,thor",
        "split_dim=auto",
        "accumulation=99",
        "shards=3",
    ]
    assert [line[:22] for line in refused("digits", *several)] == [
        "accumulation=99 is mor", "shards=3 needs paralle", "parallel=fsdp: muon or",
        "parallel=fsdp: split_d",
    ]  # fmt: skip


def test_phases_that_cannot_be_right():
    for words, said in {
        ("phases=[{steps: 0}]",): "phases[0].steps=0 should be",
        ("phases=[{length: 32}]",): "phases[0].steps is missing: give it",
        ("phases=[{steps: 4, length: 8}]",): "phases[0].length=8 should be",
        ("phases=[{steps: 4, size: 8}]",): "there is no key phases[0].size",
        ("phases={steps: 4}",): "phases={steps: 4} should be a valid list",
        (
            "phases=[{steps: 4, schedule: {kind: linnear}}]",
        ): "phases[0].schedule.kind=linnear should be",
        (
            "phases=[{steps: 4}, {steps: 3}]",
            "steps=8",
        ): "steps=8 is not the sum of the phases' steps (4 + 3 = 7)",
        ("phases=[{steps: 4}]", "epochs=2"): "epochs=2: with phases a training ends after 4 steps",
        (
            "phases=[{steps: 4}, {steps: 4, batch_size: 4, accumulation: 5}]",
        ): "phases[1].accumulation=5 is more than b",
        (
            "phases=[{steps: 4, batch_size: 4}]",
            "accumulation=5",
        ): "phases[0].accumulation=5 is more than batch_size=4",
    }.items():
        (line,) = refused("bert-tiny", "epochs=1", *words)
        assert line.startswith(said)


def test_the_steps_of_a_training_and_of_its_phases():
    assert (Recipe(epochs=3).total_steps(7), Recipe(epochs=3, steps=5).total_steps(7)) == (21, 5)
    three = (Phase(steps=3), Phase(steps=1, accumulation=4), Phase(steps=2, accumulation=2))
    recipe = Recipe(phases=three, batch_size=8, accumulation=8)
    assert recipe.total_steps(6) == 6
    assert [recipe.phase_at(step) for step in range(7)] == [(three[0], 0)] * 3 + [(three[1], 3)] + [
        (three[2], 4)
    ] * 3
    assert [recipe.accumulation_at(step) for step in range(6)] == [8, 8, 8, 4, 2, 2]
    assert Recipe(accumulation=3).phase_at(9) == (None, 0)
    assert Recipe(accumulation=3).accumulation_at(9) == 3


def test_a_users_own_file(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("data: {name: digits}\nepochs: 3\n")
    recipe = load_recipe(str(file), ["seed=4"])
    assert (recipe.name, recipe.epochs, recipe.seed) == ("mine", 3, 4)
    assert refused(str(tmp_path / "other.yaml"))[0].startswith(
        f"{tmp_path / 'other.yaml'} cannot be read"
    )
    assert refused("digit")[0].startswith(
        "there is no recipe digit (did you mean digits?): the recipes are auto"
    )
    for content in (
        b"epochs: [",
        b"just words",
        b"",
        b"\xff",
        b"a: &x 1\nb: *x",
        b"mine: 1",
        b"about: " + b"a" * 1_000_001,
    ):
        file.write_bytes(content)
        (line,) = refused(str(file))
        assert "mine" in line


def test_a_setting_of_an_optimizer_at_the_top_of_a_file():
    with pytest.raises(
        UserError, match=r"^lr is a setting of some optimizers: .* or give optimizers.NAME.lr$"
    ):
        parse("lr: 0.1", "x")


def test_dots_in_the_keys_of_a_file_are_levels_of_words():
    remedy = "dots are for words of the command line; write"
    for text, said in {
        "schedule.kind: cosine": f"schedule.kind: {remedy} schedule: {{kind: cosine}}",
        "data: {workers.count: 2}": f"data.workers.count: {remedy} workers: {{count: 2}}",
        "optimizers.sgd.lr: 1": f"optimizers.sgd.lr: {remedy} optimizers: {{sgd: {{lr: 1}}}}",
    }.items():
        with pytest.raises(UserError) as caught:
            parse(text, "x")
        assert str(caught.value) == f"there is no key {said}"


def test_recipes_cannot_be_changed_and_their_paths_name_the_environment(monkeypatch):
    recipe = load_recipe("digits", ["data.root=$PLACE/images"])
    with pytest.raises(ValidationError, match="frozen"):
        recipe.epochs = 3
    monkeypatch.setenv("HOME", "/home/me")
    assert Recipe().data.folder() == Path("/home/me/.cache/torch-thor")
    monkeypatch.delenv("PLACE", raising=False)
    with pytest.raises(UserError, match=r"data.root=\$PLACE/images: \$PLACE is not set"):
        recipe.data.folder()
    monkeypatch.setenv("PLACE", "/secret")
    assert recipe.data.folder() == Path("/secret/images")
    assert "secret" not in to_yaml(recipe)


def test_a_dollar_in_a_name_is_doubled_and_a_path_can_be_made_absolute(monkeypatch, tmp_path):
    odd = tmp_path / "a $b"
    odd.mkdir()
    monkeypatch.chdir(odd)
    monkeypatch.setenv("SUB", "sub")
    for text, place in {
        "data": odd / "data",
        "$SUB/x": odd / "sub/x",
        "$$SUB": odd / "$SUB",
        str(tmp_path): tmp_path,
    }.items():
        fixed = absolute("data.root", text)
        assert path_of("data.root", fixed) == place
        assert absolute("data.root", fixed) == fixed
    for text in ("~/data", "$NOT_SET/x"):
        assert absolute("data.root", text) == text
    with pytest.raises(UserError, match=r"weights=a\$NOT_SET: \$NOT_SET is not set: .* write \$\$"):
        path_of("weights", "a$NOT_SET")
    with pytest.raises(
        UserError, match=r"~nobody-at-all is no user's folder: write ./~nobody-at-all"
    ):
        path_of("data.root", "~nobody-at-all/x")


def test_the_usual_crops():
    assert load_recipe("resnet50-imagenet-sgd").data.crops == Transform()
    assert load_recipe("digits", ["data.name=cifar100"]).data.image_shape == (3, 32, 32)
    assert Recipe().data.image_shape == (1, 8, 8)


def test_differences_are_listed_by_key():
    recipe = load_recipe("digits")
    changed = override(recipe, ["seed=9", "momentum=0.5", "data.workers.count=1", "optimizer=sgd"])
    found = differences(recipe, changed, (*FREE_ON_RESUME, "optimizer", "optimizers.thor."))
    assert found == ["seed: 0 -> 9", "optimizers.sgd.momentum: None -> 0.5"]


def test_the_table_of_keys_is_short_complete_and_its_defaults_can_be_given():
    listed = [row[0] for part in (None, "training") for row in keys(part)]
    assert sorted(listed) == sorted(Recipe.model_fields)
    assert keys("thor") == keys("optimizers.thor")
    assert keys("workers") == [
        ("count", "whole number", "4", "processes that make batches; 0: the training itself"),
        ("prefetch", "whole number", "2", "batches that each of them makes ahead"),
    ]
    with pytest.raises(
        UserError, match=r"no part dta \(did you mean data\?\): the parts are training, data"
    ):
        keys("dta")
    words = [
        "data.name=image-folder",
        "data.transform={}",
        "optimizers={}",
        "optimizer=" + ",".join(OPTIMIZERS),
    ]
    plain = load_recipe("resnet50-imagenet-sgd", ["schedule={}", *words])
    ours = {"data.name", "optimizer"}  # that have no default here
    for part in (None, *PARTS):
        assert len(keys(part)) <= 38
        for key, kind, default, meaning in keys(part):
            assert kind
            assert len(meaning) > 5
            top = "" if part in (None, "training") else f"{part}."
            if (
                default not in ("its own", "to be given")
                and part != "phases"
                and f"{top}{key}" not in ours
            ):
                changed = override(plain, [f"{top}{key}={default}"])
                if part is None or not part.startswith("optimizers"):
                    default_of = Recipe.model_fields.get(key)
                    same = changed.model_dump()
                    for name in f"{top}{key}".split("."):
                        same = same[name]
                    assert default_of is None or top or same == default_of.default
                else:
                    assert changed.optimizers[part.partition(".")[2]] == {
                        key: getattr(PARTS[part](), key)
                    }
    assert {row[0]: row[1] for row in keys("training")}["stop_at"] == "number or null"
    assert {row[0]: row[2] for row in keys("phases")}["steps"] == "to be given"


def test_the_first_line_of_an_error():
    errors = {
        "one": ValueError("one\ntwo"),
        "failed": RuntimeError("\n  failed:\n  because"),
        "'key'": KeyError("key"),
    }
    for line, error in {
        **errors,
        "AssertionError": AssertionError(),
        "ValueError": ValueError("\n"),
    }.items():
        assert first_line(error) == line
