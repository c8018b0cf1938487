"""Rebuild the products of a cheap function in the backward pass, instead of storing them for it."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint


class Rebuilt:
    """Products that whatever uses them inside the context `saving` saves as a promise to compute them again.

    torch's checkpoint drops what is saved inside a function; here its result, which the next layer saves, goes too.
    """

    def __init__(self) -> None:
        self._products: dict[int, tuple[Tensor, Callable[[], Tensor]]] = {}

    def apply(self, function: Callable[..., Tensor], *inputs: Tensor, saves_products: bool = True) -> Tensor:
        """Return `function(*inputs)`, which must be a new contiguous tensor and depend on nothing random.

        A function that saves nothing but its inputs need not be watched: `saves_products` is false then.
        """
        product: Any
        if saves_products:
            product = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
        else:
            product = function(*inputs)
        detached = [tensor.detach() for tensor in inputs]
        # The product is kept until the context ends, so that nothing else can come to lie at its address.
        self._products[product.untyped_storage().data_ptr()] = product, lambda: function(*detached)
        return product

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Replace each tensor that is saved for backward and is a product, or a view of one."""
        try:
            with saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            self._products.clear()

    def _pack(self, tensor: Tensor) -> Any:
        known = self._products.get(tensor.untyped_storage().data_ptr())
        return tensor if known is None else (known[1], tensor.shape, tensor.stride(), tensor.storage_offset())

    @staticmethod
    def _unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        rebuild, *view = packed
        return rebuild().as_strided(*view)
