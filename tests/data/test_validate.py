"""A dataset that is not whole is refused before a run, with what is wrong and how to mend it."""

import os
import struct

import numpy as np
import pytest

from megagate.data.validate import ITEM_BYTES, check_indexed_dataset
from megagate.errors import UserError


def write(prefix, documents, dtype=np.int32, multimodal=False):
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(prefix + ".bin", dtype=dtype, multimodal=multimodal)
    for document in documents:
        builder.add_document(np.array(document), [len(document)], [0] if multimodal else None)
    builder.finalize(prefix + ".idx")


@pytest.fixture
def prefix(tmp_path):
    write(str(tmp_path / "corpus_text_document"), [[1, 2, 3], [4], [5, 6]])
    return str(tmp_path / "corpus_text_document")


def test_item_sizes_are_megatrons():
    from megatron.core.datasets.indexed_dataset import DType

    assert {member.value: DType.size(member.value) for member in DType} == ITEM_BYTES


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64])
@pytest.mark.parametrize("multimodal", [False, True])
def test_whole_datasets_pass(tmp_path, dtype, multimodal):
    write(str(tmp_path / "a"), [[1, 2, 3], [4]], dtype, multimodal)
    check_indexed_dataset(str(tmp_path / "a"))


def test_remote_datasets_are_left_to_megatron():
    check_indexed_dataset("s3://bucket/corpus")


def refused(prefix, message):
    with pytest.raises(UserError, match=message) as error:
        check_indexed_dataset(prefix)
    assert "\n" not in str(error.value)


def test_missing_files(prefix):
    refused(prefix.removesuffix("_text_document"), r"there is no dataset .*did you mean corpus_text_document\?")
    refused(prefix + ".bin", "names one file of a pair; drop its ending and give .*corpus_text_document$")
    os.rename(prefix + ".bin", prefix + ".moved")
    refused(prefix, r"corpus_text_document\.bin is missing although .*\.idx is there")
    os.rename(prefix + ".moved", prefix + ".bin")
    os.remove(prefix + ".idx")
    refused(prefix, r"corpus_text_document\.idx is missing although .*\.bin is there")
    refused("nowhere/at/all", "there is no dataset nowhere/at/all")


def test_data_of_another_size(prefix):
    with open(prefix + ".bin", "ab") as stream:
        stream.write(b"\0\0")
    refused(prefix, "has 26 bytes but .* describes 24")
    os.truncate(prefix + ".bin", 7)
    refused(prefix, "has 7 bytes but .* describes 24")


def test_index_cut_off_at_any_byte(prefix):
    size = os.path.getsize(prefix + ".idx")
    for cut in reversed(range(size)):
        os.truncate(prefix + ".idx", cut)
        refused(prefix, "was cut off or damaged" if cut >= 34 else "is cut off" if cut >= 9 else "not a Megatron index")


def test_index_with_other_contents(prefix):
    with open(prefix + ".idx", "rb") as stream:
        good = stream.read()

    def patched(offset, layout, value):
        changed = bytearray(good)
        struct.pack_into(layout, changed, offset, value)
        with open(prefix + ".idx", "wb") as stream:
            stream.write(changed)

    patched(0, "<9s", b"something")
    refused(prefix, "is not a Megatron index: its first bytes are not MMIDIDX")
    patched(9, "<Q", 2)
    refused(prefix, "has format version 2")
    patched(17, "<B", 99)
    refused(prefix, "has the unknown token type code 99")
    patched(len(good) - 8, "<q", 2)
    refused(prefix, "contradicts itself: 3 sequences, the last document ending at 2")


def test_a_dataset_without_documents(tmp_path):
    write(str(tmp_path / "a"), [])
    refused(str(tmp_path / "a"), "holds no documents")
