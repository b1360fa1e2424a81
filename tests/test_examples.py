import os
import subprocess
import sys
from pathlib import Path

import torch
from oracles import assert_same, files, load

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(*command):
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "MASTER_PORT": "0"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_deepspeed_loop_and_re_sharding_run(tmp_path):
    """As their docstrings call them, on one rank and on two."""
    run(EXAMPLES / "deepspeed_loop.py", tmp_path / "one")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    out = run(*launcher, EXAMPLES / "deepspeed_loop.py", tmp_path / "two")
    assert out.count("exported ") == 1
    for name in ("one", "two"):
        weights = load(tmp_path / name)
        assert set(weights) == {"0.weight", "1.weight", "1.bias", "3.weight", "3.bias"}
        assert weights["3.weight"].dtype == torch.bfloat16
        assert len(files(tmp_path / name)) == 3
    out = run(EXAMPLES / "reshard.py", tmp_path / "two", tmp_path / "again", "1MB")
    assert "model.safetensors" in out
    assert files(tmp_path / "again") == {"model.safetensors"}
    assert_same(load(tmp_path / "again"), load(tmp_path / "two"))
