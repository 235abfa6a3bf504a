"""The sides of speed measurements: our train step and Hugging Face's model in torch, on the same random batch.

Each is made in a process of its own, on its first GPU or on the CPU, and has the same methods; calling one takes the
steps of a turn, with no synchronisation in between.
"""

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.trace import longest
from data_pipelines.errors import UserError

SHARE = 0.45  # of a GPU's memory, for each side
HEADS = ("cls", "predictions", "lm_head")  # what Hugging Face's encoders call that of masked tokens
FIRST_WORD = 5  # ids below are special


@dataclasses.dataclass(frozen=True)
class Case:
    """What is trained.   recipe: its name.   rows, length: of a batch.   changes: fields of its model, where it has
    them.   steps: of a turn.   backend: of torch.compile; None for inductor on a GPU, and no torch.compile on a CPU.
    dtype, depth, attention, remat: as of `pretrain run`.
    """

    recipe: str
    rows: int
    length: int
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    steps: int = 1
    backend: str | None = None
    dtype: str | None = None
    depth: str | None = None
    attention: str | None = None
    remat: str | None = None


def recipe_of(case: Case):
    """As published but for one phase of this shape, AdamW (T5: its Adafactor), no pairs, no memory, and what the case
    changes."""
    from data_pipelines.examples.permutations import Permuting
    from data_pipelines.examples.span_corruption import sizes_of
    from pretrain.optimizers import Optimizer
    from pretrain.recipes.registry import find

    recipe, changes = find(case.recipe), {"memory": 0, **case.changes}
    if case.length > getattr(recipe.model, "positions", case.length):
        changes["positions"] = case.length
    spans = Permuting(reuse_len=case.length // 2, perm_size=case.length // 2)  # at 512 as published
    objective = _changed(recipe.objective, {"next_sentence": False, "sentence_order": False, "permuting": spans})
    layout, targets = getattr(objective, "layout", ""), {}
    if layout in ("span-corruption", "denoising"):
        shorter = layout == "span-corruption"
        targets["target_length"] = sizes_of(case.length, objective.corruption).target if shorter else case.length
    phase = objective.phase(1.0, case.length, case.rows, **targets)
    optimizer = recipe.optimizer if recipe.optimizer.name == "adafactor" else Optimizer()
    of_row = {"objective": objective, "phases": (phase,), "optimizer": optimizer}
    return dataclasses.replace(recipe, model=_changed(recipe.model, changes), **of_row)


def _changed(value, changes: dict):
    """With those of the changes for which it has a field."""
    names = {field.name for field in dataclasses.fields(value)}
    return dataclasses.replace(value, **{name: to for name, to in changes.items() if name in names})


def batch_of(recipe) -> dict[str, np.ndarray]:
    """Rows of random tokens without padding: the arrays that the recipe's objective reads."""
    rng, phase, vocab = np.random.default_rng(0), recipe.phases[0], recipe.model.vocab_size
    rows, length, spec = phase.batch_size, phase.length, recipe.objective.spec(phase)
    slots = spec["prediction_positions"][0][0] if "prediction_positions" in spec else length
    tokens = rng.integers(FIRST_WORD, vocab, (rows, length), dtype=np.int32)
    # Never the first token, which is global where a row names global tokens.
    positions = rng.permuted(np.tile(np.arange(1, length, dtype=np.int32), (rows, 1)), axis=1)[:, :slots]
    types = np.arange(length, dtype=np.int32) * 2 // length % (getattr(recipe.model, "types", 2) or 1)
    batch = {
        "tokens": tokens,
        "types": np.tile(types, (rows, 1)),
        "segments": np.ones((rows, length), np.int32),
        "globals": np.zeros((rows, 1), np.int32),
        "prediction_positions": np.sort(positions, axis=1),
        "prediction_targets": rng.integers(FIRST_WORD, vocab, (rows, slots), dtype=np.int32),
        "prediction_weights": np.ones((rows, slots), np.float32),
        "targets": np.roll(tokens, -1, axis=1),
        "weights": np.ones((rows, length), np.float32),
        **dict.fromkeys(("next_sentence", "sentence_order"), rng.integers(0, 2, rows, dtype=np.int32)),
    }
    if "decoder_tokens" in spec:
        targets = batch["targets"][:, : phase.target_length]
        batch |= {"targets": targets, "decoder_tokens": np.roll(targets, 1, axis=1)}
        batch |= {"decoder_segments": np.ones_like(targets), "weights": np.ones(targets.shape, np.float32)}
    batch |= _permuted(rng, batch["prediction_positions"], length)
    if "soft_ids" in spec:
        shape = rows, *spec["soft_ids"].shape
        chosen = rng.integers(0, vocab // shape[-1], shape, dtype=np.int32) * shape[-1] + np.arange(shape[-1])
        shares = rng.dirichlet(np.full(shape[-1] + 1, 0.3), shape[:-1]) + 1e-6
        batch |= {"soft_ids": chosen.astype(np.int32), "soft_logs": np.log(shares).astype(np.float16)}
    return {name: batch[name] for name in spec}


def _permuted(rng: np.random.Generator, positions: np.ndarray, length: int) -> dict[str, np.ndarray]:
    """XLNet's orders: of every row its own, its targets the last in it."""
    rows, slots = positions.shape
    ranks = rng.permuted(np.tile(np.arange(length, dtype=np.int32), (rows, 1)), axis=1)
    np.put_along_axis(ranks, positions, length + np.arange(slots, dtype=np.int32)[None], axis=1)
    thresholds = ranks + 1
    thresholds[np.arange(rows)[:, None], positions] -= 1
    return {"ranks": ranks, "thresholds": thresholds, "reversed": np.zeros(rows, np.int32)}


def check_device(found: bool, package: str) -> None:
    """UserError where a package does not see the GPU that this machine has."""
    from pretrain.commands.platform import accelerators

    if accelerators() and not found:
        raise UserError(f"{package} sees no GPU here: install it with CUDA")


def compiled_step(case: Case):
    """(assembly, stage, its compiled step) with the program that `pretrain run` takes by default."""
    from pretrain.commands.platform import prepare

    prepare()
    import jax

    check_device(jax.default_backend() == "gpu", "jax")
    from pretrain.training.assembly import assemble
    from pretrain.training.attention_choice import chosen_program
    from pretrain.training.placement import stages

    recipe, mesh = recipe_of(case), _mesh()
    assembly = assemble(recipe, chosen_program(recipe, case, mesh))
    (stage,) = stages(assembly, mesh)
    return assembly, stage, stage.train.run.lower(*stage.train.arguments).compile()


def _mesh():
    import jax

    from tpu.mesh import choose_mesh

    return choose_mesh("data=1", jax.devices()[:1])


def needed(compiled) -> int:
    """Bytes that a compiled step takes by the compiler's count."""
    counted = compiled.memory_analysis()
    return counted.temp_size_in_bytes + counted.argument_size_in_bytes


class Ours:
    """The step of `pretrain run` on the first device."""

    def __init__(self, case: Case):
        os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(SHARE)
        self.assembly, stage, self.run = compiled_step(case)
        import jax

        from pretrain.training.assembly import initial_params
        from pretrain.training.attention_choice import why_plain
        from pretrain.training.placement import shardings
        from pretrain.training.step import given_in, initial_state

        self.plain = why_plain(self.assembly, case, _mesh())
        recipe = self.assembly.recipe
        made = *initial_state(self.assembly, initial_params(self.assembly)), batch_of(recipe), given_in(recipe, 0)
        self.state, self.frozen, *self.given = jax.device_put(made, shardings(stage.train.arguments))
        self.steps = case.steps

    def __call__(self) -> float:
        import jax

        for _ in range(self.steps):
            self.state, metrics = self.run(self.state, self.frozen, *self.given)
        jax.block_until_ready(self.state)
        return float(metrics.loss)

    def about(self) -> dict:
        """program, why attention is plain, device, its peak FLOP/s, model FLOPs of a step, peak bytes in use (on a CPU
        those of the step by the compiler's count)."""
        import jax

        from pretrain.training.step import model_flops
        from tpu.chips import peak_flops

        program, device, recipe = self.assembly.model.program, jax.devices()[0], self.assembly.recipe
        return {
            "program": f"{program.dtype}, {program.depth}, remat {program.remat}, attention {program.attention}",
            "plain": self.plain,
            "device": device.device_kind,
            "platform": device.client.platform_version.splitlines()[0],
            "peak": peak_flops(device.device_kind),
            "flops": model_flops(recipe, recipe.phases[0]),
            "memory": (device.memory_stats() or {}).get("peak_bytes_in_use", needed(self.run)),
        }

    def longest(self, folder: Path) -> list[tuple[str, float]]:
        """(operation, ms of a step) of the longest ones, from a trace of a turn that is left in a folder."""
        import jax

        with jax.profiler.trace(str(folder)):
            self()
        return longest(folder, self.steps)


class Theirs:
    """Hugging Face's model with sdpa where it has that and fused AdamW; on a GPU by torch.compile, in bfloat16 by
    autocast."""

    def __init__(self, case: Case):
        from pretrain.commands.platform import keep_memory

        keep_memory()
        import torch

        torch.set_num_threads(len(os.sched_getaffinity(0)))
        self.cuda = torch.cuda.is_available()
        check_device(self.cuda, "torch")
        device = torch.device("cuda" if self.cuda else "cpu")
        if self.cuda:
            torch.cuda.set_per_process_memory_fraction(SHARE)
        torch.set_float32_matmul_precision("high")
        recipe = recipe_of(case)
        model, loss = torch_loss(recipe, batch_of(recipe), device)
        self.model = model.to(device).train()
        backend = case.backend or ("inductor" if self.cuda else None)
        self.loss = torch.compile(loss, backend=backend, dynamic=False) if backend else loss
        if recipe.optimizer.name == "adafactor":
            self.optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2, foreach=True)
        else:
            self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, eps=1e-6, weight_decay=0.01, fused=True)
        self.clip, self.steps = recipe.optimizer.clip, case.steps

    def __call__(self) -> float:
        import torch

        for _ in range(self.steps):
            self.optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16) if self.cuda else contextlib.nullcontext():
                value = self.loss()
            value.backward()
            if self.clip:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip, foreach=True)
            self.optimizer.step()
        if self.cuda:
            torch.cuda.synchronize()
        return value.item()

    def about(self) -> dict:
        """device, version of cuDNN, peak bytes in use."""
        import torch

        if not self.cuda:
            return {"device": "cpu", "platform": "", "memory": None}
        versions = f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
        memory = torch.cuda.max_memory_allocated()
        return {"device": torch.cuda.get_device_name(), "platform": versions, "memory": memory}


