"""What a soak compares and what should not be there; see `benchmarks.soak`."""

import re
from pathlib import Path

# A stack of Python or C++, or what C++ logs as an error
NOISE = re.compile(r"Traceback|\[Gloo\]|stack trace|@ +0x|^(\[\d\] )?[EF]\d{4} |leaked|Exception ignored", re.MULTILINE)
OF_THE_CLOCK = ("step_ms", "tokens_per_s", "model_tflops_per_s", "seconds_left", "kind", "step")
OWN_NAMES = re.compile(r"/d/[0-9a-f]{32}$|events\.out\.tfevents\..*$")  # of files that are called anew by each writer


def differences(one: Path, other: Path) -> list[str]:
    """In what two finished work directories differ that should not."""
    import jax
    import numpy as np

    from pretrain.storage.journal import read_metrics
    from pretrain.storage.run_directory import RunDirectory

    found, a, b = [], RunDirectory(one), RunDirectory(other)
    for kind in ("train", "eval"):
        left, right = ({_figures(entry) for entry in read_metrics(run, kind)} for run in (a, b))
        if left != right:
            found.append(f"{kind} figures differ: {sorted(left ^ right)[:4]}")
        if (twice := len(read_metrics(b, kind)) - len(right)) > 0:
            found.append(f"{twice} {kind} figures are there twice")
    if a.checkpoint_steps() != b.checkpoint_steps():
        found.append(f"checkpoints {a.checkpoint_steps()} and {b.checkpoint_steps()}")
    states = [jax.tree.leaves_with_path(_last_state(run)) for run in (a, b)]
    pairs = [(path, np.asarray(left), np.asarray(right)) for (path, left), (_, right) in zip(*states, strict=True)]
    differ = [jax.tree_util.keystr(path) for path, left, right in pairs if left.tobytes() != right.tobytes()]
    if differ:
        found.append(f"{len(differ)} of {len(pairs)} arrays of the last checkpoint differ, as {differ[0]}")
    if names := _names(one) ^ _names(other):
        found.append(f"files differ: {sorted(names)[:5]}")
    return found


def _figures(entry: dict) -> tuple:
    """A measurement without what the clock says."""
    return entry["step"], *((name, value) for name, value in sorted(entry.items()) if name not in OF_THE_CLOCK)


def _last_state(directory):
    """The train state of the newest checkpoint."""
    import jax

    from pretrain.storage.checkpoints import load, phase_of, verified
    from pretrain.training.assembly import assemble
    from pretrain.training.placement import any_task, stages
    from tpu.mesh import row_mesh

    step, mesh = max(directory.checkpoint_steps()), row_mesh(jax.local_devices()[:1], [1])
    recipe, folder = directory.read_recipe(), directory.checkpoints / str(step)
    like = any_task(stages(assemble(recipe), mesh), phase_of(folder, recipe)).state
    return verified(*load(folder, like), like)


def _names(workdir: Path) -> set[str]:
    names = {str(file.relative_to(workdir)) for file in workdir.rglob("*") if file.is_file()}
    return {OWN_NAMES.sub("*", name) for name in names}


def unreadable(said: str, status: int | None) -> list[str]:
    """What a user should not have to read, or misses."""
    found = [f"says {match.group()!r}" for match in [NOISE.search(said)] if match]
    if status == 2 and not re.search(r"^(\[\d\] )?error: ", said, re.MULTILINE):
        found.append("status 2 without a line that says why")
    return found


def left_behind(temporary: Path, workdir: Path) -> list[str]:
    """Temporary files, and checkpoints that were set aside though none was damaged."""
    found = [f"left {file.name} among the temporary files" for file in temporary.iterdir()]
    return found + [f"{file.name} was set aside" for file in workdir.glob("checkpoints/*.damaged")]
