"""Fused attention kernels: the same numbers as plain attention, without its [length, length] arrays.

A new kernel is a file with its `Kernel` and a line here. A kernel that is named and cannot run is an error, never the
plain form in silence. By rule the plain form are the last layer of an encoder without a sparse pattern, read at few
positions, and an evaluation whose memory a kernel does not take (`pretrain/training/attention_choice.py`).
"""

from models.attention.kernels import cudnn, pattern_kernel, relative_kernel, splash
from models.attention.kernels.kernel import Attention, Kernel
from models.core.program import PLAIN

# By name; of two that could compute an attention on a platform the first is taken.
KERNELS: dict[str, Kernel] = {
    kernel.name: kernel for kernel in (splash.KERNEL, cudnn.KERNEL, relative_kernel.KERNEL, pattern_kernel.KERNEL)
}


def first_able(named: str, form: str, attention: Attention) -> tuple[Kernel | None, list[str]]:
    """Of the kernels that are named, joined by '+', the first that can compute an attention of a form; or None, and why
    the first for its kind cannot.

    So each layer takes a kernel of its own. ValueError where there is none of a name.
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
    """The kernel of `first_able`; ValueError with the reasons where there is none."""
    kernel, obstacles = first_able(named, form, attention)
    if kernel is None:
        raise ValueError(f"attention {named} does not work here: {'; '.join(obstacles)}; or use xla")
    return kernel
