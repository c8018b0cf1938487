"""Which checkpoint is loaded, what is refused instead, and in which words."""

import argparse
import itertools
import pickle
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import CheckpointException, FileSystemReader

from megagate.checkpoint.fit import _check_vocabulary
from megagate.checkpoint.load import TRACKER, choose_checkpoint, common_state, find_complete, missing_piece
from megagate.checkpoint.pickles import read_index
from megagate.errors import EXIT_USER_ERROR, UserError
from tests import commands
from tests.checkpoint.conftest import Trained
from tests.checkpoint.training import DISTRIBUTED, SMALL, parse_in_rank, train_in_rank
from tests.distributed import ROOT, run_distributed

FLAGS = [*DISTRIBUTED, "--num-layers", "2"]


@pytest.fixture(scope="session")
def written(trained: Trained) -> Path:
    return trained(1, FLAGS)


@pytest.fixture
def directory(written: Path, tmp_path: Path) -> Path:
    """Checkpoints of steps 2 and 4 that a test may spoil."""
    return shutil.copytree(written, tmp_path / "checkpoints")


def arguments(load: Path | None, **others: Any) -> argparse.Namespace:
    defaults = {"ckpt_step": None, "pretrained_checkpoint": None, "allow_fresh_start": False}
    return argparse.Namespace(load=None if load is None else str(load), **{**defaults, **others})


def shard(checkpoint: Path) -> Path:
    """Return the largest file with tensors."""
    return max(checkpoint.glob("*.distcp"), key=lambda path: path.stat().st_size)


# ---------------------------------------------------------------------------------------------------------------------
# Which checkpoint


def test_the_tracked_checkpoint_is_chosen(directory: Path) -> None:
    args = arguments(directory)
    assert choose_checkpoint(args) == directory / "iter_0000004"
    assert args.ckpt_step is None
    assert missing_piece(directory / "iter_0000004") is None


def test_a_step_may_be_chosen(directory: Path) -> None:
    assert choose_checkpoint(arguments(directory, ckpt_step=2)) == directory / "iter_0000002"


def test_a_checkpoint_newer_than_the_tracker_is_not_finished(directory: Path) -> None:
    (directory / TRACKER).write_text("2\n")
    assert find_complete(directory) == directory / "iter_0000002"


@pytest.mark.parametrize("present", ["iter_0000004", "release"])
def test_without_a_tracker_the_newest_complete_one_is_chosen(directory: Path, present: str) -> None:
    (directory / TRACKER).unlink()
    if present == "release":
        shutil.copytree(directory / "iter_0000004", directory / "release")  # Megatron loads it only if tracked
    args = arguments(directory)
    assert choose_checkpoint(args) == directory / "iter_0000004"
    assert args.ckpt_step == 4  # else Megatron would find no tracker and train from scratch


def test_a_release_is_chosen(directory: Path) -> None:
    (directory / "iter_0000004").rename(directory / "release")
    (directory / TRACKER).write_text("release")
    args = arguments(directory)
    assert choose_checkpoint(args) == directory / "release"
    assert args.ckpt_step is None
    shard(directory / "release").unlink()
    with pytest.raises(UserError, match=r"release is incomplete: __\d+_\d+.distcp is missing; restore the file"):
        choose_checkpoint(arguments(directory))


def test_nothing_to_load_is_no_choice() -> None:
    assert choose_checkpoint(arguments(None)) is None


@pytest.mark.parametrize("exists", [True, False])
def test_an_empty_directory_is_refused(tmp_path: Path, exists: bool) -> None:
    target = tmp_path if exists else tmp_path / "missing"
    with pytest.raises(UserError) as failure:
        choose_checkpoint(arguments(target))
    assert str(failure.value) == (
        f"--load {target} holds no checkpoint (latest_checkpointed_iteration.txt is missing): correct the path, or add "
        "--allow-fresh-start to train from scratch when there is none"
    )
    args = arguments(target, allow_fresh_start=True)
    assert choose_checkpoint(args) is None
    assert args.load is None


