"""Random inputs for the Triton kernels: stored matrices of any format, pages, poisoned memory."""

import torch

from civetta.checkpoint import formats
from civetta.checkpoint.quant import QuantTensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# byte offsets of the float16 fields of each block format
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
PACKED = (*HALVES, "F8_E4M3", "NVFP4")


class Random:
    """Draws on the CPU with a seed, so that every device sees the same numbers."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(dtype)

    def uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self._generator)

    def permutation(self, n: int) -> torch.Tensor:
        return torch.randperm(n, generator=self._generator)

    def whole(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Whole numbers from -4 to 4: sums of their products are exact in any order."""
        return torch.randint(-4, 5, shape, generator=self._generator).to(dtype)

    def stored(self, name: str, rows: int, cols: int, step: float | None = None) -> QuantTensor:
        """Random codes; random float16 fields, or all of them `step`."""
        fmt = formats.by_name(name)
        assert fmt is not None
        shape = (rows, fmt.row_bytes(cols))
        data = torch.randint(0, 256, shape, dtype=torch.uint8, generator=self._generator)
        blocks = data.view(rows, -1, fmt.block_bytes)
        for at in HALVES.get(name, ()):
            half = ((self.uniform(rows, blocks.shape[1]) - 0.5) * 0.02).half()
            if step is not None:
                half.fill_(step)
            blocks[:, :, at : at + 2] = half.view(torch.uint8).view(rows, -1, 2)
        scale = scale_2 = None
        if name == "F8_E4M3":
            data[(data & 127) == 127] = 0
            scale = self.uniform(-(-rows // 128), -(-cols // 128))
        if name == "NVFP4":
            scale = torch.randint(
                0, 126, (rows, cols // 16), dtype=torch.uint8, generator=self._generator
            )
            scale_2 = torch.tensor(0.003)
        return QuantTensor(format=fmt, data_RB=data, cols=cols, scale=scale, scale_2=scale_2)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """||got - want|| / ||want||; NaN never passes a bound."""
    want = want.double()
    return float((got.double().cpu() - want).norm() / want.norm().clamp(min=1e-30))


def poison(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)
