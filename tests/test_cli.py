"""``raggedshard train``: it ends with 0 only if the sharded and the unsharded model agree, and says where rows lie."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from raggedshard.cli import mindspore_start
from raggedshard.cli.backend import Backend
from raggedshard.cli.comparison import Comparison, ParameterDifference, ParameterLayout, Tolerance
from raggedshard.cli.data import Corpus, byte_corpus, word_corpus
from raggedshard.cli.main import app
from raggedshard.cli.recipes import GPTConfig, initial_weights
from raggedshard.cli.report import Reporter, draw_losses
from raggedshard.cli.torch_model import GPT

TRAIN = ["raggedshard.cli.train", "--steps", "3"]
ON_MINDSPORE = ["--backend", "mindspore", "--world-size", 2]
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def run_module(*arguments: object, first_on_path: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *map(str, arguments)]
    path = os.pathsep.join(filter(None, [first_on_path and str(first_on_path), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=150,
        env=os.environ | {"PYTHONPATH": path},
    )


def losses_in(output: str) -> list[list[float]]:
    """The rows of the table of losses: step, sharded, unsharded, difference."""
    rows = [line.split() for line in output.partition("Loss, nats per token")[2].splitlines()]
    return [[float(number) for number in row] for row in rows if len(row) == 4 and row[0].isdigit()]


@pytest.mark.parametrize(
    ("model", "placement"),
    [("gpt", "RaggedShard((0,), (129, 128))"), ("gpt2", "RaggedShard((0,), (25129, 25128))")],
)
def test_both_models_train_equal_to_unsharded_on_two_processes(model: str, placement: str, tmp_path: Path):
    result = run_module(*TRAIN, "--model", model, "--world-size", 2, "--out", tmp_path)
    assert result.returncode == 0, result.stdout
    assert "Equal: sharded and unsharded training agree" in result.stdout
    assert placement in result.stdout  # of the embedding
    assert (tmp_path / "loss.png").read_bytes().startswith(PNG_SIGNATURE)


def test_models_that_differ_end_with_an_error(tmp_path: Path):
    result = run_module(*TRAIN, "--world-size", 2, "--reference-seed", 1, "--out", tmp_path)
    assert result.returncode == 1, result.stdout
    assert "Different: sharded and unsharded training do not agree" in result.stdout


def test_torchrun_runs_the_same_command(tmp_path: Path):
    result = run_module(*TORCHRUN, *TRAIN, "--out", tmp_path)
    assert result.returncode == 0, result.stdout
    assert result.stdout.count("Equal: sharded and unsharded training agree") == 1  # one rank reports
    assert "sharded over 2 processes" in result.stdout


@pytest.mark.parametrize(
    ("backend", "launcher", "environment"),
    [
        ("torch", "torchrun", {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2"}),
        ("mindspore", "msrun", {"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "2"}),
    ],
)
def test_a_launcher_and_a_different_world_size_is_an_error(
    backend: str, launcher: str, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(app, ["train", "--backend", backend, "--world-size", "3", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert f"{launcher} started 2 processes" in result.output


@pytest.fixture(scope="module")
def on_mindspore(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """A run that ends when one of its processes imports torch."""
    folder = tmp_path_factory.mktemp("mindspore")
    (folder / "torch.py").write_text("raise AssertionError('torch was imported')")
    return run_module(*TRAIN, *ON_MINDSPORE, "--out", folder, first_on_path=folder)


def test_mindspore_trains_equal_to_unsharded_without_torch(on_mindspore: subprocess.CompletedProcess[str]):
    output = on_mindspore.stdout
    assert on_mindspore.returncode == 0, output
    assert "Equal: sharded and unsharded training agree" in output
    assert "embedding.embedding_table is RaggedShard((0,), (129, 128))" in output
    picture = Path("".join(re.findall(r"Loss curves: (.*)", output)))
    assert picture.read_bytes().startswith(PNG_SIGNATURE)
    assert not re.search(r"WARN|INFO|ERROR", output)


def test_mindspore_trains_as_torch_does(on_mindspore: subprocess.CompletedProcess[str], tmp_path: Path):
    by_torch = run_module(*TRAIN, "--world-size", 2, "--out", tmp_path)
    expected, actual = losses_in(by_torch.stdout), losses_in(on_mindspore.stdout)
    assert len(expected) == 3, by_torch.stdout
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_models_that_differ_end_with_an_error_on_mindspore(tmp_path: Path):
    result = run_module(*TRAIN[:-1], 1, *ON_MINDSPORE, "--reference-seed", 1, "--out", tmp_path)
    assert result.returncode == 1, result.stdout
    assert "Different: sharded and unsharded training do not agree" in result.stdout


def test_mindspore_has_no_gpt2(tmp_path: Path):
    result = CliRunner().invoke(
        app, ["train", "--backend", "mindspore", "--model", "gpt2", "--out", str(tmp_path / "out")]
    )
    assert result.exit_code == 2
    assert "gpt2" in result.output and "mindspore" in result.output
    assert not (tmp_path / "out").exists()


def rank_0_raises(backend: Backend) -> bool:
    if backend.rank == 0:
        raise ValueError("the reason")
    backend.gather(np.zeros(1))
    return True


def rank_1_dies(backend: Backend) -> bool:
    if backend.rank == 1:
        os._exit(7)
    backend.gather(np.zeros(1))
    return True


@pytest.mark.parametrize(
    ("job", "message", "shown"), [(rank_0_raises, "rank 0", "the reason"), (rank_1_dies, "rank 1", "exit code 7")]
)
def test_a_mindspore_rank_that_fails_ends_the_command(job, message, shown, capfd: pytest.CaptureFixture):
    with pytest.raises(RuntimeError, match=message) as error:
        mindspore_start.run_ranks(2, job)
    assert shown in capfd.readouterr().err + str(error.value)


def test_initial_weights_depend_on_the_seed_and_leave_norms_alone():
    weights = initial_weights(GPTConfig(layers=1), seed=1)
    assert np.array_equal(
        weights["blocks.0.qkv.weight"], initial_weights(GPTConfig(layers=1), 1)["blocks.0.qkv.weight"]
    )
    assert not np.array_equal(weights["embedding.weight"], initial_weights(GPTConfig(layers=1), 2)["embedding.weight"])
    assert weights["blocks.0.mlp_up.weight"].std() == pytest.approx(0.02, rel=0.05)
    assert (weights["norm.weight"] == 1).all() and (weights["norm.bias"] == 0).all()


def test_padding_is_what_a_rank_lacks_of_the_longest_share():
    layout = ParameterLayout("w", (7, 8), "RaggedShard", rows=(2, 2, 2, 1), row_bytes=32)
    assert layout.uneven
    assert layout.padding_bytes == (0, 0, 0, 32)
    assert ParameterLayout("w", (2, 3), "RaggedShard", rows=(1, 1, 0, 0), row_bytes=12).padding_bytes == (0, 0, 12, 12)
    assert not ParameterLayout("w", (8, 8), "Shard", rows=(2, 2, 2, 2), row_bytes=32).uneven


def test_tolerance_is_relative_to_the_expected_value_and_no_nan_passes():
    tolerance = Tolerance(rtol=0.5, atol=1.0)
    assert tolerance.used(np.array([4.0, 10.0]), np.array([4.0, 8.0])) == pytest.approx(2 / 5)
    assert tolerance.used(np.array([math.nan]), np.array([1.0])) == math.inf
    assert tolerance.used(np.array([1.0]), np.array([math.inf])) == math.inf
    assert tolerance.used(np.zeros((0, 3)), np.zeros((0, 3))) == 0


@pytest.mark.parametrize(
    ("loss", "parameter_used", "equal"),
    [(2.0, 0.5, True), (2.001, 0.5, False), (2.0, 1.5, False), (math.nan, 0, False)],
)
def test_losses_and_parameters_must_both_agree(loss: float, parameter_used: float, equal: bool):
    comparison = Comparison([], [3.0, loss], [3.0, 2.0], ParameterDifference("w", 0.0, parameter_used))
    assert comparison.equal is equal


def test_a_comparison_without_compared_parameters_is_not_equal():
    assert not Comparison([], [1.0], [1.0]).equal


def test_batches_depend_on_seed_and_step_alone_and_targets_follow_inputs():
    corpus = Corpus(np.arange(1000), vocabulary=1000)
    inputs, targets = corpus.batch(seed=3, step=5, size=4, context=6)
    assert inputs.shape == targets.shape == (4, 6)
    assert np.array_equal(targets, inputs + 1)
    assert np.array_equal(inputs, corpus.batch(3, 5, 4, 6)[0])
    assert not np.array_equal(inputs, corpus.batch(3, 6, 4, 6)[0])
    assert not np.array_equal(inputs, corpus.batch(4, 5, 4, 6)[0])


def test_every_token_of_the_text_can_start_a_batch():
    corpus = Corpus(np.arange(5), vocabulary=5)
    starts = {corpus.batch(0, step, 1, 3)[0][0, 0].item() for step in range(50)}
    assert starts == {0, 1}


def test_the_byte_text_is_the_standard_library():
    tokens = byte_corpus().tokens
    first_file = bytes(tokens[: tokens.tolist().index(256)].tolist())
    assert b"__future__" in first_file
    assert tokens.min() >= 0 and tokens.max() == 256


def test_the_word_text_spreads_over_a_large_vocabulary_and_stays_inside_a_small_one():
    large, small = word_corpus(50257), word_corpus(100)
    assert len(np.unique(large.tokens)) > 20_000
    assert large.tokens.max() == 50256
    assert small.tokens.max() == 99 and len(small.tokens) == len(large.tokens)
    assert np.bincount(large.tokens).argmax() == 0  # the most frequent word has the first id


def test_gpt_ties_its_output_to_the_embedding_and_sees_no_later_token():
    model = GPT(GPTConfig(layers=1))
    assert model.lm_head.weight is model.embedding.weight
    tokens = torch.tensor([[1, 2, 3, 4]])
    changed = torch.tensor([[1, 2, 3, 5]])
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert before.shape == (1, 4, 257)
    assert torch.equal(before[:, :3], after[:, :3])
    assert not torch.equal(before[:, 3], after[:, 3])


def test_the_report_shows_the_same_parameter_of_all_blocks_as_one_line(capsys: pytest.CaptureFixture, tmp_path: Path):
    names = ["h.0.norm_1.bias", "h.1.norm_1.bias", "h.0.norm_2.bias", "h.1.norm_2.bias"]
    layouts = [ParameterLayout(name, (7,), "RaggedShard(dims=(0,))", (4, 3), 4) for name in names]
    layouts.append(ParameterLayout("head", (5, 2), "RaggedShard(dims=(0,))", (3, 2), 8))
    from raggedshard.cli.report import _layout_table

    Reporter(tmp_path).console.print(_layout_table(layouts, 2))
    lines = capsys.readouterr().out.splitlines()
    shown = {line.split()[0]: line.split()[1:] for line in lines if "RaggedShard" in line}
    assert list(shown) == ["h.0-1.norm_1.bias", "h.0-1.norm_2.bias", "head"]
    assert shown["h.0-1.norm_1.bias"] == ["(7,)", "RaggedShard", "4", "3", "0", "4", "2", "x", "4"]
    assert shown["head"] == ["(5,", "2)", "RaggedShard", "3", "2", "0", "8", "8"]
    assert any(line.split() == ["all", "together", "24"] for line in lines)


def test_a_long_run_that_writes_to_a_file_says_how_far_it_is(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    comparison = Comparison([], [1.5], [1.25])
    assert list(Reporter(tmp_path).track(range(2), comparison)) == [0, 1]
    assert capsys.readouterr().out == ""
    monkeypatch.setattr("raggedshard.cli.report.SECONDS_BETWEEN_LINES", 0)
    assert list(Reporter(tmp_path).track(range(2), comparison)) == [0, 1]
    assert capsys.readouterr().out.splitlines() == [f"step {step} of 2, loss 1.5000 and 1.2500" for step in (1, 2)]


def test_curves_of_a_single_step_can_be_drawn(tmp_path: Path):
    draw_losses(Comparison([], [1.0], [1.0]), tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(PNG_SIGNATURE)
