"""Linear-attention layers of the ablation (notes A.6): Gated DeltaNet, and SimpleGDN, over MLA's or GQA's own projections.

Both run kernels/gdn.py's recurrence per head, with GQA's keys and values repeated to the query heads. "gdn" adds a short causal
convolution and SiLU on q, k and v, a learned write strength b and decay a, and a gated RMSNorm; it sees positions through these
and not through RoPE. "simple_gdn" adds no parameter: W_Q, W_K and W_V as they are, rotated as the pre-trained model compares
them, b = 1, and model.simple_gdn_decay "none" (a = 1) or "fixed" (per head, `fixed_log_decay`). The paper does not say what
remains of a and b in SimpleGDN; "no additional parameters" leaves constants. DSA does not apply, whatever `attention` says.

Run its tests: `python -m pytest tests/model/test_gdn.py`
"""

import math
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn

from kernels.gdn import causal_conv_silu, chunked_gdn, l2_normalise
from model.attention import MLAProjections, RMSNorm
from model.config import ModelConfig
from model.gqa import GQAProjections

RECURRENCE_PARAMETERS = (
    "A_log",
    "dt_bias",
    "conv1d.weight",
)  # not drawn from Normal(0, initializer_range), and not Muon's
SHORTEST, LONGEST = 5, 12  # fixed decays: time constants from 2^5 to 2^12 tokens, one per head


def fixed_log_decay(heads: int, device=None) -> torch.Tensor:
    """[H] log a: a = 1 - 2^-n with n from 5 to 12 in even steps over the heads, as RetNet spaces its decays."""
    exponents_h = torch.linspace(SHORTEST, LONGEST, heads, dtype=torch.float64, device=device)
    return torch.log1p(-(2.0**-exponents_h)).float()


def init_recurrence(name: str, p: torch.Tensor, generator: torch.Generator) -> None:
    """Fresh values of the parameters in RECURRENCE_PARAMETERS, as Mamba-2 and fla draw them.

    A uniform in [1, 16]; dt log-uniform in [1e-3, 0.1], so that at a zero input a is between exp(-1.6) and exp(-1e-3); the
    convolution uniform in +-kernel^-0.5.
    """
    uniform = torch.rand(p.shape, generator=generator)
    if name.endswith("A_log"):
        p.copy_((1 + 15 * uniform).log())
    elif name.endswith("dt_bias"):
        dt = torch.exp(math.log(1e-3) + uniform * math.log(100.0))
        p.copy_(dt + torch.log(-torch.expm1(-dt)))  # softplus(dt_bias) = dt
    else:
        p.copy_((2 * uniform - 1) * p.shape[-1] ** -0.5)


class ShortConv(nn.Module):
    """Causal depthwise convolution and SiLU; weight [channels, kernel], the last tap is the present token.

    before [B,kernel-1,channels]: the inputs in front of x, zeros when None.
    """

    def __init__(self, channels: int, kernel: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, kernel))

    def forward(self, x_bshd: torch.Tensor, before_bkc: torch.Tensor | None = None) -> torch.Tensor:
        x_bsc = x_bshd.flatten(-2)
        if before_bkc is None:
            return causal_conv_silu(x_bsc, self.weight).view(x_bshd.shape)
        y_btc = causal_conv_silu(torch.cat([before_bkc, x_bsc], dim=1), self.weight)
        return y_btc[:, before_bkc.shape[1] :].unflatten(-1, x_bshd.shape[2:])


