"""Conversions on disk: real classes of transformers, the trainer's own checkpoints, and what must be refused."""

import json
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor

from megagate.checkpoint.families import FAMILIES
from tests.checkpoint.conftest import Trained
from tests.checkpoint.conversion import RUN, Imported, convert, verify_in_rank
from tests.checkpoint.families.conversion import error_of, logits_in_rank
from tests.checkpoint.families.test_families import (
    EP2,
    MODELS,
    PP2,
    SIZES,
    TOLERANCE,
    TP2,
    TP4,
    expected_logits,
    reference,
)
from tests.checkpoint.training import train_in_rank
from tests.distributed import run_distributed
from tests.model.test_layouts import Layout

HuggingFace = Callable[[str], Path]


def run(*commands: str) -> list[str]:
    """Run the tools in one rank, and return what each has printed."""
    return run_distributed(convert, 1, *commands)[0]


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory: pytest.TempPathFactory) -> HuggingFace:
    """A function that returns the directory of a model of `MODELS`; not to be changed."""
    made: dict[str, Path] = {}

    def write(name: str) -> Path:
        if name not in made:
            made[name] = directory = tmp_path_factory.mktemp("hf") / name
            directory.mkdir()
            model = reference(name)
            if hasattr(model, "save_pretrained"):
                model.save_pretrained(directory)
            else:
                (directory / "config.json").write_text(json.dumps(model.config))
                tensors = {key: tensor.contiguous() for key, tensor in model.on_disk().items()}
                save_file(tensors, directory / "model.safetensors")
        return made[name]

    return write


@pytest.fixture(scope="module")
def imported(hugging_face: HuggingFace, tmp_path_factory: pytest.TempPathFactory) -> HuggingFace:
    """A function that returns the checkpoint of a model of `MODELS`; not to be changed."""
    made: dict[str, Path] = {}

    def write(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("ckpt") / name
            (output,) = run(f"import --hf {hugging_face(name)} --out {made[name]}")
            assert f"{MODELS[name].family.name}, " in output
        return made[name]

    return write


@pytest.fixture
def copy(hugging_face: HuggingFace, tmp_path: Path) -> Path:
    """A dense model of transformers that a test may damage."""
    return Path(shutil.copytree(hugging_face("qwen3"), tmp_path / "source"))


def weights(directory: Path) -> dict[str, Tensor]:
    """Return all tensors of a Hugging Face directory."""
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype
        assert torch.equal(tensor, second[name]), name


def assert_verified(output: str) -> None:
    assert "logits of" in output and not output.startswith("error"), output


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back(name: str, hugging_face: HuggingFace, imported: HuggingFace, tmp_path: Path) -> None:
    back, again = tmp_path / "back", tmp_path / "again"
    outputs = run(
        f"export --ckpt {imported(name)} --out {back}",
        f"import --hf {back} --out {again}",
        f"inspect --diff {imported(name)} {again}",
    )
    assert "bit for bit" in outputs[-1], outputs
    assert_same(weights(hugging_face(name)), weights(back))


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith("qwen")])
def test_transformers_computes_the_same(name: str, hugging_face: HuggingFace, tmp_path: Path) -> None:
    checkpoint = tmp_path / "ckpt"
    (output,) = run(f"import --hf {hugging_face(name)} --out {checkpoint} --verify")
    assert_verified(output)


def test_verify_finds_a_difference(copy: Path, imported: HuggingFace, tmp_path: Path) -> None:
    change_weights(lambda tensors: tensors[NAME.replace("q_proj", "v_proj")].mul_(1.01))(copy)
    assert "do not compute the same" in run_distributed(verify_in_rank, 1, copy, imported("qwen3"))[0]


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("qwen3_moe", Layout(ranks=2, tp=2, sp=True, ep=2)),
        ("qwen3_moe", PP2),
        ("qwen3_next", TP4),
        ("qwen3_next", EP2),
        ("official-headwise", TP2),
    ],
    ids=str,
)
def test_the_trainer_loads_it(name: str, layout: Layout, imported: HuggingFace) -> None:
    case = Imported(flags=layout.flags, checkpoint=str(imported(name)))
    outputs = [output for output in run_distributed(logits_in_rank, layout.ranks, case) if output is not None]
    assert outputs
    assert all(error_of(output, expected_logits(name)) < TOLERANCE for output in outputs)


