"""Live memory by counting what operations make, for tests and benches.

python -m pytest tests/model/test_recompute.py -k memory
"""

import weakref

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Peak(TorchDispatchMode):
    """Bytes of live tensors that operations have made while it is open (`live`), and their maximum (`peak`)."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self._known:
                    self._known.add(storage.data_ptr())
                    self.live += storage.nbytes()
                    weakref.finalize(storage, self._gone, storage.data_ptr(), storage.nbytes())
        self.peak = max(self.peak, self.live)
        return out
