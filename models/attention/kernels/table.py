"""Fused attention kernels: the same numbers as plain attention, without its [length, length] arrays.

A new kernel is a file with its `Kernel` and a line here. A kernel that is named and cannot run is an error, never the
plain form in silence. By rule the plain form are the last layer of an encoder without a sparse pattern, read at few
positions, and an evaluation whose memory a kernel does not take (`pretrain/training/attention_choice.py`).
"""

from models.attention.kernels import cudnn, pattern_kernel, relative_kernel, splash
from models.attention.kernels.kernel import Attention, Kernel
from models.core.program import PLAIN

# By name. On each platform there is at most one of a kind: its form, sparse or not.
KERNELS: dict[str, Kernel] = {
    kernel.name: kernel for kernel in (splash.KERNEL, cudnn.KERNEL, relative_kernel.KERNEL, pattern_kernel.KERNEL)
}


def choose(named: str, form: str, attention: Attention) -> tuple[Kernel | None, list[str]]:
    """The first of the named kernels that can compute an attention, and []; else None, and the obstacles of the first
    kernel of its kind: form, sparse or not.

    named: names joined by '+'; ValueError for one that no kernel has.
    """
    why = []
    for name in named.split("+"):
        if name not in KERNELS:
            raise ValueError(f"program.attention={named!r}: use one of {', '.join((*PLAIN, *KERNELS))}")
        kernel = KERNELS[name]
        if (kernel.form, kernel.sparse) == (form, attention.blocks is not None):
            obstacles = kernel.obstacles(attention)
            if not obstacles:
                return kernel, []
            why = why or obstacles
    kind = "a sparse pattern" if attention.blocks is not None else f"{form} attention without a sparse pattern"
    return None, why or [f"it does not compute {kind}"]


def require(named: str, form: str, attention: Attention) -> Kernel:
    """The kernel for a layer's attention, of those named; ValueError with the reasons where none can compute it."""
    kernel, obstacles = choose(named, form, attention)
    if kernel is None:
        raise ValueError(f"attention {named} does not work here: {'; '.join(obstacles)}; or use xla")
    return kernel
