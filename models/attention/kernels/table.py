"""The table of fused attention kernels, which compute plain attention without its [length, length] arrays.

A new kernel is a file with its `Kernel` and a line here. If a kernel is named and cannot run, that is an error, never a
silent fallback. Two cases always use plain attention: the last layer of an encoder without a sparse pattern, which is
computed at few positions, and an evaluation whose memory no kernel takes (`pretrain/training/attention_choice.py`).
"""

from models.attention.kernels import cudnn, pattern_kernel, relative_kernel, splash
from models.attention.kernels.kernel import Attention, Kernel
from models.core.program import PLAIN

# By name. Each platform has at most one kernel of a kind (its form, sparse or not).
KERNELS: dict[str, Kernel] = {
    kernel.name: kernel for kernel in (splash.KERNEL, cudnn.KERNEL, relative_kernel.KERNEL, pattern_kernel.KERNEL)
}


def choose(named: str, form: str, attention: Attention) -> tuple[Kernel | None, list[str]]:
    """Return the first of the named kernels that can compute an attention, and []; or None, and the obstacles of the
    first named kernel of that kind (form, sparse or not).
    named: names joined by '+'.   Raises ValueError for an unknown name."""
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
    """Return the first named kernel that can compute a layer's attention; ValueError with reasons if none can."""
    kernel, obstacles = choose(named, form, attention)
    if kernel is None:
        raise ValueError(f"attention {named} does not work here: {'; '.join(obstacles)}; or use xla")
    return kernel
