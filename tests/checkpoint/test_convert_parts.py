"""The parts of a conversion: accounting, files of tensors, tokenizers."""

import json
import os
import signal
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megagate.checkpoint.accounting import converted, wanted
from megagate.checkpoint.families.base import Rule, Weight
from megagate.checkpoint.huggingface import StoredTensor, WeightReader, WeightWriter
from megagate.checkpoint.inspect import differences
from megagate.checkpoint.output_directory import complete_or_nothing
from megagate.checkpoint.side_files import PROBES, write_sentencepiece
from megagate.checkpoint.torch_dist import TensorReader, TensorWriter
from megagate.errors import UserError

WHOLE = Weight("a", (2, 3))
FIRST, SECOND = Weight("b", (2, 3), 0), Weight("b", (2, 3), 1)


@pytest.mark.parametrize("weights", [(WHOLE, WHOLE), (FIRST, FIRST), (FIRST, Weight("b", (2, 3)))])
def test_a_tensor_in_two_rules(weights: tuple[Weight, ...]) -> None:
    with pytest.raises(ValueError, match="in two rules"):
        wanted([Rule((weight,), ()) for weight in weights], "hf")


@pytest.mark.parametrize("slices", [(SECOND,), (FIRST, Weight("b", (3, 3), 1))])
def test_slices_that_are_no_tensor(slices: tuple[Weight, ...]) -> None:
    with pytest.raises(ValueError, match="slices of b"):
        wanted([Rule(slices, ())], "hf")


def test_shapes_and_data_types_without_weights() -> None:
    stack = Rule((WHOLE, Weight("c", (1, 3))), (Weight("d", (3, 3)),), lambda tensors: [torch.cat(list(tensors))])
    slices = Rule((FIRST, SECOND), (Weight("e", (2, 3)), Weight("f", (2, 3))))
    rules = [stack, slices]
    assert wanted(rules, "hf") == {"a": (2, 3), "b": (2, 2, 3), "c": (1, 3)}
    present = {name: StoredTensor(shape, torch.bfloat16) for name, shape in wanted(rules, "hf").items()}
    made = converted(rules, "hf", present, "there")
    assert made == {
        "d": StoredTensor((3, 3), torch.bfloat16),
        "e": StoredTensor((2, 3), torch.bfloat16),
        "f": StoredTensor((2, 3), torch.bfloat16),
    }
    present["c"] = StoredTensor((1, 3), torch.float32)
    with pytest.raises(UserError, match=r"c torch\.float32"):
        converted(rules, "hf", present, "there")
    wrong = Rule((WHOLE,), (Weight("d", (3, 3)),))
    with pytest.raises(ValueError, match="returns"):
        converted([wrong], "hf", present, "there")


