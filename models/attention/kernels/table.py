"""Fused attention kernels: the same numbers as plain attention, without its [length, length] arrays.

A new kernel is a file with its `Kernel` and a line here. A kernel that is named and cannot run is an error, never the
plain form in silence. By rule the plain form are attention to a second sequence, the last layer of an encoder without a
sparse pattern, read at few positions, and an evaluation whose memory a kernel does not take
(`pretrain/training/attention_choice.py`).
"""

from models.attention.kernels import cudnn, pattern_kernel, relative_kernel, splash
from models.attention.kernels.kernel import Attention, Kernel
from models.core.program import PLAIN

# By name; of two that could compute an attention on a platform the first is taken.
KERNELS: dict[str, Kernel] = {
    kernel.name: kernel for kernel in (splash.KERNEL, cudnn.KERNEL, relative_kernel.KERNEL, pattern_kernel.KERNEL)
}


def require(name: str, form: str, attention: Attention) -> Kernel:
    """The kernel of this name; ValueError where there is none, and with the reasons where it
    cannot compute an attention of a form."""
    if name not in KERNELS:
        raise ValueError(f"program.attention={name!r}: use one of {', '.join((*PLAIN, *KERNELS))}")
    kernel = KERNELS[name]
    obstacles = kernel.obstacles(attention) if kernel.form == form else [f"it computes {kernel.form} attention"]
    if obstacles:
        raise ValueError(f"attention {name} does not work here: {'; '.join(obstacles)}; or use xla")
    return kernel
