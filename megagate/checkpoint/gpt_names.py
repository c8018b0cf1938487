"""The tensors of a GPTModel's checkpoint by the names that a HybridModel of the same blocks has for them.

Attention and feed-forward layer of block n are the hybrid layers 2n and 2n + 1. A GPTModel whose blocks are alike keeps
each kind of tensor as one, with the blocks along its first axis; otherwise it numbers its blocks.
"""

import re

from torch import Tensor

from megagate.checkpoint.huggingface import StoredTensor
from megagate.checkpoint.torch_dist import TensorReader
from megagate.model.specs import OWN_NAMES

OF_BLOCKS = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)")
OF_ATTENTION = ("input_layernorm.", "self_attention.")


class HybridNames:
    """Reads as `TensorReader` does, by other names.

    Args:
        reader: of the GPTModel's checkpoint.
    """

    def __init__(self, reader: TensorReader) -> None:
        self._reader = reader
        self._places: dict[str, tuple[str, tuple[int, ...]]] = {}
        self.tensors: dict[str, StoredTensor] = {}
        for name, stored in reader.tensors.items():
            found = OF_BLOCKS.fullmatch(name)
            if found is None:
                self._add(name.replace("decoder.final_layernorm.", "decoder.final_norm."), name, stored)
            elif found[1] is not None:
                self._add(hybrid_name(int(found[1]), found[2]), name, stored)
            else:
                for block in range(stored.shape[0]):
                    slice_of_block = StoredTensor(stored.shape[1:], stored.dtype)
                    self._add(hybrid_name(block, found[2]), name, slice_of_block, block)

    def _add(self, own: str, name: str, stored: StoredTensor, *index: int) -> None:
        self._places[own] = name, index
        self.tensors[own] = stored

    def read(self, name: str, index: int | None = None) -> Tensor:
        """Return a tensor, or its slice `index` along the first axis; raises as `TensorReader.read` does."""
        stored_name, place = self._places[name]
        return self._reader.read(stored_name, place if index is None else (*place, index))

    def close(self) -> None:
        """Close the file that is open."""
        self._reader.close()


def hybrid_name(block: int, rest: str) -> str:
    """Return the hybrid model's name of what a GPTModel calls `rest` in a block."""
    for fused, own in OWN_NAMES.items():
        rest = rest.replace(fused, own)
    layer = 2 * block + (not rest.startswith(OF_ATTENTION))
    return f"decoder.layers.{layer}.{rest}"
