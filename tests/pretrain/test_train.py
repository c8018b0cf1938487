"""The entry point as users start it: one process, torchrun, real text, and the ways in which it refuses."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

from tests import commands
from tests.distributed import run_distributed
from tests.training import TINY, scalars, train

ROOT = Path(__file__).resolve().parents[2]


def environment(**variables: str) -> dict[str, str]:
    here = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return dict(here, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES="", **variables)


def started(argv: list[str], directory: Path, ranks: int | None = None) -> subprocess.CompletedProcess:
    """Start the trainer as a user does: on one process, or under torchrun on `ranks`."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    return subprocess.run(
        [sys.executable, *launcher, "-m", "megagate.pretrain", *argv],
        cwd=directory,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def pretrain(argv: list[str], directory: Path, **variables: str) -> subprocess.CompletedProcess:
    """Run the trainer on one process that has its imports already, with more environment variables."""
    return commands.run("megagate.pretrain", argv, directory=directory, environment=environment(**variables))


def losses(stdout: str) -> list[str]:
    return re.findall(r"lm loss: (\S+) ", stdout)


def test_one_process_without_torchrun(tmp_path: Path) -> None:
    result = started([*TINY, "--gate-preset", "sdpa-headwise", "--tensorboard-dir", str(tmp_path / "tb")], tmp_path)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "megagate: no CUDA device found; running on the CPU platform (gloo, torch backend)"
    assert "megagate: gate sdpa-headwise, layers *E*E" in lines
    assert len(losses(result.stdout)) == 2
    assert len(lines) <= 6, result.stdout  # the 900 arguments are in the log
    assert result.stderr == ""
    log = (tmp_path / "tb" / "logs" / "rank_0.log").read_text()
    assert "moe_router_dtype" in log
    assert set(scalars(tmp_path / "tb")["lm loss"]) == {1, 2}


def test_verbose_shows_everything(tmp_path: Path) -> None:
    result = pretrain([*TINY, "--train-iters", "1", "--verbose"], tmp_path)
    assert result.returncode == 0, result.stderr
    assert "moe_router_dtype" in result.stdout
    assert not (tmp_path / "runs").exists()


def test_torchrun_gives_the_loss_of_one_process(tmp_path: Path) -> None:
    """From the same seed, not from a checkpoint: initialisation does not depend on the layout."""
    model = [*TINY, "--gate-preset", "sdpa-elementwise"]
    layout = "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2".split()
    alone = pretrain(model, tmp_path)
    together = started([*model, *layout], tmp_path, ranks=2)
    assert together.returncode == 0, together.stderr
    assert losses(together.stdout) == losses(alone.stdout)
    assert together.stdout.count("running on the CPU platform") == 1


@pytest.mark.parametrize("preset", ["sdpa-constant", "output-elementwise"])
def test_communication_that_overlaps_changes_nothing(preset: str, tmp_path: Path) -> None:
    """A parameter whose module is not called would be used before the step's new value has arrived."""
    overlap = ["--overlap-grad-reduce", "--overlap-param-gather"]
    for name, flags in (("plain", []), ("overlap", overlap)):
        argv = [*TINY, "--gate-preset", preset, "--train-iters", "4", "--lr", "1e-2", *flags]
        run_distributed(train, 2, [*argv, "--tensorboard-dir", str(tmp_path / name)], timeout=100)
    plain, overlapped = (scalars(tmp_path / name)["lm loss"] for name in ("plain", "overlap"))
    assert len(set(plain.values())) == 4
    assert overlapped == pytest.approx(plain, rel=1e-6)


def changed_by_training(argv: list[str]) -> list[str]:
    """Train in a rank, and return the functions of Megatron's that are others afterwards."""
    from megatron.core import dist_checkpointing
    from megatron.training import training

    from megagate.platform import cpu

    cpu.activate_training()  # which stays
    places = [(dist_checkpointing, "save")]
    names = ("train_step", "training_log", "print_rank_last", "save_checkpoint", "build_pretraining_data_loader")
    places += [(training, name) for name in names]
    before = [getattr(module, name) for module, name in places]
    train(argv)
    return [name for (module, name), original in zip(places, before, strict=True) if getattr(module, name) != original]


