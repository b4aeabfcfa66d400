"""The parts of the network beside attention, each with the same bits for a row wherever it stands in a step.

DIMENSION KEY
    N flat tokens in the step, H query heads, G KV heads, D head dim, M model dim, F feed-forward dim, I and O the
    inputs and outputs of a matrix
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from shared.engine.attention import SHARE_ELEMENTS
from shared.engine.model_config import ModelConfig

MATRIX_ROWS_MIN: Final = 8
"""bf16 products of fewer rows take another path in torch, with other bits: steps are padded to this many rows."""


class Linear:
    """y = x W^T.

    Weights in bf16 are packed once for oneDNN: the same bits as the plain product at twice its speed on few rows, for
    a copy of the weights. Where that operator is not available, the plain product serves.
    """

    def __init__(self, weight_OI: Tensor) -> None:
        packable = weight_OI.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        self._packed = packable
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight_OI, MATRIX_ROWS_MIN) if packable else weight_OI

    def __call__(self, x_NI: Tensor) -> Tensor:
        """x_NI: contiguous, at least `MATRIX_ROWS_MIN` rows."""
        if self._packed:
            y_NO: Tensor = torch.ops.mkldnn._linear_pointwise(x_NI, self._weight, None, "none", [], "")
            return y_NO
        return linear(x_NI, self._weight)


def rotary_table(config: ModelConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos_CD and sin_CD for all positions C of the context; the first half of sin is negated, for `rotate`.

    Cosines come from numpy in double precision: torch's would depend on how the table is split over threads.
    """
    half = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequency = 1.0 / (config.rope_theta**half)
    angle = torch.outer(torch.arange(config.context_tokens).float(), frequency).numpy().astype(np.float64)
    cos, sin = np.cos(angle), np.sin(angle)
    return (
        torch.from_numpy(np.concatenate([cos, cos], axis=1)).to(torch.float32).to(dtype),
        torch.from_numpy(np.concatenate([-sin, sin], axis=1)).to(torch.float32).to(dtype),
    )


def rotate(x_NHD: Tensor, cos_N1D: Tensor, sin_N1D: Tensor) -> None:
    """Turns the rows by their positions, in place: x cos + (-x2, x1) sin."""
    turned = x_NHD.roll(x_NHD.shape[-1] // 2, -1).mul_(sin_N1D)
    x_NHD.mul_(cos_N1D).add_(turned)


def norm(x_NM: Tensor, weight_M: Tensor, epsilon: float) -> Tensor:
    return rms_norm(x_NM, weight_M.shape, weight_M, epsilon)


def gated_silu(gate_up_N2F: Tensor) -> Tensor:
    """silu(gate) × up.

    ATen's silu gives other bits at the edge of a thread's share. The rows that fill equal shares of whole rows run on
    all threads; the rest in slices too short to be shared.
    """
    gate_NF, up_NF = gate_up_N2F.chunk(2, dim=-1)
    rows, width = gate_NF.shape
    assert width < SHARE_ELEMENTS
    y_NF = torch.empty(rows, width, dtype=gate_NF.dtype)
    threads = torch.get_num_threads()
    even = rows // threads * threads
    if even * width <= (threads - 1) * SHARE_ELEMENTS:
        even = 0
    if even:
        torch.ops.aten.silu.out(gate_NF[:even], out=y_NF[:even])
    slice_rows = SHARE_ELEMENTS // width
    for row in range(even, rows, slice_rows):
        torch.ops.aten.silu.out(gate_NF[row : row + slice_rows], out=y_NF[row : row + slice_rows])
    return y_NF.mul_(up_NF)