def test_a_fresh_start_is_not_taken_where_there_is_a_checkpoint(directory: Path) -> None:
    args = arguments(directory, allow_fresh_start=True)
    assert choose_checkpoint(args) == directory / "iter_0000004"
    assert args.load == str(directory)
    for checkpoint in directory.glob("iter_*"):
        (checkpoint / ".metadata").unlink()
    with pytest.raises(UserError, match="no complete checkpoint"):  # they are there: someone should look at them
        choose_checkpoint(arguments(directory, allow_fresh_start=True))


def test_a_first_save_that_was_interrupted_is_no_checkpoint(directory: Path) -> None:
    (directory / TRACKER).unlink()
    for checkpoint in directory.glob("iter_*"):
        (checkpoint / ".metadata").unlink()
    with pytest.raises(UserError, match="no complete checkpoint"):
        choose_checkpoint(arguments(directory))
    args = arguments(directory, allow_fresh_start=True)
    assert choose_checkpoint(args) is None
    assert args.load is None


def test_a_pretrained_checkpoint_is_taken_where_there_is_no_other(directory: Path, tmp_path: Path) -> None:
    for load in (None, tmp_path / "empty"):
        args = arguments(load, pretrained_checkpoint=str(directory))
        assert choose_checkpoint(args) == directory / "iter_0000004"
    args = arguments(directory, pretrained_checkpoint=str(tmp_path / "empty"))
    assert choose_checkpoint(args) == directory / "iter_0000004"
    args = arguments(tmp_path / "empty", pretrained_checkpoint=str(tmp_path / "empty"), allow_fresh_start=True)
    with pytest.raises(UserError, match=r"^--pretrained-checkpoint .* holds no checkpoint .*: correct the path$"):
        choose_checkpoint(args)


# ---------------------------------------------------------------------------------------------------------------------
# Incomplete checkpoints


def truncate(path: Path) -> None:
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - 1)


def remove_shard(checkpoint: Path) -> None:
    shard(checkpoint).unlink()


def truncate_shard(checkpoint: Path) -> None:
    truncate(shard(checkpoint))


def remove_configuration(checkpoint: Path) -> None:
    (checkpoint / "metadata.json").unlink()


def damage_configuration(checkpoint: Path) -> None:
    truncate(checkpoint / "metadata.json")


def remove_index(checkpoint: Path) -> None:
    (checkpoint / ".metadata").unlink()


def truncate_index(checkpoint: Path) -> None:
    truncate(checkpoint / ".metadata")


def empty_index(checkpoint: Path) -> None:
    (checkpoint / ".metadata").write_bytes(b"")


def replace_index(checkpoint: Path) -> None:
    (checkpoint / ".metadata").write_bytes(pickle.dumps({"no": "index"}))


def remove_directory(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)


