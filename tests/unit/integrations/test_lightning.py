"""Lightning's trainer on one device: saves in the background, removes behind a save, resumes to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

import hpdcp
from hpdcp import FileSystemWriter
from hpdcp._base.errors import HpdcpError, NotSupportedError, StorageError
from hpdcp.integrations.lightning import HpdcpCheckpointIO
from hpdcp_backends.local import LocalBackend


class Model(BoringModel):  # type: ignore[misc]  # is not typed
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.losses: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.layer(batch).square().mean()
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.layer.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def trained(folder: Path, epochs: int, plugin: HpdcpCheckpointIO, *, resume: Path | None = None) -> Model:
    lightning.seed_everything(0, verbose=False)
    model = Model()
    checkpoints = ModelCheckpoint(dirpath=folder, save_top_k=2, monitor="epoch", mode="max", filename="{epoch}")
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=epochs, limit_train_batches=3, limit_val_batches=0, logger=False,
        enable_progress_bar=False, enable_model_summary=False, plugins=[plugin], callbacks=[checkpoints],
    )  # fmt: skip
    trainer.fit(model, ckpt_path=None if resume is None else str(resume))
    return model


def test_a_run_that_is_resumed_goes_on_to_the_bit(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", 4, HpdcpCheckpointIO())
    # The two best; the first two went once a later one was published.
    assert sorted(path.name for path in (tmp_path / "whole").iterdir()) == ["epoch=2.ckpt", "epoch=3.ckpt"]
    resumed = trained(tmp_path / "again", 4, HpdcpCheckpointIO(), resume=tmp_path / "whole/epoch=2.ckpt")
    assert resumed.losses == whole.losses[9:]
    assert resumed.global_step == whole.global_step == 12
    state = HpdcpCheckpointIO().load_checkpoint(tmp_path / "whole/epoch=3.ckpt", map_location="cpu", weights_only=True)
    assert state["hyper_parameters"] == {"width": 4}
    assert torch.equal(state["state_dict"]["layer.weight"], whole.layer.weight)
    # It is a checkpoint like any other.
    target = {"state_dict": {"layer.weight": torch.zeros_like(whole.layer.weight)}}
    hpdcp.load(target, checkpoint_id=tmp_path / "whole/epoch=3.ckpt")
    assert torch.equal(target["state_dict"]["layer.weight"], whole.layer.weight)


def test_a_checkpoint_is_not_removed_behind_a_save_that_failed(tmp_path: Path) -> None:
    plugin = HpdcpCheckpointIO()
    plugin.save_checkpoint({"w": torch.ones(3)}, tmp_path / "old")
    plugin.wait()
    (tmp_path / "in the way").write_text("a file")
    plugin.save_checkpoint({"w": torch.ones(3)}, tmp_path / "in the way" / "new")
    plugin.remove_checkpoint(tmp_path / "old")
    with pytest.raises(HpdcpError):
        plugin.teardown()
    assert plugin.load_checkpoint(tmp_path / "old")["w"].tolist() == [1, 1, 1]
    plugin.remove_checkpoint(tmp_path / "old")
    assert not (tmp_path / "old").exists()


def test_a_removal_that_fails_is_told_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plugin = HpdcpCheckpointIO()
    plugin.save_checkpoint({"w": torch.ones(3)}, tmp_path / "old")
    plugin.save_checkpoint({"w": torch.ones(3)}, tmp_path / "new")

    def refuse(self: LocalBackend, keys: object) -> None:
        raise StorageError("read-only")

    monkeypatch.setattr(LocalBackend, "delete", refuse)
    plugin.remove_checkpoint(tmp_path / "old")
    plugin.wait()
    assert "could not be removed" in caplog.text


def test_files_of_lightning_are_loaded_and_removed_as_well(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "old.ckpt")
    plugin = HpdcpCheckpointIO()
    assert plugin.load_checkpoint(tmp_path / "old.ckpt", weights_only=True)["w"].tolist() == [1, 1, 1]
    plugin.remove_checkpoint(tmp_path / "old.ckpt")
    assert not (tmp_path / "old.ckpt").exists()


def test_a_map_of_locations_is_refused(tmp_path: Path) -> None:
    hpdcp.save({"w": torch.ones(3)}, storage_writer=FileSystemWriter(tmp_path))
    with pytest.raises(NotSupportedError, match="map_location"):
        HpdcpCheckpointIO().load_checkpoint(tmp_path, map_location={"cuda:0": "cpu"})  # type: ignore[arg-type]