def torch_loss(recipe, batch: dict, device):
    """(module, () -> the loss of a batch) for a recipe's family, logits only where a loss reads them.

    Rows are full, so that no attention mask is given but XLNet's, and scaled_dot_product_attention may be flash's.
    """
    import torch

    on_device = lambda array: torch.from_numpy(np.ascontiguousarray(array)).to(device)
    models = torch_models(recipe)
    if "ranks" in batch:
        (model,) = models
        inputs = {name: on_device(array) for name, array in _xlnet_inputs(batch).items()}
        return model, lambda: model(**inputs).loss
    tokens = on_device(batch["tokens"]).long()
    if "targets" in batch:
        (model,) = models
        targets, more = on_device(batch["targets"]).long().flatten(), {}
        if "decoder_tokens" in batch:
            more = {"decoder_input_ids": on_device(batch["decoder_tokens"]).long()}
        return model, lambda: torch.nn.functional.cross_entropy(model(tokens, **more).logits.flatten(0, 1), targets)
    rows, length = tokens.shape
    flat = on_device((np.arange(rows)[:, None] * length + batch["prediction_positions"]).ravel())
    inputs = {"input_ids": tokens}
    if hasattr(recipe.model, "types"):
        inputs["token_type_ids"] = on_device(batch["types"]).long()
    if "globals" in batch:
        marks = np.zeros((rows, length), np.int64)
        np.put_along_axis(marks, batch["globals"], 1, axis=1)
        inputs["global_attention_mask"] = on_device(marks)
    masked = inputs, flat, on_device(batch["prediction_targets"]).long().flatten()
    if len(models) == 2:
        discriminator, generator = models
        if not hasattr(discriminator, "discriminator_predictions"):  # a DeBERTa's, whose head no class has
            discriminator.discriminator_predictions = torch.nn.Linear(recipe.model.width, 1)
        return torch.nn.ModuleList(models), lambda: _detection_loss(*models, *masked, recipe.objective)
    (model,) = models
    return model, lambda: _masked_loss(model.base_model, _token_head(model), *masked)[0]


