import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engine_worker import DTYPES, LIMIT, SCENARIOS
from oracles import assert_same, files, load
from safetensors.torch import load_file

from streamexport import ExportReport
from streamexport.sizes import parse_size

WORKER = Path(__file__).with_name("engine_worker.py")


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def world(request, tmp_path_factory):
    """A world of real DeepSpeed engines that has run every scenario: its directory and size."""
    out, size = tmp_path_factory.mktemp(f"world{request.param}"), request.param
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, WORKER, out],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    outputs = [rank.communicate(timeout=600)[0] for rank in ranks]
    for rank, output in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, output[-5000:]
    return out, size


def facts_of(world, name):
    out, size = world
    return [json.loads((out / name / f"facts-{rank}.json").read_text()) for rank in range(size)]


each_scenario = pytest.mark.parametrize("name", SCENARIOS)


@each_scenario
def test_the_export_holds_the_engines_weights(world, name):
    """D04, D22, D41: every parameter, also frozen ones, and persistent buffer; ties once; names, dtypes and bytes."""
    state = load_file(world[0] / name / "state.safetensors")
    exported = load(world[0] / name / "ours")
    if SCENARIOS[name].model == "tied":
        assert torch.equal(state.pop("lm_head.weight"), state["model.embed_tokens.weight"])
    assert_same(exported, state)
    floating = {tensor.dtype for key, tensor in exported.items() if tensor.is_floating_point() and key != "scale"}
    assert floating == {DTYPES[SCENARIOS[name].dtype]}


@pytest.mark.parametrize("name", [name for name, scenario in SCENARIOS.items() if scenario.model != "odd"])
def test_the_files_are_those_of_an_untouched_models_save_pretrained(world, name):
    """The same names, the same bytes: shards, index, configuration and generation configuration."""
    ours, theirs = world[0] / name / "ours", world[0] / name / "theirs"
    assert files(ours) == files(theirs)
    assert len(files(ours)) > 4
    for filename in files(ours):
        assert (ours / filename).read_bytes() == (theirs / filename).read_bytes(), filename


@each_scenario
def test_every_shard_is_within_the_limit_though_all_weights_share_a_buffer(world, name):
    """huggingface_hub's own splitter puts all views of a flat buffer into one shard."""
    for path in (world[0] / name / "ours").glob("*.safetensors"):
        tensors = load_file(path)
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        assert nbytes <= parse_size(LIMIT, "") or len(tensors) == 1
    for facts in facts_of(world, name):
        assert (facts["storages"] < facts["parameters"]) == (SCENARIOS[name].stage > 0)


@each_scenario
def test_all_ranks_return_an_equal_report(world, name):
    """What rank 0 wrote, on every rank."""
    reports = [ExportReport.from_json(facts["report"]) for facts in facts_of(world, name)]
    assert reports == [reports[0]] * world[1]
    names = {file.filename for file in reports[0].files}
    assert names == files(world[0] / name / "ours")
    assert reports[0].total_bytes == sum(tensor.nbytes for tensor in load(world[0] / name / "ours").values())


@each_scenario
def test_the_engine_is_as_it_was(world, name):
    """D15: parameter objects, their addresses, gradients, values; no thread is left."""
    for facts in facts_of(world, name):
        assert facts["unchanged"]
        assert facts["threads"] == []


@pytest.mark.parametrize("name", [name for name, scenario in SCENARIOS.items() if scenario.goes_on])
def test_training_goes_on_as_if_there_had_been_no_export(world, name):
    """D15: 2 + 2 steps with an export in between, against 4 without: losses and weights are equal bit for bit."""
    for facts in facts_of(world, name):
        assert len(facts["losses"]) == 4
        assert facts["losses"] == facts["losses without"]
        assert facts["weights equal"]


def test_the_scenarios_are_what_they_are_called(world):
    """Each kind of optimizer that DeepSpeed lays weights out with is among them."""
    kinds = {facts_of(world, name)[0]["optimizer"] for name in SCENARIOS}
    assert kinds >= {"DeepSpeedZeroOptimizer", "BF16_Optimizer", "FP16_UnfusedOptimizer", "AdamW"}


def told(world):
    return [json.loads((world[0] / f"told-{rank}.json").read_text()) for rank in range(world[1])]


def test_stage_3_is_refused_on_every_rank_before_anything_is_made(world):
    """D10: the engine and its module by name; a state dict by its placeholders."""
    for messages in told(world):
        assert "ZeRO stage 3 engine" in messages["engine"]
        assert "'model.embed_tokens.weight': ZeRO stage 3" in messages["module"]
        assert "'model.embed_tokens.weight': its shape is (0,)" in messages["weights"]
    assert not (world[0] / "stage3").exists()


def test_a_failure_on_one_rank_is_raised_on_all(world):
    """D14: the writing rank's and another's, with the reason; plans that differ; the next export works."""
    messages = told(world)
    assert messages[0]["disk"].startswith("InvalidArgumentError: out_dir=")
    assert messages[-1]["one rank"].startswith("InvalidArgumentError: dtype='no'")
    if world[1] == 2:
        assert "rank 0 failed: InvalidArgumentError" in messages[1]["disk"]
        assert "rank 1 failed: InvalidArgumentError: dtype='no'" in messages[0]["one rank"]
        assert all("planned another export" in message["plans"] for message in messages)
        assert not (world[0] / "x").exists()
    assert not any("after" in message for message in messages)
    assert load(world[0] / "after")


def test_an_export_that_only_rank_0_calls_is_an_error_not_a_hang(world):
    """D12: the message names the rule."""
    if world[1] == 2:
        for messages in told(world):
            assert "rank 1 did not call" in messages["alone"]
            assert "every rank of the job must call the export" in messages["alone"]
