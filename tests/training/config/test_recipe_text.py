"""How often a recipe is parsed."""

from torch_thor.training.config import recipe_text


def test_a_recipe_is_parsed_once(run, monkeypatch):
    parsed = []
    really = recipe_text.load_yaml  # which nothing but parsing calls

    def counted(text, what):
        parsed.append(what)
        return really(text, what)

    monkeypatch.setattr(recipe_text, "load_yaml", counted)
    words = ("train", "digits", "epochs=1", "optimizer=sgd", "--out", "run")
    assert run(*words)[0] == 0
    assert parsed == ["recipe digits"]
    del parsed[:]
    assert run(*words, "--resume")[0] == 0
    assert len(parsed) == 2  # what is stored, and the words on top of it
