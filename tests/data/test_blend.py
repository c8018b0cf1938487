"""A blend draws what it says, and Megatron reads the same weights from the file."""

import argparse
import re
from pathlib import Path

import numpy as np
import pytest
import yaml

from megagate.data.blend import blend, main, read_sources
from megagate.errors import UserError
from tests.data.datasets import write_dataset


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three datasets, of 1000, 400 and 100 tokens."""
    folder = tmp_path_factory.mktemp("sources")
    sizes = {"web": 100, "code": 40, "books": 10}
    return [write_dataset(folder / name, [list(range(10))] * count) for name, count in sizes.items()]


def file_of(folder: Path, *sources: dict) -> Path:
    path = folder / "blend.yaml"
    path.write_text(yaml.safe_dump({"sources": list(sources)}))
    return path


def test_weights_share_what_budgets_leave(paths: list[str], tmp_path: Path) -> None:
    web, code, books = paths
    sources = read_sources(
        file_of(tmp_path, {"path": web, "weight": 3}, {"path": code, "weight": 1}, {"path": books, "epochs": 2})
    )
    drawn = blend(sources, 1000)
    assert [source.drawn for source in drawn] == [600, 200, 200]
    assert [source.available for source in drawn] == [1000, 400, 100]
    assert [source.epochs for source in drawn] == [0.6, 0.5, 2.0]
    assert [source.share for source in drawn] == pytest.approx([0.6, 0.2, 0.2])
    drawn = blend(sources, 1000, split="8,1,1")
    assert [source.available for source in drawn] == [800, 320, 80]
    assert [source.drawn for source in drawn] == [630, 210, 160]


def test_training_draws_what_the_table_says(paths: list[str], tmp_path: Path) -> None:
    """Through Megatron's own reader of the file, and its own blending."""
    from megatron.core.datasets.helpers_cpp import build_blending_indices
    from megatron.training.utils import get_blend_and_blend_per_split

    web, code, books = paths
    file = file_of(
        tmp_path, {"path": web, "weight": 0.7}, {"path": code, "weight": 1e-3}, {"path": books, "tokens": 99}
    )
    assert main([str(file), "--tokens", "1K", "--output", str(tmp_path / "blend.txt")]) == 0
    names = ("train_data_path", "valid_data_path", "test_data_path", "per_split_data_args_path", "data_path")
    args = argparse.Namespace(**dict.fromkeys(names), data_args_path=str(tmp_path / "blend.txt"))
    (prefixes, weights), _ = get_blend_and_blend_per_split(args)
    drawn = blend(read_sources(file), 1000)
    assert prefixes == paths
    assert weights == [source.share for source in drawn]
    samples = 100_000
    chosen, place = np.zeros(samples, np.int16), np.zeros(samples, np.int64)
    build_blending_indices(chosen, place, weights, 3, samples, False)
    counts = np.bincount(chosen, minlength=3)
    assert counts.tolist() == pytest.approx([source.share * samples for source in drawn], abs=1)