@pytest.mark.parametrize(
    ("flags", "family"),
    [
        ("--gate-preset baseline", "qwen3_moe"),
        ("--gate-preset sdpa-headwise --use-distributed-optimizer", "megagate"),
    ],
)
def test_trained_on_a_layout(flags: str, family: str, trained: Trained, tmp_path: Path) -> None:
    """127 tokens in 128 rows, two ranks' parts, and an optimizer."""
    run_directory = trained(2, f"{flags} --tensor-model-parallel-size 2 --sequence-parallel".split())
    out, again = tmp_path / "out", tmp_path / "again"
    output, *_, difference = run(
        f"export --ckpt {run_directory} --out {out} --verify",
        f"import --hf {out} --out {again}",
        f"export --ckpt {again} --out {tmp_path / 'third'}",
        f"inspect --diff {out} {tmp_path / 'third'}",
    )
    assert f"{family}, " in output, output
    assert_verified(output)
    assert weights(out)["model.embed_tokens.weight"].shape[0] == 127
    assert "bit for bit" in difference


def test_files_of_a_size(hugging_face: HuggingFace, imported: HuggingFace, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    out = tmp_path / "out"
    run(f"export --ckpt {imported('qwen3_moe')} --out {out} --max-shard-size 20KB")
    assert len(list(out.glob("model-*.safetensors"))) > 2
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    for name, tensor in reference("qwen3_moe").state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)
    (output,) = run(f"import --hf {out} --out {tmp_path / 'ckpt'} --verify")
    assert_verified(output)