class _Recurrent:
    """What both share. Interface: model/attention.py; decoding takes the parts (model/state_decode.py)."""

    def forward(self, x_bsh, cis_bsr, *, index_only: bool = False, **_) -> tuple[torch.Tensor, None, None]:
        with torch.no_grad() if index_only else nullcontext():
            o_bshv, _ = chunked_gdn(*self.recurrence(x_bsh, *self.mixed(x_bsh, cis_bsr)))
            return self.output(self.gated(o_bshv, x_bsh)), None, None

    @staticmethod
    def _heads(q_bshk, k_bsgk, v_bsgv) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k normalised; k, v repeated to the query heads."""
        groups = q_bshk.shape[2] // k_bsgk.shape[2]
        if groups > 1:
            k_bsgk, v_bsgv = k_bsgk.repeat_interleave(groups, dim=2), v_bsgv.repeat_interleave(groups, dim=2)
        return l2_normalise(q_bshk), l2_normalise(k_bsgk), v_bsgv


class _SimpleGdn(_Recurrent):
    def __init__(self, cfg: ModelConfig):
        super().__init__(cfg)
        self.decay = cfg.simple_gdn_decay

    def mixed(self, x_bsh: torch.Tensor, cis_bsr: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(q, k, v) that enter the recurrence."""
        return self.project_qkv(x_bsh, cis_bsr)

    def recurrence(self, x_bsh: torch.Tensor, q, k, v) -> tuple[torch.Tensor | None, ...]:
        """(q, k, v, log a, b) for kernels.gdn."""
        log_a = fixed_log_decay(self.heads, x_bsh.device).expand(q.shape[:3]) if self.decay == "fixed" else None
        return *self._heads(q, k, v), log_a, q.new_ones(q.shape[:3])

    def gated(self, o_bshv: torch.Tensor, x_bsh: torch.Tensor) -> torch.Tensor:
        """[B,S,H,dv] in front of o_proj: as it is."""
        return o_bshv


class _Gdn(_Recurrent):
    def __init__(self, cfg: ModelConfig):
        super().__init__(cfg)
        heads, qk, v, kernel = cfg.num_attention_heads, cfg.qk_head_dim, cfg.value_head_dim, cfg.linear_conv_kernel_dim
        self.q_conv1d = ShortConv(heads * qk, kernel)
        self.k_conv1d = ShortConv(cfg.kv_heads * qk, kernel)
        self.v_conv1d = ShortConv(cfg.kv_heads * v, kernel)
        self.b_proj = nn.Linear(cfg.hidden_size, heads, bias=False)
        self.a_proj = nn.Linear(cfg.hidden_size, heads, bias=False)
        self.g_proj = nn.Linear(cfg.hidden_size, heads * v, bias=False)
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.dt_bias = nn.Parameter(torch.zeros(heads))
        self.o_norm = RMSNorm(v, cfg.rms_norm_eps)

    def decay(self, x_bsh: torch.Tensor) -> torch.Tensor:
        """log a [B,S,H] = -exp(A_log) * softplus(W_a x + dt_bias), at least fp32."""
        work = torch.float64 if x_bsh.dtype == torch.float64 else torch.float32
        return -self.A_log.to(work).exp() * F.softplus(self.a_proj(x_bsh).to(work) + self.dt_bias.to(work))

    def mixed(self, x_bsh: torch.Tensor, cis_bsr: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(q, k, v) that enter the recurrence: projected without RoPE, convolved."""
        q, k, v = self.project_qkv(x_bsh, None)
        return self.q_conv1d(q), self.k_conv1d(k), self.v_conv1d(v)

    def recurrence(self, x_bsh: torch.Tensor, q, k, v) -> tuple[torch.Tensor | None, ...]:
        """(q, k, v, log a, b) for kernels.gdn."""
        return *self._heads(q, k, v), self.decay(x_bsh), self.b_proj(x_bsh).sigmoid()

    def gated(self, o_bshv: torch.Tensor, x_bsh: torch.Tensor) -> torch.Tensor:
        """[B,S,H,dv] in front of o_proj: normalised per head, gated."""
        return self.o_norm(o_bshv) * F.silu(self.g_proj(x_bsh)).view(o_bshv.shape)


class GdnMLA(_Gdn, MLAProjections):
    """Gated DeltaNet over MLA's latent projections."""


class GdnGQA(_Gdn, GQAProjections):
    """Gated DeltaNet over GQA's projections."""


class SimpleGdnMLA(_SimpleGdn, MLAProjections):
    """SimpleGDN over MLA's latent projections."""


class SimpleGdnGQA(_SimpleGdn, GQAProjections):
    """SimpleGDN over GQA's projections."""