def _xlnet_inputs(batch: dict) -> dict[str, np.ndarray]:
    """A batch as XLNetLMHeadModel takes it, with its labels: the query stream and logits at the targets alone."""
    length = batch["ranks"].shape[1]
    return {
        "input_ids": batch["tokens"].astype(np.int64),
        "token_type_ids": batch["types"].astype(np.int64),
        "perm_mask": (batch["ranks"][:, None, :] >= batch["thresholds"][:, :, None]).astype(np.float32),
        "target_mapping": np.eye(length, dtype=np.float32)[batch["prediction_positions"]],
        "labels": batch["prediction_targets"].astype(np.int64),
    }


def torch_models(recipe) -> list:
    """Hugging Face's models of a recipe, by the family's own export; ELECTRA's share their embeddings. A DeBERTa's
    have one table each, which costs what a table of differences does, and no enhanced mask decoder."""
    import transformers

    from models.families.registry import family_of
    from pretrain.huggingface.export import config_fields
    from pretrain.training.assembly import made_heads

    models, heads = [], made_heads(recipe.model, recipe.objective.asks)
    for part in family_of(recipe.model).hf:
        fields = config_fields(recipe.model, part, heads, {"bos_token_id": None, "eos_token_id": None})
        fields.setdefault("pad_token_id", 0)
        cls = getattr(transformers, fields["architectures"][0])
        how = "sdpa" if cls._supports_sdpa else "eager"
        models.append(cls(cls.config_class(**fields, use_cache=False, attn_implementation=how)))
    for other in models[1:] if hasattr(models[0], "electra") else ():
        other.electra.embeddings = models[0].electra.embeddings
        other.tie_weights()
    return models


