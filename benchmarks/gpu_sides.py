"""The two sides of `benchmarks.gpu`: our train step and Hugging Face's model in torch, on the same random batch.

Both are made in a process of their own and have the same methods; calling one takes the steps of a turn, with no
synchronisation in between.
"""

import contextlib
import dataclasses
import os
from pathlib import Path

import numpy as np

from benchmarks.trace import longest
from benchmarks.train_speed import random_batch
from data_pipelines.errors import UserError

SHARE = 0.45  # of the device's memory, for each side


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the table.   recipe: its name.   rows, length: of a batch.   attention_dropout: None as published.
    steps: of a turn.   backend: of torch.compile.   dtype, depth, attention, remat: as of `pretrain run`.
    """

    recipe: str
    rows: int
    length: int
    attention_dropout: float | None = None
    steps: int = 5
    backend: str = "inductor"
    dtype: str | None = None
    depth: str | None = None
    attention: str | None = None
    remat: str | None = None


def recipe_of(case: Case):
    """As published but for one phase of this shape, AdamW, no pairs and no memory."""
    from data_pipelines.examples.permutations import Permuting
    from pretrain.objectives.phase import Phase
    from pretrain.optimizers import Optimizer
    from pretrain.recipes.registry import find

    recipe, changes = find(case.recipe), {"pair_head": False, "memory": 0}
    if case.attention_dropout is not None:
        changes["attention_dropout"] = case.attention_dropout
    if case.length > getattr(recipe.model, "positions", case.length):
        changes["positions"] = case.length
    spans = Permuting(reuse_len=case.length // 2, perm_size=case.length // 2)  # at 512 as published
    objective = _changed(recipe.objective, {"next_sentence": False, "permuting": spans})
    of_row = {"objective": objective, "phases": (Phase(1.0, case.length, case.rows),), "optimizer": Optimizer()}
    return dataclasses.replace(recipe, model=_changed(recipe.model, changes), **of_row)


def _changed(value, changes: dict):
    """With those of the changes for which it has a field."""
    names = {field.name for field in dataclasses.fields(value)}
    return dataclasses.replace(value, **{name: to for name, to in changes.items() if name in names})


def batch_of(recipe) -> dict[str, np.ndarray]:
    """Rows of random tokens without padding: the arrays that the recipe's objective reads."""
    from benchmarks.xlnet_speed import permuted

    phase, vocab = recipe.phases[0], recipe.model.vocab_size
    batch = random_batch(vocab, phase.batch_size, phase.length, recipe.objective.predictions(phase))
    batch["segments"][:] = 1
    batch = permuted(batch) | {"targets": np.roll(batch["tokens"], -1, axis=1)}
    batch["weights"] = np.ones(batch["tokens"].shape, np.float32)
    return {name: batch[name] for name in recipe.objective.spec(phase)}


def check_device(found: bool, package: str) -> None:
    """UserError where a package does not see the GPU that this machine has."""
    from pretrain.commands.platform import accelerators

    if accelerators() and not found:
        raise UserError(f"{package} sees no GPU here: install it with CUDA")


class Ours:
    """The step of `pretrain run` on the first device, with the program that it takes by default."""

    def __init__(self, case: Case):
        os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(SHARE)
        from pretrain.commands.platform import prepare

        prepare()
        import jax

        check_device(jax.default_backend() == "gpu", "jax")
        from pretrain.training.assembly import assemble, initial_params, initial_state
        from pretrain.training.attention_choice import chosen_program, why_plain
        from pretrain.training.placement import shardings, stages
        from tpu.mesh import choose_mesh

        recipe = recipe_of(case)
        mesh = choose_mesh("data=1", jax.devices()[:1])
        self.assembly = assemble(recipe, chosen_program(recipe, case, mesh))
        self.plain = why_plain(self.assembly, case, mesh)
        (stage,) = stages(self.assembly, mesh)
        made = *initial_state(self.assembly, initial_params(self.assembly), 0), batch_of(recipe)
        self.state, self.frozen, self.batch = jax.device_put(made, shardings(stage.train.arguments))
        self.run, self.steps = stage.train.run, case.steps

    def __call__(self) -> float:
        import jax

        for _ in range(self.steps):
            self.state, metrics = self.run(self.state, self.frozen, self.batch)
        jax.block_until_ready(self.state)
        return float(metrics.loss)

    def about(self) -> dict:
        """program, why attention is plain, device, its peak FLOP/s, model FLOPs of a step, peak bytes in use."""
        import jax

        from pretrain.training.assembly import model_flops
        from tpu.chips import peak_flops

        program, device, recipe = self.assembly.model.program, jax.devices()[0], self.assembly.recipe
        return {
            "program": f"{program.dtype}, {program.depth}, remat {program.remat}, attention {program.attention}",
            "plain": self.plain,
            "device": device.device_kind,
            "platform": device.client.platform_version.splitlines()[0],
            "peak": peak_flops(device.device_kind),
            "flops": model_flops(recipe, recipe.phases[0]),
            "memory": (device.memory_stats() or {}).get("peak_bytes_in_use"),
        }

    def longest(self, folder: Path) -> list[tuple[str, float]]:
        """(operation, ms of a step) of the longest ones, from a trace of a turn that is left in a folder."""
        import jax

        with jax.profiler.trace(str(folder)):
            self()
        return longest(folder, self.steps)