def test_the_split_is_one_of_sequences(tmp_path: Path) -> None:
    """As Megatron cuts it, whatever belongs to one document."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "data.bin"), dtype=np.int32)
    builder.add_document(np.arange(10), [1, 2, 3, 4])
    builder.add_document(np.arange(5), [5])
    builder.finalize(str(tmp_path / "data.idx"))
    (source,) = blend([{"path": str(tmp_path / "data"), "epochs": 1}], split="60,40,0")
    assert source.available == 1 + 2 + 3


def test_repeats_are_warned_about(paths: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = file_of(tmp_path, {"path": paths[0], "tokens": "2K"}, {"path": paths[2], "epochs": 6})
    assert main([str(file), "--split", "1,0,0"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"web\s+1,000\s+2,000\s+0\.7692\s+2\.00", out)
    assert re.search(r"warning: \S+books is repeated 6\.00 times, more than 4", out)
    assert "web is repeated" not in out
    assert main([str(file), "--split", "1,0,0", "--max-epochs", "6"]) == 0
    assert "warning" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"weight": 0}, "must be a positive number"),
        ({"weight": -1}, "must be a positive number"),
        ({"weight": float("nan")}, "must be a positive number"),
        ({"tokens": "many"}, "must be a positive number"),
        ({"wieght": 1}, "unknown key wieght; did you mean weight"),
        ({"weight": 1, "tokens": 5}, "needs exactly one of"),
        ({}, "needs exactly one of"),
        ({"tokens": 0.3}, "would give 0.3 tokens, less than one"),
        ({"tokens": "2K"}, "the sources with tokens or epochs take 2,000 of 1,000 tokens and leave none"),
    ],
)
def test_what_makes_no_blend_is_refused(paths: list[str], tmp_path: Path, source: dict, message: str) -> None:
    file = file_of(tmp_path, {"path": paths[0], "weight": 1}, {"path": paths[1], **source})
    with pytest.raises(UserError, match=message):
        main([str(file), "--tokens", "1000", "--output", str(tmp_path / "out.txt")])
    assert not (tmp_path / "out.txt").exists()


def test_other_mistakes_are_refused(paths: list[str], tmp_path: Path) -> None:
    one = {"path": paths[0], "weight": 1}
    (tmp_path / "there.txt").write_text("mine")
    with pytest.raises(UserError, match=r"there\.txt exists; choose another --output or remove it"):
        main([str(file_of(tmp_path, one)), "--tokens", "10", "--output", str(tmp_path / "there.txt")])
    assert (tmp_path / "there.txt").read_text() == "mine"
    with pytest.raises(UserError, match=r"cannot read the blend file .*absent\.yaml: No such file .*; name a file"):
        main([str(tmp_path / "absent.yaml")])
    with pytest.raises(UserError, match=r"cannot write .*absent/out\.txt: No such file"):
        main([str(file_of(tmp_path, one)), "--tokens", "10", "--output", str(tmp_path / "absent" / "out.txt")])
    with pytest.raises(UserError, match="so the total is needed"):
        main([str(file_of(tmp_path, one))])
    with pytest.raises(UserError, match="twice"):
        main([str(file_of(tmp_path, one, one)), "--tokens", "10"])
    with pytest.raises(UserError, match="there is no dataset"):
        main([str(file_of(tmp_path, {"path": paths[0] + "s", "weight": 1})), "--tokens", "10"])
    with pytest.raises(UserError, match="gives training none"):
        main([str(file_of(tmp_path, {"path": paths[2], "weight": 1})), "--tokens", "10", "--split", "1,99,0"])
    with pytest.raises(UserError, match="the sources add up to 50 tokens, not to --tokens 70"):
        main([str(file_of(tmp_path, {"path": paths[0], "tokens": 50})), "--tokens", "70"])
    for split in ("0,1", "1,2,3,4"):
        with pytest.raises(UserError, match="--split"):
            main([str(file_of(tmp_path, one)), "--tokens", "70", "--split", split])
    (tmp_path / "bad.yaml").write_text("sources: [")
    with pytest.raises(UserError, match="is not valid YAML"):
        main([str(tmp_path / "bad.yaml")])
    with pytest.raises(UserError, match="must hold a list"):
        (tmp_path / "bad.yaml").write_text("- 1")
        main([str(tmp_path / "bad.yaml")])
    with pytest.raises(UserError, match="path without spaces"):
        main([str(file_of(tmp_path, {"path": "a b", "weight": 1}))])


def test_the_example_in_the_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    text = (Path(__file__).parents[2] / "docs/blends.md").read_text()
    (example,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (shown,) = re.findall(r"\$ python tools/blend.py (.*?)\n(.*?)\n\$ python -m", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    for name, count in {"web": 5000, "code": 2000, "books": 500}.items():
        write_dataset(Path(f"data/{name}_text_document"), [list(range(10))] * count)
    Path("blend.yaml").write_text(example)
    assert main(shown[0].split()) == 0
    assert capsys.readouterr().out.rstrip() == shown[1]
    assert Path("blend.txt").read_text().split()[::2] == ["0.5625", "0.1875", "0.25"]


def test_a_repeated_key_is_refused(paths: list[str], tmp_path: Path) -> None:
    file = tmp_path / "blend.yaml"
    file.write_text(f"base: &base {{weight: 1}}\nsources:\n  - {{<<: *base, path: {paths[0]}, weight: 2}}\n")
    assert read_sources(file) == [{"path": paths[0], "weight": 2}]
    file.write_text(f"sources: [{{path: {paths[0]}, weight: 1, weight: 2}}]\n")
    with pytest.raises(UserError, match="the key weight is in line 1 and again in line 1"):
        read_sources(file)
    file.write_text(f"sources:\n  - path: {paths[0]}\n    weight: 1\n    weight: 2\n")
    with pytest.raises(UserError, match=r"not valid YAML: the key weight is in line 3 and again in line 4; mend it"):
        read_sources(file)
