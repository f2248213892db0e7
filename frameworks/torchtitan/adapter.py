"""torchtitan as a backend: Trainer.train with its own Llama and Qwen3 models, on FSDP2 and hybrid sharding.

Models are built by torchtitan's builders, weights come in by its checkpointer from safetensors, steps end by its
metrics. What differs between its releases is in ``release_0_3`` and ``release_0_2``. flex_attention has no backward
pass on the CPU; there, SDPA gets its mask.
"""

import importlib.metadata
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

import parity

BACKENDS = ("Torchtitan",)

VERSION = importlib.metadata.version("torchtitan")
with parity.on_cpu():
    if tuple(map(int, VERSION.split(".")[:2])) >= (0, 3):
        import release_0_3 as release
    else:
        import release_0_2 as release  # type: ignore[no-redef]
    import torchtitan.config


class Torchtitan(parity.FrameworkAdapter):
    preload = ("adapter",)
    conventions: ClassVar = (parity.TrainedPaddingToken(), parity.GeneratorsNotSaved(), *release.CONVENTIONS)

    @classmethod
    def describe(cls) -> parity.BackendInfo:
        return parity.BackendInfo(name="torchtitan", packages=("torch", "torchtitan", "spmd_types"), default_zero=3)

    @classmethod
    def refuses(cls, scenario: parity.Scenario, layout: parity.Layout) -> str:
        if layout != parity.Layout(dp=layout.dp, rep=layout.rep):
            return f"this adapter runs FSDP2 and hybrid sharding; use dp{layout.world_size}"
        if scenario.optimizer.name != "adamw":
            return "torchtitan has Adam, AdamW and Muon; use a scenario with AdamW"
        if scenario.model_name not in ("llama", "qwen3"):
            return "this adapter builds torchtitan's Llama and Qwen3; use one of them"
        if scenario.optimizer.frozen or scenario.lora:
            return "this adapter trains all parameters; use a scenario without frozen ones and adapters"
        if scenario.schedule.warmup_steps:
            return "torchtitan's warm-up begins at 1 / steps and not at 0; use a scenario without one"
        if scenario.precision == "fp16":
            return "torchtitan has no loss scale; use bf16"
        if scenario.precision == "bf16" and not torch.cuda.is_available():
            return "FSDP2 divides bf16 gradients by a reduction that gloo lacks; use a GPU"
        return release.refuses(scenario)

    def setup(
        self, scenario: parity.Scenario, layout: parity.Layout, weights: Mapping[str, Path], device: str
    ) -> dict[str, Any]:
        self.scenario, self.layout, self.loader = scenario, layout, parity.Loader()
        self.stack.enter_context(parity.on_cpu())
        self.stack.enter_context(parity.float64_for(torchtitan.config, "TORCH_DTYPE_MAP"))
        if device == "cpu":
            self.stack.enter_context(torch.compiler.set_stance("force_eager"))
        self.length = -(-scenario.data.max_len // 128) * 128  # flex_attention's blocks
        folder = weights["policy"]
        hf = json.loads((folder / "config.json").read_text())
        clip = release.dist_utils.clip_grad_norm_

        def shown(*args: Any, **kwargs: Any) -> torch.Tensor:
            self.on_gradients("policy")
            norm: torch.Tensor = clip(*args, **kwargs)
            return norm

        self.patch(release.dist_utils, "clip_grad_norm_", shown)
        self.patch(release.dist_utils, "set_pg_timeouts", lambda **_: None)  # needs a torch after 2.13
        self.trainer = release.make_trainer(self, hf, folder, layout)
        self.stack.callback(self.trainer.close)
        self.trainer.checkpointer.load()
        self.patch(self.trainer.checkpointer, "load", lambda **_: False)  # train() would read all once more
        (self.model,) = self.trainer.model_parts
        self.loop = parity.Paused(lambda pause: self.trainer.train())
        self.stack.callback(self.loop.close)
        return {"optimizer": repr(self.trainer.optimizers.optimizers), "model": repr(self.model)}

    def cross_entropy(self, logits: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Stands before torchtitan's loss, and keeps log-probs of the logits that it gets, which are chunks of rows."""
        flat = torch.log_softmax(logits.detach().to(torch.get_default_dtype()), -1)
        self.chunks.append(flat.gather(-1, labels.clamp(min=0)[..., None])[..., 0])
        return self.loss(logits, labels, **kwargs)

    def ended(self, loss: float, norm: float, lr: float) -> None:
        """Pauses the loop where a step has ended, with what torchtitan logs."""
        self.loop.pause({"loss": loss, "grad_norm": norm, "lr": lr, "token_count": int(self.tokens)})

    def sample(self, rows: tuple[parity.Row, ...]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Returns tokens, positions and shifted labels of whole rows, as torchtitan's loaders give them."""
        tokens = torch.zeros(len(rows), self.length, dtype=torch.long)
        positions, labels = torch.zeros_like(tokens), torch.full_like(tokens, -100)
        for i, row in enumerate(rows):
            at = 0
            for d in row.documents:
                n = len(d.tokens)
                tokens[i, at : at + n], positions[i, at : at + n] = torch.tensor(d.tokens), torch.arange(n)
                labels[i, at : at + n - 1] = torch.tensor(d.tokens[1:]).where(torch.tensor(d.targets[1:]), -100)
                at += n
            positions[i, at:] = torch.arange(self.length - at)  # padding is a document
        return {"input": tokens, "positions": positions}, labels

    def train_step(self, batch: parity.Batch, on_gradients: Callable[[str], None]) -> parity.StepMetrics:
        self.on_gradients, self.chunks = on_gradients, []
        parts = self.own(batch)
        self.loader.waiting = [self.sample(rows) for rows in parts]
        masks = [labels != -100 for _, labels in self.loader.waiting]
        values = self.loop.resume()
        rows: dict[int, torch.Tensor] = {}
        chunks = len(self.chunks) // len(parts)
        for i, (part, mask) in enumerate(zip(parts, masks, strict=True)):
            rows |= parity.by_row(torch.cat(self.chunks[i * chunks : (i + 1) * chunks], 1)[mask], part)
        return parity.StepMetrics(values=values, rows={"logprob": rows})

    def hugging_face(self, name: str, tensor: torch.Tensor) -> parity.NamedTensors:
        """Yields a whole tensor under its Hugging Face name, by torchtitan's own mapping."""
        if name == "tok_embeddings.weight":  # torchtitan's mapping of a tied model wants the head, too
            yield "model.embed_tokens.weight", tensor
        else:
            yield from self.trainer.checkpointer.sd_adapter.to_hf({name: tensor}).items()

    def tensors(self, kind: parity.TensorKind, model: str) -> parity.NamedTensors:
        for name, parameter in self.model.named_parameters():
            yield name, parameter if kind == "weight" else parameter.grad

    def named_tensors(self, kind: parity.TensorKind, model: str) -> parity.NamedTensors:
        for name, tensor in super().named_tensors(kind, model):
            yield from self.hugging_face(name, tensor)

    def save(self, path: Path) -> None:
        checkpointer = self.trainer.checkpointer
        checkpointer.folder, checkpointer.interval, interval = str(path), 1, checkpointer.interval
        checkpointer.save(self.trainer.step)
        checkpointer.interval = interval

    def load(self, path: Path) -> None:
        self.trainer.checkpointer.folder = str(path)
        type(self.trainer.checkpointer).load(self.trainer.checkpointer)