class Payload:
    """Creates a file when a plain unpickler reads it."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.target,)


def plant_code(checkpoint: Path) -> None:
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Payload(checkpoint / "it ran")))


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (remove_shard, r"is incomplete: __\d+_\d+\.distcp is missing"),
    (truncate_shard, r"is incomplete: __\d+_\d+\.distcp has \d+ of \d+ bytes"),
    (remove_configuration, r"is incomplete: metadata\.json is missing"),
    (damage_configuration, r"is incomplete: metadata\.json cannot be read \(.*\)"),
    (remove_index, r"is incomplete: \.metadata is missing"),
    (truncate_index, r"is incomplete: \.metadata cannot be read \(.*\)"),
    (empty_index, r"is incomplete: \.metadata cannot be read \(EOFError: .*\)"),
    (replace_index, r"is incomplete: \.metadata cannot be read \(UnpicklingError: it holds a dict\)"),
    (
        plant_code,
        r"is incomplete: \.metadata cannot be read \(UnpicklingError: it refers to \S+, which no index needs\)",
    ),
    (remove_directory, r"does not exist"),
]


@pytest.mark.parametrize(("damage", "reason"), DAMAGES, ids=[damage.__name__ for damage, _ in DAMAGES])
def test_an_incomplete_checkpoint_is_passed_over(
    directory: Path, damage: Callable[[Path], None], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = directory / "iter_0000004"
    damage(newest)
    args = arguments(directory)
    assert choose_checkpoint(args) == directory / "iter_0000002"
    assert args.ckpt_step == 2
    said = capsys.readouterr().out
    assert re.fullmatch(rf"megagate: {re.escape(str(newest))} {reason}; loading iter_0000002 instead\n", said)
    with pytest.raises(
        UserError, match=rf"^no complete checkpoint in .*: .*iter_0000004 {reason}; restore the file or"
    ):
        choose_checkpoint(arguments(directory, ckpt_step=4))
    damage(directory / "iter_0000002")
    with pytest.raises(
        UserError, match=rf"^no complete checkpoint in .*: .*iter_0000004 {reason}; restore the file or"
    ):
        choose_checkpoint(arguments(directory))
    assert not list(directory.rglob("it ran"))


def test_only_the_first_rank_says_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    remove_index(directory / "iter_0000004")
    assert find_complete(directory) == directory / "iter_0000002"
    assert capsys.readouterr().out == ""


def test_a_missing_step_is_refused(directory: Path) -> None:
    with pytest.raises(UserError, match=r"^no complete checkpoint in .*: .*iter_0000003 does not exist; restore"):
        choose_checkpoint(arguments(directory, ckpt_step=3))


@pytest.mark.parametrize("text", ["", "four", "-1", "4.0", "\u00b2"])
def test_a_damaged_tracker_is_refused(directory: Path, text: str) -> None:
    (directory / TRACKER).write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=rf"{TRACKER} must hold an iteration or 'release', not '{text}': write the one"):
        choose_checkpoint(arguments(directory))


def test_a_tracker_that_is_no_text_is_refused(directory: Path) -> None:
    (directory / TRACKER).write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"^cannot read the checkpoints in .*: 'utf-8' codec"):
        choose_checkpoint(arguments(directory))


@pytest.mark.parametrize("method", ["iterdir", "read_text", "read_bytes"])
def test_an_unreadable_directory_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    def forbidden(self: Path, *args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, method, forbidden)
    with pytest.raises(UserError, match=r"^cannot read the checkpoints in .*: \[Errno 13\] Permission denied"):
        choose_checkpoint(arguments(directory))


def test_the_older_format_is_left_to_megatron(tmp_path: Path) -> None:
    (tmp_path / "iter_0000004" / "mp_rank_00").mkdir(parents=True)
    (tmp_path / TRACKER).write_text("4")
    assert choose_checkpoint(arguments(tmp_path)) == tmp_path / "iter_0000004"


def test_the_index_is_the_one_that_torch_reads(written: Path) -> None:
    checkpoint = written / "iter_0000004"
    index, expected = read_index(checkpoint), FileSystemReader(checkpoint).read_metadata()
    assert index.state_dict_metadata == expected.state_dict_metadata
    assert index.storage_data == expected.storage_data


def overwrite(checkpoint: Path, beginning: str, content: bytes) -> None:
    """Write `content` over the beginning of the object whose key starts so; missing_piece sees no difference."""
    for key, piece in read_index(checkpoint).storage_data.items():
        if key.fqn.startswith(beginning):
            assert len(content) <= piece.length
            with open(checkpoint / piece.relative_path, "r+b") as file:
                file.seek(piece.offset)
                file.write(content)
    assert missing_piece(checkpoint) is None


def test_a_damaged_state_is_refused(directory: Path) -> None:
    checkpoint = directory / "iter_0000004"
    overwrite(checkpoint, "common_state", bytes(200))
    with pytest.raises(
        UserError, match=r"iter_0000004 cannot be read \(\w+: .*\): restore it, or choose one by --ckpt"
    ):
        common_state(checkpoint)


@pytest.mark.parametrize("part", ["common_state", "rng_state"])
def test_code_in_a_state_is_not_executed(directory: Path, tmp_path: Path, part: str) -> None:
    overwrite(directory / "iter_0000004", part, pickle.dumps(Payload(tmp_path / "it ran"), protocol=2))
    with pytest.raises((UserError, CheckpointException), match="UnpicklingError"):
        run_distributed(train_in_rank, 1, [*SMALL, *FLAGS, "--load", str(directory)], timeout=60)
    assert not (tmp_path / "it ran").exists()


# ---------------------------------------------------------------------------------------------------------------------
# Whether it fits


def parse(flags: list[str], world_size: int = 1) -> dict[str, Any]:
    return run_distributed(parse_in_rank, world_size, [*SMALL, *flags], timeout=60)[0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--gate-preset baseline", "the gate sdpa-headwise, but this run has baseline: use the same"),
        ("--gate-preset sdpa-elementwise", "the gate sdpa-headwise, but this run has sdpa-elementwise: use the same"),
        ("--num-layers 4", "the layers *E*E, but this run has *E*E*E*E: use the same"),
        ("--moe-layer-freq [0,1]", "the layers *E*E, but this run has *-*E: use the same"),
        ("--num-attention-heads 4", "--num-attention-heads 8, but this run has 4: use the same"),
        ("--num-query-groups 4", "--num-query-groups 2, but this run has 4: use the same"),
        ("--hidden-size 64", "--hidden-size 32, but this run has 64: use the same"),
        ("--num-experts 8", "--num-experts 4, but this run has 8: use the same"),
        ("--moe-router-topk 3", "--moe-router-topk 2, but this run has 3: use the same"),
        ("--norm-epsilon 1e-6", "--layernorm-epsilon 1e-05, but this run has 1e-06: use the same"),
        ("--vocab-size 200", "a tokenizer of 127 tokens, but this one has 200: use the same --tokenizer-model"),
        (
            "--rotary-base 1000000",
            "--rotary-base 10000, but this run has 1000000: use the same, or add --finetune to start anew from it",
        ),
        (
            "--train-iters 8",
            "--lr-decay-iters in samples (times --global-batch-size) 16, but this run has 32: use the same, or add "
            "--override-opt-param-scheduler to follow this run's schedule, or --use-checkpoint-opt-param-scheduler",
        ),
        ("--train-iters 8 --lr-decay-iters 4", "--train-iters in samples (times --global-batch-size) 16, but this run"),
        ("--lr 1e-2", "--lr 0.001, but this run has 0.01: use the same, or add --override-opt-param-scheduler"),
        (
            "--lr-warmup-iters 2",
            "a learning rate warm-up in samples (times --global-batch-size) of 4, but this run has 8",
        ),
        ("--weight-decay 0", "--start-weight-decay 0.1, but this run has 0.0: use the same, or add"),
        (
            "--optimizer muon --bf16",
            "--optimizer adam --use-distributed-optimizer, but this run has --optimizer muon",
        ),
    ],
)
def test_another_model_or_schedule_is_refused(written: Path, flags: str, message: str) -> None:
    with pytest.raises(UserError) as failure:
        parse([*FLAGS, "--load", str(written), *flags.split()])
    assert message in str(failure.value)
    assert "\n" not in str(failure.value)


def test_fewer_tokens_under_as_many_rows_are_another_tokenizer() -> None:
    def sizes(own: int, rows: int, kind: str = "SentencePieceTokenizer") -> argparse.Namespace:
        return argparse.Namespace(
            tokenizer_own_vocab_size=own, tokenizer_vocab_size=rows, tokenizer_model="t", tokenizer_type=kind
        )

    older, without = sizes(0, 384), sizes(384, 384, "NullTokenizer")  # the latter as imported without a tokenizer
    del older.tokenizer_own_vocab_size
    for fits in (sizes(340, 384), sizes(330, 384), older, without):
        _check_vocabulary(sizes(340, 384), fits, Path("c"))
    for apart, said in ((sizes(350, 384), "350 tokens, but t has 340"), (sizes(340, 340), "340 tokens, but t has 384")):
        with pytest.raises(UserError, match=f"^c was written with a tokenizer of {said}: use the same"):
            _check_vocabulary(sizes(340, 384), apart, Path("c"))


def test_one_optimizer_is_not_the_other(written: Path, trained: Trained) -> None:
    flags = ["--num-layers", "2", "--load", str(written)]
    kinds = "--optimizer adam --use-distributed-optimizer, but this run has --optimizer adam in fp32 without --use-dist"
    with pytest.raises(UserError, match=kinds):
        parse(flags)
    parse([*flags, "--no-load-optim"])
    plain = ["--num-layers", "2", "--load", str(trained(1, ["--num-layers", "2"]))]
    with pytest.raises(
        UserError, match="in fp32 without --use-distributed-optimizer, but this run has --optimizer adam"
    ):
        parse([*plain, *DISTRIBUTED])
    with pytest.raises(
        UserError, match=r"adam in fp32 without --use-distributed-optimizer, but .* adam in bf16 without"
    ):
        parse([*plain, "--bf16"])
    parse(plain)


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--ckpt-step 2",
        "--bf16",
        "--seed 3 --allow-data-change",
        "--micro-batch-size 2",
        "--pipeline-model-parallel-size 2",
        "--tensor-model-parallel-size 2 --sequence-parallel",
        "--expert-model-parallel-size 2",
        "--train-iters 8 --override-opt-param-scheduler",
        "--train-iters 8 --use-checkpoint-opt-param-scheduler",
        "--train-iters 8 --finetune",
        "--rotary-base 1000000 --finetune",
        "--global-batch-size 8 --train-iters 2 --lr-warmup-iters 0 --override-opt-param-scheduler",
    ],
)
def test_another_run_of_the_same_model_is_accepted(written: Path, flags: str) -> None:
    assert parse([*FLAGS, "--load", str(written), *flags.split()], world_size=2)["load"] == str(written)


def check_with_saved(written: Path, changes: dict[str, Any], removed: list[str], flags: list[str] = FLAGS) -> None:
    """Check a run against a checkpoint whose arguments are those of `written` after some changes."""
    from unittest import mock

    from megagate.checkpoint import fit
    from megagate.pretrain.arguments import parse

    common = common_state(written / "iter_0000004")
    for name, value in changes.items():
        setattr(common["args"], name, value)
    for name in removed:
        delattr(common["args"], name)
    with mock.patch.object(fit, "common_state", lambda checkpoint: common):
        parse([*SMALL, *flags, "--load", str(written)])


@pytest.mark.parametrize(
    "other", ["sdpa-elementwise-silu", "sdpa-elementwise-ns-sigmoid", "sdpa-elementwise-shared", "query-elementwise"]
)
def test_a_gate_of_the_same_size_is_refused(written: Path, other: str) -> None:
    """Megatron would load it: the shapes agree."""
    saved = {"gate_preset": other, "attention_output_gate": False}
    with pytest.raises(UserError, match=f"with the gate {other}, but this run has sdpa-elementwise: use the same"):
        run_distributed(check_with_saved, 1, written, saved, [], [*FLAGS, "--gate-preset", "sdpa-elementwise"])


def test_megatrons_own_gate_is_the_preset(written: Path) -> None:
    saved = {"gate_preset": None, "attention_output_gate": True}
    run_distributed(check_with_saved, 1, written, saved, [], [*FLAGS, "--gate-preset", "sdpa-elementwise"])


def test_axes_of_a_gate_are_named(written: Path) -> None:
    saved = {"gate_preset": None, "attention_output_gate": False, "gate_position": "key", "gate_combine": "add"}
    with pytest.raises(
        UserError, match="with the gate --gate-position key --gate-combine add, but this run has sdpa-head"
    ):
        run_distributed(check_with_saved, 1, written, saved, [])


def test_a_schedule_in_samples_is_compared_in_samples(written: Path) -> None:
    iterations = {"--train-iters", "--lr-warmup-iters"}
    flags = [flag for before, flag in itertools.pairwise(["", *SMALL, *FLAGS]) if not {before, flag} & iterations]
    flags += ["--load", str(written), "--lr-warmup-samples", "4"]
    run_distributed(parse_in_rank, 1, [*flags, "--train-samples", "16"])
    with pytest.raises(UserError, match="was written with --lr-decay-samples 16, but this run has 20: use the same"):
        run_distributed(parse_in_rank, 1, [*flags, "--train-samples", "20"])


GPT = {"hybrid_layer_pattern": None, "num_layers": 2, "moe_layer_freq": 1}


def test_a_checkpoint_of_megatrons_gpt_model_is_compared_by_blocks(written: Path) -> None:
    run_distributed(check_with_saved, 1, written, GPT, [])
    with pytest.raises(UserError, match=re.escape("the layers *E*E*E, but this run has *E*E: use the same")):
        run_distributed(check_with_saved, 1, written, {**GPT, "num_layers": 3}, [])
    with pytest.raises(UserError, match=re.escape("the layers *E*-, but this run has *E*E: use the same")):
        run_distributed(check_with_saved, 1, written, {**GPT, "moe_layer_freq": 2}, [])


def test_layers_that_are_not_here_are_refused(written: Path) -> None:
    with pytest.raises(UserError, match="--multi-latent-attention True, but this run has False: use the same"):
        run_distributed(check_with_saved, 1, written, {**GPT, "multi_latent_attention": True}, [])


def remove_most(written: Path) -> None:
    keep = {"gate_preset", "use_distributed_optimizer"}
    names = set(vars(common_state(written / "iter_0000004")["args"])) - keep
    check_with_saved(written, {}, sorted(names))


def test_arguments_that_an_older_version_did_not_have_are_skipped(written: Path) -> None:
    run_distributed(remove_most, 1, written)


# ---------------------------------------------------------------------------------------------------------------------
# The whole command


def test_a_fresh_start_trains(tmp_path: Path) -> None:
    argv = [*SMALL, *FLAGS, "--train-iters", "2", "--save", str(tmp_path), "--load", str(tmp_path)]
    run_distributed(train_in_rank, 1, [*argv, "--save-interval", "2", "--allow-fresh-start"], timeout=60)
    assert (tmp_path / TRACKER).read_text() == "2"


def test_a_passed_over_checkpoint_is_not_loaded(directory: Path) -> None:
    truncate_shard(directory / "iter_0000004")
    argv = [*SMALL, *FLAGS, "--load", str(directory), "--save", str(directory), "--save-interval", "4"]
    run_distributed(train_in_rank, 1, argv, timeout=60)
    assert missing_piece(directory / "iter_0000004") is None  # written again


def command(argv: list[str]) -> subprocess.CompletedProcess[str]:
    return commands.run("megagate.pretrain", [*SMALL, *FLAGS, *argv], directory=ROOT, timeout=120)


def errors(result: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in result.stderr.splitlines() if line.startswith("error:") or "Traceback" in line]


def test_the_command_says_one_sentence(tmp_path: Path) -> None:
    result = command(["--load", str(tmp_path)])
    assert result.returncode == EXIT_USER_ERROR
    (error,) = errors(result)
    assert error.startswith(f"error: --load {tmp_path} holds no checkpoint")


@pytest.mark.full
@pytest.mark.parametrize("damage", [plant_code, truncate_shard])
def test_the_command_says_what_is_damaged(directory: Path, damage: Callable[[Path], None]) -> None:
    damage(directory / "iter_0000004")
    result = command(["--load", str(directory), "--ckpt-step", "4"])
    assert result.returncode == EXIT_USER_ERROR
    (error,) = errors(result)
    assert error.startswith(f"error: no complete checkpoint in {directory}: ")