def _token_head(model):
    """Hidden states -> logits, by the head of a model for masked tokens."""
    if hasattr(model, "generator_lm_head"):
        return lambda hidden: model.generator_lm_head(model.generator_predictions(hidden))
    if hasattr(model, "lm_predictions"):
        return lambda hidden: model.lm_predictions(hidden, model.get_input_embeddings())
    if hasattr(model, "decoder"):  # ModernBERT's, as with its `sparse_prediction`
        return lambda hidden: model.decoder(model.head(hidden))
    return next(getattr(model, name) for name in HEADS if hasattr(model, name))


def _masked_loss(trunk, head, inputs, flat, targets):
    """(cross-entropy at the predicted positions, their logits)."""
    import torch

    hidden = trunk(**inputs).last_hidden_state
    logits = head(hidden.flatten(0, 1)[flat])
    return torch.nn.functional.cross_entropy(logits, targets), logits


def _detection_loss(discriminator, generator, inputs, flat, targets, objective):
    """The generator's loss and, weighted, the discriminator's on what the generator samples."""
    import torch

    of_generator, logits = _masked_loss(generator.base_model, _token_head(generator), inputs, flat, targets)
    noise = -torch.empty_like(logits, dtype=torch.float32).exponential_().log()
    sampled = (logits.detach() + noise).argmax(-1)
    originals = inputs["input_ids"].flatten().scatter(0, flat, targets)
    corrupted = originals.scatter(0, flat, sampled)
    hidden = discriminator.base_model(
        **inputs | {"input_ids": corrupted.view_as(inputs["input_ids"])}
    ).last_hidden_state
    scores = discriminator.discriminator_predictions(hidden).flatten()
    replaced = (corrupted != originals).float()
    of_discriminator = torch.nn.functional.binary_cross_entropy_with_logits(scores, replaced)
    return of_generator + objective.discriminator_weight * of_discriminator