@pytest.mark.parametrize("size", [1, 60, 10**9])
def test_weights_in_any_order(size: int, tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 4),
        "stacked": torch.randn(2, 3, 4).bfloat16(),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(2.5),
        "b": torch.randn(5).half(),
    }
    stored = {name: StoredTensor(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    writer = WeightWriter(tmp_path, stored, size)
    for index in (1, 0):
        writer.write("stacked", tensors["stacked"][index], index)
    for name in ("b", "scalar", "a", "empty"):
        writer.write(name, tensors[name])
    with pytest.raises(ValueError, match="announced"):
        writer.write("a", tensors["a"][1:])
    writer.close()
    reader = WeightReader(tmp_path)
    assert reader.tensors == stored
    for name, tensor in tensors.items():
        assert torch.equal(reader.read(name), tensor)
    assert torch.equal(reader.read("stacked", 1), tensors["stacked"][1])
    from safetensors.torch import load_file

    files = [load_file(path) for path in tmp_path.glob("*.safetensors")]
    assert {name for file in files for name in file} == tensors.keys()


def test_megatrons_tensors_slice_by_slice(tmp_path: Path) -> None:
    stacked, plain = torch.randn(3, 2, 4), torch.randn(5, 2)
    writer = TensorWriter(tmp_path)
    for index in (2, 0, 1):
        writer.write("stacked", stacked[index], index, 3)
    writer.write("plain", plain.t())
    writer.write("scalar", torch.tensor(3.0))
    writer.write_object("x._extra_state/shard_0_1", None)
    writer.close()
    reader = TensorReader(tmp_path)
    assert reader.tensors.keys() == {"stacked", "plain", "scalar"}
    assert torch.equal(reader.read("stacked"), stacked)
    assert torch.equal(reader.read("stacked", 1), stacked[1])
    assert torch.equal(reader.read("stacked", (2, 1)), stacked[2, 1])
    assert torch.equal(reader.read("plain"), plain.t())
    assert reader.read("scalar") == 3
    reader._entries["stacked"].chunks.pop()
    with pytest.raises(UserError, match="do not cover"):
        reader.read("stacked")


@pytest.mark.parametrize("error", [UserError("no"), RuntimeError("no"), KeyboardInterrupt()])
def test_nothing_of_what_fails(error: BaseException, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("old")
    with (
        pytest.raises(type(error)),
        complete_or_nothing(tmp_path / "out", ("config.json",), overwrite=True) as staging,
    ):
        (staging / "config.json").write_text("new")
        raise error
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "config.json").read_text() == "old"


def test_sigterm_leaves_nothing(tmp_path: Path) -> None:
    previous = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit), complete_or_nothing(tmp_path / "out", ()) as staging:
        (staging / "part").write_text("new")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
    assert not list(tmp_path.iterdir())
    assert signal.getsignal(signal.SIGTERM) is previous


def test_what_is_read_is_not_replaced(tmp_path: Path) -> None:
    out, source = tmp_path / "out", tmp_path / "out" / "source"
    source.mkdir(parents=True)
    (out / "config.json").write_text("old")
    (tmp_path / "link").symlink_to(out)
    for target, message in ((out, "which is read"), (source, "which is read"), (tmp_path / "link", "is a link")):
        with (
            pytest.raises(UserError, match=message),
            complete_or_nothing(target, ("config.json",), overwrite=True, needed=(source,)),
        ):
            pass
    assert (out / "config.json").read_text() == "old" and source.is_dir()


def test_what_was_there_stays_if_the_new_cannot_take_its_place(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("old")
    with (
        pytest.raises(UserError, match="cannot write"),
        complete_or_nothing(out, ("config.json",), overwrite=True) as staging,
    ):
        staging.rmdir()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (out / "config.json").read_text() == "old"


def change_header(change: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    def changed(text: bytes) -> bytes:
        header = json.loads(text)
        return json.dumps(change(header) or header).encode()

    return changed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_header(lambda header: ["a"]), "no JSON object"),
        (change_header(lambda header: {"a": 1}), "does not describe a"),
        (change_header(lambda header: header["a"].pop("dtype") and None), "does not describe a"),
        (change_header(lambda header: header["b"].update(header["a"])), "a and b overlap"),
        (change_header(lambda header: header["a"].update(shape=[-2, -2])), "does not fit a"),
        (change_header(lambda header: header["a"].update(data_offsets=[8, 4])), "does not fit a"),
        (lambda text: text.rstrip()[:-1] + b"," + text[text.index(b'"b"') :], "b twice"),
    ],
)
def test_a_header_that_lies(change: Callable[[bytes], bytes], message: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "model.safetensors"
    save_file({"a": torch.randn(2, 2), "b": torch.randn(2, 2)}, path)
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    assert WeightReader(tmp_path).tensors.keys() == {"a", "b"}
    text = change(content[8 : 8 + length])
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
    with pytest.raises(UserError, match=message):
        WeightReader(tmp_path)


class InMemory:
    """Tensors as `differences` reads them."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self._tensors = tensors
        self.tensors = {name: StoredTensor(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}

    def read(self, name: str, index: int | None = None) -> torch.Tensor:
        return self._tensors[name] if index is None else self._tensors[name][index]


def test_differences_in_bits() -> None:
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, 1.0])
    empty = torch.empty(0, 3)
    assert not list(differences(InMemory(a=special, e=empty), InMemory(a=special.clone(), e=empty)))
    for place, value, text in ((3, -0.0, "differs by 0,"), (4, 3.0, "differs by 2,"), (4, torch.nan, "differs by nan")):
        other = special.clone()
        other[place] = value
        (line,) = differences(InMemory(a=special), InMemory(a=other))
        assert line.startswith(f"a: {text}")


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    import sentencepiece

    def train(kind: str, **settings: Any) -> Path:
        prefix = tmp_path_factory.mktemp("tokenizer") / kind
        text = [line for path in (Path(__file__).parents[2] / "docs").glob("*.md") for line in path.open()]
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(text),
            model_prefix=str(prefix),
            model_type=kind,
            vocab_size=600,
            byte_fallback=True,
            pad_id=3,
            minloglevel=2,
            **settings,
        )
        return prefix.with_suffix(".model")

    return train


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_becomes_a_tokenizer_of_transformers(
    prefix: bool, sentencepiece_model: Callable[..., Path], tmp_path: Path
) -> None:
    import sentencepiece
    from transformers import AutoTokenizer

    model = sentencepiece_model(
        "bpe", add_dummy_prefix=prefix, normalization_rule_name="identity", remove_extra_whitespaces=False
    )
    tokens = write_sentencepiece(model, tmp_path)
    assert tokens == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    original = sentencepiece.SentencePieceProcessor(model_file=str(model))
    page = (Path(__file__).parents[2] / "docs" / "gates.md").read_text()
    for text in (*PROBES, page):
        numbers = original.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False) == numbers
        assert tokenizer.decode(numbers) == original.decode(numbers)
    assert tokenizer.eos_token_id == 2


def test_a_tokenizer_that_would_differ_is_not_written(sentencepiece_model: Callable[..., Path], tmp_path: Path) -> None:
    assert isinstance(write_sentencepiece(sentencepiece_model("unigram"), tmp_path), str)
    assert not list(tmp_path.iterdir())


def test_a_link_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    sentence = "link is a link or a mount point, which cannot be replaced: give a directory inside it"
    with pytest.raises(UserError, match=sentence), complete_or_nothing(tmp_path / "link", ("config.json",)):
        pass
    assert (tmp_path / "link").is_symlink()
