"""Lightning's trainer on two ranks that shard the model: resumed to the bit, and loaded by any other number."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.fsdp import fully_shard

import hpdcp
from hpdcp import offline_transform
from hpdcp._base.errors import MissingKeysError
from hpdcp.integrations.lightning import HpdcpModelParallelStrategy
from tests.support.job import Job
from tests.unit.integrations.test_lightning import Model

RANKS = 2


class Sharded(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.Linear(16, 2))

    def configure_model(self) -> None:
        for layer in [*self.layer, self.layer]:
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])


class Larger(Sharded):
    def __init__(self) -> None:
        super().__init__()
        self.layer.append(torch.nn.Linear(2, 2))


def trained(ranks: Job, folder: Path, epochs: int, *, resume: Path | None = None, kind: type[Sharded] = Sharded) -> Any:
    lightning.seed_everything(0, verbose=False)
    model = kind()
    strategy = HpdcpModelParallelStrategy(data_parallel_size=ranks.world_size, tensor_parallel_size=1)
    checkpoints = ModelCheckpoint(dirpath=folder, save_top_k=1, monitor="epoch", mode="max", filename="{epoch}")
    trainer = lightning.Trainer(
        accelerator="cpu", devices=ranks.world_size, max_epochs=epochs, limit_train_batches=3, limit_val_batches=0,
        logger=False, enable_progress_bar=False, enable_model_summary=False, strategy=strategy,
        callbacks=[checkpoints],
    )  # fmt: skip
    trainer.fit(model, ckpt_path=None if resume is None else str(resume))
    ranks.barrier()
    return model


def test_a_sharded_run_that_is_resumed_goes_on_to_the_bit(ranks: Job, folder: Path) -> None:
    assert os.environ["WORLD_SIZE"] == "2"
    trained(ranks, folder / "first", 2)
    whole = trained(ranks, folder / "whole", 3)
    assert [path.name for path in (folder / "first").iterdir()] == ["epoch=1.ckpt"]
    resumed = trained(ranks, folder / "again", 3, resume=folder / "first/epoch=1.ckpt")
    assert resumed.losses == whole.losses[6:]
    weights = {name: tensor.full_tensor() for name, tensor in whole.state_dict().items()}
    # One process alone, and any other number of ranks, finds the whole in it.
    alone = offline_transform.dcp_to_full_state_dict(folder / "whole/epoch=2.ckpt", include=["state_dict.*"])
    assert alone.keys() == {"state_dict"}
    assert {name: tensor.tolist() for name, tensor in alone["state_dict"].items()} == {
        name: tensor.tolist() for name, tensor in weights.items()
    }
    step = {"trainer": {"global_step": 0}}
    hpdcp.load(step, checkpoint_id=folder / "whole/epoch=2.ckpt")
    assert step["trainer"]["global_step"] == 9


def test_a_model_that_grew_is_refused_on_every_rank(ranks: Job, folder: Path) -> None:
    trained(ranks, folder / "first", 1)
    with pytest.raises(MissingKeysError, match=r"state_dict\.layer\.2\.weight"):
        trained(ranks, folder / "again", 2, resume=folder / "first/epoch=0.ckpt", kind=Larger)