class Theirs:
    """Hugging Face's model by torch.compile, in bfloat16 by autocast, with sdpa where it has that, fused AdamW."""

    def __init__(self, case: Case):
        from pretrain.commands.platform import keep_memory

        keep_memory()
        import torch

        self.cuda = torch.cuda.is_available()
        check_device(self.cuda, "torch")
        device = torch.device("cuda" if self.cuda else "cpu")
        if self.cuda:
            torch.cuda.set_per_process_memory_fraction(SHARE)
        torch.set_float32_matmul_precision("high")
        recipe = recipe_of(case)
        model, loss = torch_loss(recipe, batch_of(recipe), device)
        self.model = model.to(device).train()
        self.loss = torch.compile(loss, backend=case.backend, dynamic=False)
        how = {"fused": True} if self.cuda else {"foreach": True}
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, eps=1e-6, weight_decay=0.01, **how)
        self.steps = case.steps

    def __call__(self) -> float:
        import torch

        for _ in range(self.steps):
            self.optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16) if self.cuda else contextlib.nullcontext():
                value = self.loss()
            value.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
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

    from benchmarks.xlnet_speed import torch_inputs

    on_device = lambda array: torch.from_numpy(np.ascontiguousarray(array)).to(device)
    if "ranks" in batch:
        (model,) = _torch_models(recipe)
        inputs = {name: tensor.to(device) for name, tensor in torch_inputs(batch).items()}
        return model, lambda: model(**inputs).loss
    tokens = on_device(batch["tokens"]).long()
    if "targets" in batch:
        (model,) = _torch_models(recipe)
        targets = on_device(batch["targets"]).long().flatten()
        return model, lambda: torch.nn.functional.cross_entropy(model(tokens).logits.flatten(0, 1), targets)
    rows, length = tokens.shape
    flat = (torch.arange(rows)[:, None] * length + torch.from_numpy(batch["prediction_positions"])).flatten().to(device)
    masked = tokens, on_device(batch["types"]).long(), flat, on_device(batch["prediction_targets"]).long().flatten()
    if len(models := _torch_models(recipe)) == 2:
        return torch.nn.ModuleList(models), lambda: _electra_loss(*models, *masked, recipe.objective)
    (model,) = models
    return model, lambda: _masked_loss(model.bert, model.cls, *masked)[0]


def _torch_models(recipe) -> list:
    """Hugging Face's models of a recipe, by the family's own export; ELECTRA's share their embeddings."""
    import transformers

    from models.families.registry import family_of
    from pretrain.huggingface.export import config_fields

    models = []
    for part in family_of(recipe.model).hf:
        fields = config_fields(recipe.model, part, {"pad_token_id": 0})
        cls = getattr(transformers, fields["architectures"][0])
        how = "sdpa" if cls._supports_sdpa else "eager"
        models.append(cls(cls.config_class(**fields, use_cache=False, attn_implementation=how)))
    for other in models[1:]:
        other.electra.embeddings = models[0].electra.embeddings
        other.tie_weights()
    return models


def _masked_loss(trunk, head, tokens, types, flat, targets):
    """(cross-entropy at the predicted positions, their logits)."""
    import torch

    hidden = trunk(tokens, token_type_ids=types).last_hidden_state
    logits = head(hidden.flatten(0, 1)[flat])
    return torch.nn.functional.cross_entropy(logits, targets), logits


def _electra_loss(discriminator, generator, tokens, types, flat, targets, objective):
    """The generator's loss and, weighted, the discriminator's on what the generator samples."""
    import torch

    head = lambda hidden: generator.generator_lm_head(generator.generator_predictions(hidden))
    of_generator, logits = _masked_loss(generator.electra, head, tokens, types, flat, targets)
    noise = -torch.empty_like(logits, dtype=torch.float32).exponential_().log()
    sampled = (logits.detach() + noise).argmax(-1)
    originals = tokens.flatten().scatter(0, flat, targets)
    corrupted = originals.scatter(0, flat, sampled)
    hidden = discriminator.electra(corrupted.view_as(tokens), token_type_ids=types).last_hidden_state
    scores = discriminator.discriminator_predictions(hidden).flatten()
    replaced = (corrupted != originals).float()
    of_discriminator = torch.nn.functional.binary_cross_entropy_with_logits(scores, replaced)
    return of_generator + objective.discriminator_weight * of_discriminator