def test_megatrons_functions_are_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a process that has trained would wait in a later save for ranks that have not."""
    monkeypatch.setenv("MEGAGATE_SUPERVISE", str(tmp_path / "supervise"))
    argv = [*TINY, "--save", str(tmp_path / "save"), "--save-interval", "2"]
    assert run_distributed(changed_by_training, 1, argv, timeout=100) == [[]]
    assert (tmp_path / "supervise" / "progress").read_text().split()[1] == "2"


def write_dataset(prefix: Path, documents: int = 20, length: int = 100, largest: int = 254) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    generator = numpy.random.default_rng(0)
    for _ in range(documents):
        builder.add_document(generator.integers(0, largest + 1, length), [length])
    builder.finalize(f"{prefix}.idx")


def on_data(*prefixes: str) -> list[str]:
    return [flag for flag in TINY if flag != "--mock-data"] + ["--data-path", *prefixes]


def test_blended_data(tmp_path: Path) -> None:
    write_dataset(tmp_path / "a")
    write_dataset(tmp_path / "b", documents=50)
    argv = [*on_data("0.3", str(tmp_path / "a"), "0.7", str(tmp_path / "b")), "--split", "90,10,0"]
    result = pretrain([*argv, "--data-cache-path", str(tmp_path / "cache"), "--eval-iters", "1"], tmp_path)
    assert result.returncode == 0, result.stderr
    assert "validation loss at iteration 2" in result.stdout


def refused(result: subprocess.CompletedProcess, message: str) -> None:
    """Check for one sentence on standard error, status 2, and no traceback."""
    assert result.returncode == 2, (result.stdout, result.stderr)
    assert re.search(message, result.stderr), result.stderr
    assert len(result.stderr.splitlines()) == 1, result.stderr


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([*TINY, "--gate-preset", "sdpa-headwis"], r"^error: there is no gate preset 'sdpa-headwis'; did you mean"),
        ([*TINY, "--load", "nothing"], r"^error: --load nothing holds no checkpoint .*--allow-fresh-start"),
        ([*TINY, "--min-lr", "1"], r"^error: Megatron refuses the arguments: "),
        ([*TINY, "--moe-router-topk", "1"], r"^error: Megatron refuses the model: Please use --moe-router-pre-softmax"),
        ([*TINY, "--tokenizer-type", "SentencePieceTokenizer"], r"^error: Megatron refuses the arguments: "),
    ],
)
def test_refused_in_one_sentence(argv: list[str], message: str, tmp_path: Path) -> None:
    refused(pretrain(argv, tmp_path), message)
    assert list(tmp_path.iterdir()) == []


def test_refused_by_a_process_of_its_own(tmp_path: Path) -> None:
    """What its imports print stays out of sight too."""
    refused(started([*TINY, "--load", "nothing"], tmp_path), r"^error: --load nothing holds no checkpoint")


def test_truncated_data(tmp_path: Path) -> None:
    write_dataset(tmp_path / "a")
    data = tmp_path / "a.bin"
    data.write_bytes(data.read_bytes()[:-10])
    refused(pretrain(on_data(str(tmp_path / "a")), tmp_path), r"a.bin has 3990 bytes but .*a.idx describes 4000")


def test_data_of_another_vocabulary(tmp_path: Path) -> None:
    write_dataset(tmp_path / "a", largest=700)
    argv = [*on_data(str(tmp_path / "a")), "--split", "100,0,0"]
    refused(pretrain(argv, tmp_path), r"the data hold the token \d+, but the model's vocabulary has 256 tokens")


def test_data_that_were_preprocessed_again(tmp_path: Path) -> None:
    """The index cache of the first run is not that of the second, though path and number of samples are the same."""
    argv = [*on_data(str(tmp_path / "a")), "--split", "100,0,0", "--data-cache-path", str(tmp_path / "cache")]
    for documents in (50, 10):
        write_dataset(tmp_path / "a", documents)
        result = pretrain(argv, tmp_path)
        assert result.returncode == 0, result.stderr
    assert len({path.name.split("-")[0] for path in (tmp_path / "cache").iterdir()}) == 2


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    argv = [*TINY, "--save", "file/checkpoints", "--save-interval", "1"]
    refused(pretrain(argv, tmp_path), r"^error: cannot write file/checkpoints/logs/rank_0.log: Not a directory")


def test_help(tmp_path: Path) -> None:
    result = started(["--help"], tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert result.stdout.startswith("usage: megagate.pretrain")
    assert "--gate-preset NAME" in result.stdout


def test_data_too_small_for_the_split(tmp_path: Path) -> None:
    write_dataset(tmp_path / "a", documents=1, length=10)
    argv = [*on_data(str(tmp_path / "a")), "--split", "50,50,0", "--eval-iters", "1"]
    refused(pretrain(argv, tmp_path), r"^error: the datasets cannot be built: ")


def test_several_tasks_without_ranks(tmp_path: Path) -> None:
    refused(
        pretrain(TINY, tmp_path, SLURM_STEP_NUM_TASKS="4"),
        r"srun started 4 tasks, but RANK is not set, and SLURM_PROCID",
    )


def test_under_torchrun_one_rank_says_it(tmp_path: Path) -> None:
    """With the variables that torchrun sets."""
    argv = [*TINY, "--tensor-model-parallel-size", "2"]
    first, second = (
        pretrain(argv, tmp_path, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="1")
        for rank in "01"
    )
    refused(first, "are trained only under --sequence-parallel")
    assert (second.returncode, second.stdout, second.stderr) == (2, "", "")