def test_pytorchs_own_format(copy: Path, imported: HuggingFace, tmp_path: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    first = {name: tensor for name, tensor in tensors.items() if "layers.0" in name}
    torch.save(first, copy / "a.bin")
    torch.save({name: tensor for name, tensor in tensors.items() if name not in first}, copy / "b.bin")
    index = {name: "a.bin" if name in first else "b.bin" for name in tensors}
    (copy / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    outputs = run(
        f"import --hf {copy} --out {tmp_path / 'ckpt'}", f"inspect --diff {imported('qwen3')} {tmp_path / 'ckpt'}"
    )
    assert "bit for bit" in outputs[-1], outputs


def test_another_data_type(imported: HuggingFace, hugging_face: HuggingFace, tmp_path: Path) -> None:
    (output,) = run(f"export --ckpt {imported('qwen3')} --out {tmp_path / 'out'} --dtype bf16")
    assert "written as bf16" in output
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    rounded = {name: tensor.bfloat16() for name, tensor in weights(hugging_face("qwen3")).items()}
    assert_same(rounded, weights(tmp_path / "out"))
    (output,) = run(f"import --hf {tmp_path / 'out'} --out {tmp_path / 'ckpt'}")
    assert "bf16: true" in (tmp_path / "ckpt" / "recipe.yaml").read_text()


def test_import_train_export_generate(tmp_path: Path) -> None:
    """A model with a tokenizer and more rows than that has tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    words = {word: number for number, word in enumerate(("<unk>", "<eos>", "attention", "is", "all", "you", "need"))}
    backend = Tokenizer(WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>")
    source, checkpoint, trained_on, out = (tmp_path / name for name in ("source", "ckpt", "trained", "out"))
    rope = {"rope_type": "default", "rope_theta": 1000.0}  # configurations change the one in SIZES
    changes = {"vocab_size": 30, "eos_token_id": 1, "rope_parameters": rope}
    model = Qwen3ForCausalLM(Qwen3Config(**{**SIZES, **changes}))
    model.save_pretrained(source)
    tokenizer.save_pretrained(source)
    (output,) = run(f"import --hf {source} --out {checkpoint} --verify")
    assert_verified(output)
    layout = f"--tensor-model-parallel-size 2 --save {trained_on} --save-interval 1 --eval-iters 0 --eval-interval 10"
    flags = f"--recipe {checkpoint}/recipe.yaml --load {checkpoint} --finetune {RUN} {layout} --num-workers 0"
    run_distributed(train_in_rank, 2, flags.split(), timeout=100)
    (output,) = run(f"export --ckpt {trained_on} --out {out} --verify --verify-text attention")
    assert_verified(output)
    exported = AutoModelForCausalLM.from_pretrained(out)
    assert exported.config.vocab_size == 30 and exported.config.eos_token_id == 1
    assert not torch.equal(exported.model.embed_tokens.weight, model.model.embed_tokens.weight)
    tokens = AutoTokenizer.from_pretrained(out)("attention is", return_tensors="pt")
    assert tokens["input_ids"].tolist() == [[2, 3]]
    assert exported.generate(**tokens, max_new_tokens=3, min_new_tokens=3).shape == (1, 5)


# ---------------------------------------------------------------------------------------------------------------------
# What must be refused

NAME = "model.layers.1.self_attn.q_proj.weight"


def change_weights(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        change(tensors)
        save_file(tensors, directory / "model.safetensors")

    return damage


def change_config(**values: Any) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | values))

    return damage


def leave_the_directory(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory.parent / "outside.safetensors")
    index = {"weight_map": {NAME: "../outside.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def leave_by_a_link(directory: Path) -> None:
    outside = directory.parent / "outside"
    outside.mkdir()
    (directory / "model.safetensors").rename(outside / "model.safetensors")
    (directory / "link").symlink_to(outside)
    index = {"weight_map": {NAME: "link/model.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def write_twice(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    save_file({NAME: tensors[NAME]}, directory / "second.safetensors")
    index = dict.fromkeys(tensors, "model.safetensors") | {"lm_head.weight": "second.safetensors"}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def cut_off(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


class Program:
    def __reduce__(self) -> Any:
        return print, ("this ran",)


def pickle_a_program(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    with open(directory / "pytorch_model.bin", "wb") as file:
        pickle.dump(Program(), file)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (change_weights(lambda tensors: tensors.pop(NAME)), f"lacks {NAME}"),
        (change_weights(lambda tensors: tensors.update(more=tensors[NAME] + 1)), "has more, which the model does not"),
        (change_weights(lambda tensors: tensors.update({NAME: tensors[NAME][1:].clone()})), f"{NAME} with the shape"),
        (change_weights(lambda tensors: tensors.update({NAME: tensors[NAME].long()})), f"{NAME} in a data type other"),
        (change_weights(lambda tensors: tensors.update({NAME: tensors[NAME].half()})), "different data types"),
        (change_config(model_type="llama"), "none of the families qwen3, "),
        (change_config(rope_scaling={"type": "dynamic", "factor": 4.0}), "scales the rotary embedding"),
        (leave_the_directory, "outside its directory"),
        (leave_by_a_link, "outside its directory"),
        (write_twice, f"has {NAME} twice"),
        (cut_off, "cut off"),
        (pickle_a_program, "could run code"),
        (lambda directory: (directory / "config.json").unlink(), "config.json"),
    ],
)
def test_refused(damage: Callable[[Path], Any], message: str, copy: Path, tmp_path: Path) -> None:
    damage(copy)
    (output,) = run(f"import --hf {copy} --out {tmp_path / 'ckpt'}")
    assert output.startswith("error: ") and message in output, output
    assert "this ran" not in output
    assert not any("ckpt" in path.name for path in tmp_path.iterdir()), "something is left"


def test_of_another_family(hugging_face: HuggingFace, tmp_path: Path) -> None:
    """The same shapes as Qwen3-Next's attention, in another order."""
    out = tmp_path / "ckpt"
    (output,) = run(f"import --hf {hugging_face('official-elementwise')} --out {out} --family qwen3_next")
    assert output.startswith("error: ") and "official" in output and not out.exists()


def test_a_family_by_name(copy: Path, imported: HuggingFace, tmp_path: Path) -> None:
    """A config that no family recognises is read as the one that is named; what that does not know is said."""
    change_config(model_type="fork", surprise=1)(copy)
    outputs = run(
        f"import --hf {copy} --out {tmp_path / 'ckpt'}",
        f"import --hf {copy} --out {tmp_path / 'ckpt'} --family qwen3",
        f"inspect --diff {imported('qwen3')} {tmp_path / 'ckpt'}",
    )
    assert "none of the families" in outputs[0]
    assert "keys that are ignored: surprise" in outputs[1]
    assert "bit for bit" in outputs[2]


def test_left_out_by_name(copy: Path, imported: HuggingFace, tmp_path: Path) -> None:
    change_weights(lambda tensors: tensors.update({"mtp.fc.weight": torch.ones(2)}))(copy)
    outputs = run(
        f"import --hf {copy} --out {tmp_path / 'ckpt'} --drop mtp.*",
        f"inspect --diff {imported('qwen3')} {tmp_path / 'ckpt'}",
        f"import --hf {copy} --out {tmp_path / 'other'} --drop nothing.*",
    )
    assert "left out: 1 tensors" in outputs[0] and "bit for bit" in outputs[1]
    assert "fits no tensor" in outputs[2]


@pytest.mark.parametrize("name", ["qwen3_moe", "step3p5"])
def test_active_parameters_are_counted(hugging_face: HuggingFace, imported: HuggingFace, name: str) -> None:
    counts = []
    for output in run(f"inspect {hugging_face(name)}", f"inspect {imported(name)}"):
        numbers = [re.search(rf"^{word} +([\d,]+)", output, re.MULTILINE) for word in ("parameters", "active")]
        counts.append([int(number[1].replace(",", "")) for number in numbers if number])
    asleep = [total - active for total, active in counts]
    assert asleep[0] == asleep[1] > 0.1 * counts[0][0]  # the checkpoint pads the rows of a gate


def test_an_interval_without_layers_is_refused(hugging_face: HuggingFace, tmp_path: Path) -> None:
    source = Path(shutil.copytree(hugging_face("qwen3_next"), tmp_path / "source"))
    change_config(full_attention_interval=0)(source)
    (output,) = run(f"import --hf {source} --out {tmp_path / 'ckpt'}")
    assert "full_attention_interval is 0 in config.json: it must be 1 or more" in output


def test_heads_for_multi_token_prediction_are_carried(hugging_face: HuggingFace, tmp_path: Path) -> None:
    """From the import to the export, also where only the original directory is named; `--drop` leaves them out."""
    source = Path(shutil.copytree(hugging_face("qwen3_next"), tmp_path / "source"))
    heads = {"mtp.fc.weight": torch.randn(4, 6), "mtp.layers.0.norm.weight": torch.randn(5)}
    change_weights(lambda tensors: tensors.update(heads))(source)
    outputs = run(
        f"import --hf {source} --out {tmp_path / 'ckpt'}",
        f"export --ckpt {tmp_path / 'ckpt'} --out {tmp_path / 'kept'} --verify",
        f"export --ckpt {tmp_path / 'ckpt'} --out {tmp_path / 'named'} --hf {source}",
        f"import --hf {source} --out {tmp_path / 'without'} --drop mtp.*",
        f"export --ckpt {tmp_path / 'without'} --out {tmp_path / 'dropped'}",
    )
    assert "left out: 2 tensors mtp.*" in outputs[0]
    assert "2 tensors for multi-token prediction are written as" in outputs[1]
    assert_verified(outputs[1].splitlines()[-1])
    for name in ("kept", "named"):
        assert_same(weights(tmp_path / name), weights(source))
    assert_same(weights(tmp_path / "dropped"), weights(hugging_face("qwen3_next")))


def test_what_is_there_is_kept(hugging_face: HuggingFace, imported: HuggingFace, tmp_path: Path) -> None:
    foreign, out = tmp_path / "foreign", tmp_path / "out"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("mine")
    export = f"export --ckpt {imported('qwen3')} --out"
    outputs = run(
        f"{export} {foreign}",
        f"{export} {foreign} --overwrite",
        f"{export} {out}",
        f"{export} {out}",
        f"{export} {out} --dtype bf16 --overwrite",
    )
    assert "not empty" in outputs[0] and "does not replace anything else" in outputs[1] and "not empty" in outputs[3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["foreign", "out"]
    assert [path.name for path in foreign.iterdir()] == ["thesis.txt"]
    assert weights(out)[NAME].dtype == torch.bfloat16


def test_a_family_that_cannot_hold_the_model(imported: HuggingFace, tmp_path: Path) -> None:
    outputs = run(
        f"export --ckpt {imported('official-headwise')} --out {tmp_path / 'out'} --family qwen3",
        f"export --ckpt {imported('official-headwise')} --out {tmp_path / 'out'} --family qwn3",
    )
    assert "gate" in outputs[0] and "did you mean qwen3" in outputs[1]
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------------------------------------------------------
# Looking into directories


def test_inspect(hugging_face: HuggingFace, imported: HuggingFace, tmp_path: Path) -> None:
    config = reference("qwen3_moe").config
    total = sum(parameter.numel() for parameter in reference("qwen3_moe").parameters())
    expert = 3 * config.hidden_size * config.moe_intermediate_size
    unused = config.num_hidden_layers * (config.num_experts - config.num_experts_per_tok) * expert
    damaged = Path(shutil.copytree(imported("qwen3_moe"), tmp_path / "damaged"))
    data = damaged / "release" / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-100])
    broken = Path(shutil.copytree(hugging_face("qwen3_moe"), tmp_path / "broken"))
    change_weights(lambda tensors: tensors["lm_head.weight"][3, 5].fill_(torch.nan))(broken)
    megatron, other, cut, wrong, difference = run(
        f"inspect {imported('qwen3_moe')}",
        f"inspect {hugging_face('qwen3_moe')}",
        f"inspect {damaged}",
        f"inspect {broken} --tensors",
        f"inspect --diff {hugging_face('qwen3_moe')} {broken}",
    )
    for output in (megatron, other):
        assert f"{total:,} in" in output and f"{total - unused:,} for a token" in output, output
    assert "baseline" in megatron and "*E*E" in megatron and "qwen3_moe" in other
    assert "__0_0.distcp has" in cut
    assert "1 tensors hold NaN" in wrong
    assert difference.startswith("lm_head.weight: differs by nan")


def test_every_family_has_a_name_of_its_own() -> None:
    names = [family.name for family in FAMILIES]
    assert len(set(names)) == len(names)
