"""The LightningModule: it learns digits, and its checkpoint loads with the optimizer's state."""

import pytest
import torch

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("optimizer", ["adamw", "thor-muon", "thor"])
def test_it_learns_and_its_checkpoint_loads(optimizer, tmp_path, monkeypatch):
    import lightning_module

    monkeypatch.chdir(tmp_path)
    file = tmp_path / f"{optimizer}.ckpt"
    words = ["--optimizer", optimizer, "--width", "8", "--epochs", "3", "--out", str(tmp_path)]
    found = lightning_module.main(words)[optimizer]
    assert found["val_accuracy"] > (0.4 if optimizer == "thor" else 0.85)
    model = lightning_module.Classifier.load_from_checkpoint(file, weights_only=False)
    saved = torch.load(file, weights_only=False)
    assert saved["global_step"] == model.hparams["steps"] == 3 * (1438 // 64)
    for name, weight in model.state_dict().items():
        assert weight.equal(saved["state_dict"][name])
    (optimizers, _) = model.configure_optimizers()
    optimizers[0].load_state_dict(saved["optimizer_states"][0])
    assert optimizers[0].param_groups[0]["lr"] == 0.0  # where the schedule has ended
