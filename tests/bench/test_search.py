"""Settings are tried with one seed, and the best one runs with others."""

from dataclasses import dataclass

from torch_thor.bench import Folder, Search, script, stages


@dataclass(frozen=True)
class Trial:
    method: str
    lr: float
    seed: int

    @property
    def key(self):
        return f"{self.method}-{self.lr:g}-{self.seed}"

    def run(self):
        return {"score": -abs(self.lr - {"a": 0.2, "b": 0.4}[self.method]) + self.seed}


def test_the_best_setting_of_each_method_runs_with_the_other_seeds(tmp_path):
    store = Folder(tmp_path)

    def searches():
        for method in "ab":
            tries = [Trial(method, lr, 10) for lr in (0.1, 0.2, 0.4)]
            yield Search(tries, lambda run: store.read(run.key)["score"], seeds=(3, 4))

    script.measure(store, stages(searches), workers=1)
    tried = [f"{method}-{lr}-10" for method in "ab" for lr in ("0.1", "0.2", "0.4")]
    chosen = ["a-0.2-3", "a-0.2-4", "b-0.4-3", "b-0.4-4"]
    assert sorted(path.stem for path in tmp_path.glob("*.json")) == sorted(tried + chosen)


def test_the_first_of_equal_settings_is_taken():
    assert Search([Trial("a", 0.1, 10), Trial("a", 0.2, 10)], lambda run: 1.0).best().lr == 0.1
