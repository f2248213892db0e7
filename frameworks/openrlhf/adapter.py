"""OpenRLHF as a backend: SFTTrainer.fit, and PolicyModelActor.fit with CriticModelActor.fit, on its DeepspeedStrategy.

The options are those of OpenRLHF's command lines, with its defaults. Experience is made by its sample generator and its
RemoteExperienceMaker, and its replay buffer deals it out. Ray is not started: each rank computes its chunk of a rollout
and the ranks exchange the chunks, where Ray's workers would return them to the controller.
"""

import importlib.metadata
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from strategy import PausedStrategy, command_line
from torch.nn.utils.rnn import pad_sequence

import parity

BACKENDS = ("OpenRLHFSft", "OpenRLHFRl")

with parity.on_cpu(stand_ins=("vllm",)):
    import deepspeed
    import openrlhf.utils.utils
    from deepspeed.utils import (
        safe_get_full_fp32_param,
        safe_get_full_grad,
        safe_get_local_fp32_param,
        safe_get_local_grad,
    )
    from openrlhf.models import Actor
    from openrlhf.trainer.ppo_utils import experience_maker
    from openrlhf.trainer.ppo_utils.experience import Experience, make_experience_batch, split_experience_batch
    from openrlhf.trainer.ppo_utils.kl_controller import FixedKLController
    from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator
    from openrlhf.trainer.ray import ppo_actor, ppo_critic
    from openrlhf.trainer.ray.launcher import ReferenceModelActor
    from openrlhf.trainer.sft_trainer import SFTTrainer

VERSION = importlib.metadata.version("openrlhf")
RELEASE = tuple(map(int, VERSION.split(".")[:3]))
DATA_LOADER = torch.utils.data.DataLoader


class OpenRLHF(parity.FrameworkAdapter):
    """Holds what SFT and RL share: options, tensors at ZeRO 2 and 3, checkpoints."""

    preload = ("adapter",)

    @classmethod
    def describe(cls) -> parity.BackendInfo:
        packages = ("torch", "transformers", "deepspeed", "openrlhf")
        return parity.BackendInfo(name=cls.__name__.lower(), packages=packages, default_zero=2)

    @classmethod
    def refuses(cls, scenario: parity.Scenario, layout: parity.Layout) -> str:
        """Returns why the cell is not supported; empty if it is."""
        if layout != parity.Layout(dp=layout.dp, zero=layout.zero) or layout.zero not in (None, 2, 3):
            return f"this adapter runs data parallelism at ZeRO 2 and 3; use dp{layout.world_size}.zero2"
        if scenario.optimizer.name != "adamw":
            return "OpenRLHF has AdamW and Muon; use a scenario with AdamW"
        if scenario.optimizer.frozen or scenario.lora:
            return "this adapter trains all parameters; use a scenario without frozen ones and adapters"
        return "this adapter does not undo fp16's loss scale; use bf16" if scenario.precision == "fp16" else ""

    def prepare(self, scenario: parity.Scenario, layout: parity.Layout, device: str) -> None:
        self.scenario, self.layout = scenario, layout
        self.engines: dict[str, Any] = {}
        self.stack.enter_context(parity.on_cpu(stand_ins=("vllm",)))
        if device == "cpu":
            self.patch(deepspeed.ops, "__compatible_ops__", {})  # compiles nothing
            self.stack.enter_context(torch.compiler.set_stance("force_eager"))
        dtypes = {"bf16": torch.bfloat16, "fp32": torch.get_default_dtype()}  # OpenRLHF knows half precisions only
        self.patch(openrlhf.utils.utils, "convert_to_torch_dtype", dtypes.__getitem__)

    def options(self, script: str, options: Mapping[str, Any], *, prefixes: tuple[str, ...]) -> Any:
        """Parses options of the script, and those that follow from the scenario, and makes the strategy."""
        s, o, data = self.scenario.schedule, self.scenario.optimizer, self.scenario.data
        of_model = {"adam.lr": o.lr, "adam.betas": o.betas, "adam.eps": o.eps, "adam.weight_decay": o.weight_decay}
        of_model |= {
            "max_norm": o.max_grad_norm or 0.0,
            "lr_scheduler": s.name.replace("constant", "constant_with_warmup"),
        }
        of_model |= {"lr_warmup_ratio": max(0.0, s.warmup_steps - 0.5) / s.total_steps}  # the steps are rounded up
        args = command_line(script, {
            "ds.zero_stage": self.layout.zero or 2, "ds.packing_samples": data.packed or None,
            "train.batch_size": data.rows,
            "train.micro_batch_size": data.rows // self.layout.dp // self.scenario.accumulation,
            **{prefix + name: value for prefix in prefixes for name, value in of_model.items()}, **options,
        })  # fmt: skip
        args.ds.attn_implementation = "sdpa"  # flash_attention_2 has neither float64 nor CPUs
        args.ds.param_dtype = "bf16" if self.scenario.precision == "bf16" else "fp32"
        self.strategy = PausedStrategy(
            micro_train_batch_size=args.train.micro_batch_size, train_batch_size=args.train.batch_size,
            zero_stage=args.ds.zero_stage, max_norm=getattr(args, "max_norm", 0.0), args=args,
        )  # fmt: skip
        return args

    def watch(self, loss: torch.nn.Module, *columns: str) -> None:
        """Keeps the numbers that OpenRLHF gives to its loss, by row, and the number of tokens that it divides by."""

        def keep(module: Any, args: tuple[torch.Tensor, ...], kwargs: dict[str, Any]) -> None:
            mask = kwargs.get("action_mask", args[1]).bool()
            rows = next(self.waiting[columns[0]])
            for column, numbers in zip(columns, args, strict=False):
                self.rows.setdefault(column, {}).update(parity.by_row(numbers.detach()[mask], rows))
            self.tokens = float(kwargs["batch_num_tokens"]) * self.scenario.accumulation

        self.stack.callback(loss.register_forward_pre_hook(keep, with_kwargs=True).remove)

    def begin_step(self, batch: parity.Batch, on_gradients: Callable[[str], None], *columns: str) -> None:
        """``columns``: the first column of each loss that is watched."""
        self.on_gradients, self.rows = on_gradients, {}
        self.waiting: dict[str, Iterator[tuple[parity.Row, ...]]] = {name: iter(self.own(batch)) for name in columns}

    def named_tensors(self, kind: parity.TensorKind, model: str) -> parity.NamedTensors:
        trained = safe_get_full_fp32_param if kind == "weight" else safe_get_full_grad
        read = _gathered if model == "reference" else trained
        for name, parameter in self.engines[model].module.named_parameters():
            yield name, read(parameter).to(torch.get_default_dtype())

    def local_shards(self, kind: parity.TensorKind, model: str) -> Iterator[parity.Shard]:
        engine, sharded = self.engines[model], self.strategy.stage == 3
        for name, p in engine.module.named_parameters():
            if model == "reference" or (not sharded and kind == "weight"):
                yield parity.Shard(
                    name, f"piece {dist.get_rank()}" if sharded else "full", getattr(p, "ds_tensor", p).detach()
                )
            elif sharded:
                own = safe_get_local_fp32_param(p) if kind == "weight" else safe_get_local_grad(p)
                yield parity.Shard(name, f"piece {dist.get_rank()}", own)
            elif (piece := p._hp_mapping) is not None:  # ZeRO-2: the piece of the gradient that this rank updates
                own = piece.get_lp_grad_fragment(p._index_in_param_group)
                yield parity.Shard(name, str(piece.lp_fragment_address), own)

    def save(self, path: Path) -> None:
        for model, engine in self.engines.items():
            if model != "reference":
                self.strategy.save_ckpt(engine, str(path / model), "saved")

    def load(self, path: Path) -> None:
        for model, engine in self.engines.items():
            if model != "reference":
                self.strategy.load_ckpt(engine, str(path / model))

    def teardown(self) -> None:
        engines = self.engines
        super().teardown()
        for engine in engines.values():
            engine.destroy()


def _gathered(parameter: torch.nn.Parameter) -> torch.Tensor:
    with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
        return parameter.detach().clone()


class OpenRLHFSft(OpenRLHF):
    """Runs SFTTrainer.fit. Each document is a sample; packing_samples lays those of a micro-batch end to end."""

    objectives: ClassVar = ("sft",)
    conventions: ClassVar = (parity.RoundedMasters(precision="bf16"), parity.GeneratorsNotSaved())

    def setup(
        self, scenario: parity.Scenario, layout: parity.Layout, weights: Mapping[str, Path], device: str
    ) -> dict[str, Any]:
        self.prepare(scenario, layout, device)
        args = self.options("train_sft", {"train.max_epochs": 1}, prefixes=("",))
        self.strategy.setup_distributed()
        model = Actor(
            str(weights["policy"]), attn_implementation=args.ds.attn_implementation, param_dtype=args.ds.param_dtype,
            ds_config=self.strategy.get_ds_train_config(), packing_samples=args.ds.packing_samples,
        )  # fmt: skip
        config = {"optim": args.optim, "adam": vars(args.adam), "scheduler_steps": scenario.schedule.total_steps}
        config |= {
            name: getattr(args, name) for name in ("lr_scheduler", "lr_warmup_ratio", "min_lr_ratio", "max_norm")
        }
        model, optimizer, scheduler = self.strategy.prepare((model, config))
        self.engines = {"policy": model.model}
        self.loader = parity.Loader()
        trainer = SFTTrainer(model, self.strategy, optimizer, self.loader, None, scheduler, args.max_norm, max_epochs=1)
        self.watch(trainer.loss_fn, "logprob")
        self.loop = parity.Paused(lambda pause: trainer.fit(args))
        self.stack.callback(self.loop.close)
        self.strategy.observe(
            on_step=lambda name: self.on_gradients("policy"), pause=lambda name, values: self.loop.pause(values)
        )
        return {"optimizer": repr(optimizer), "args": repr(args)}

    def samples(self, rows: tuple[parity.Row, ...]) -> tuple[torch.Tensor, ...]:
        """Returns tokens, attention mask and loss mask, as the collator of OpenRLHF's SFTDataset pads them."""
        documents = [document for row in rows for document in row.documents]
        columns: tuple[list[list[float]], ...] = (
            [[*document.tokens] for document in documents],
            [[1] * len(document.tokens) for document in documents],
            [[*document.targets[1:], False] for document in documents],
        )
        padded = [pad_sequence([torch.tensor(one) for one in column], batch_first=True)[:, None] for column in columns]
        return padded[0], padded[1], padded[2].float()

    def train_step(self, batch: parity.Batch, on_gradients: Callable[[str], None]) -> parity.StepMetrics:
        self.begin_step(batch, on_gradients, "logprob")
        self.loader.waiting = [self.samples(rows) for rows in self.own(batch)]
        values = self.loop.resume()
        return parity.StepMetrics(values=values | {"token_count": round(self.tokens)}, rows=self.rows)


def worker(kind: Any) -> Any:
    """Returns an instance of a class of Ray's actors, as the plain class that OpenRLHF wrote."""
    plain = kind.__ray_metadata__.modified_class
    return plain.__new__(plain)


class Workers:
    """Stands in for RayActorGroup: one worker on each rank, whose chunks of the rollout all ranks exchange."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker

    def async_run_method_batch(self, method_name: str, **lists: list[Any]) -> list[list[Any]]:
        size, ranks = len(next(iter(lists.values()))), dist.get_world_size()
        first, last = (size * (dist.get_rank() + i) // ranks for i in (0, 1))
        chunks: list[list[Any]] = [[] for _ in range(ranks)]
        dist.all_gather_object(chunks, self.worker.execute_batch(method_name, lists, first, last))
        return chunks


class OpenRLHFRl(OpenRLHF):
    """Runs PolicyModelActor.fit and CriticModelActor.fit over each rollout, both whole."""

    objectives: ClassVar = ("grpo", "ppo")
    conventions: ClassVar = (
        parity.AdvantageEpsilon(value=1e-9),
        parity.BiasedWhitening(),
        parity.CountEpsilon(),
        parity.RoundedMasters(precision="bf16"),
        parity.GeneratorsNotSaved(),
    )

    @classmethod
    def refuses(cls, scenario: parity.Scenario, layout: parity.Layout) -> str:
        g: Any = scenario.objective
        modes = ("token-mean", "seq-mean-token-mean") if RELEASE >= (0, 11, 2) else ("token-mean",)
        modes = ("seq-mean-token-mean",) if g.loss_mode == "gspo" else modes
        if scenario.data.packed:
            return "OpenRLHF counts samples per micro-batch, not packed rows; use a scenario with packed = false"
        if g.loss_agg_mode not in modes:
            return f"OpenRLHF {VERSION} aggregates these losses as {' or '.join(modes)}, not as {g.loss_agg_mode}"
        if g.loss_mode == "cispo" or not g.recompute_old_logprobs or g.rollout_is_threshold:
            return (
                "OpenRLHF has PPO's and GSPO's ratios, of recomputed log-probs, and bounds importance weights otherwise"
            )
        if (g.kl_coef and (g.kl_loss_coef or g.kl_penalty != "kl")) or g.kl_loss_type == "abs":
            return "OpenRLHF has one KL term, k1 in the reward, or k1, k2 or k3 in the loss"
        return super().refuses(scenario, layout)

    def setup(
        self, scenario: parity.Scenario, layout: parity.Layout, weights: Mapping[str, Path], device: str
    ) -> dict[str, Any]:
        self.prepare(scenario, layout, device)
        self.patch(experience_maker, "ray", SimpleNamespace(put=lambda x: x, get=lambda x: x))
        for module in (ppo_actor, ppo_critic):  # rows come in the order of the suite
            self.patch(module, "DataLoader", lambda *a, **k: DATA_LOADER(*a, **{**k, "shuffle": False}))
        self.patch(ppo_actor, "get_tokenizer", lambda *_, **__: None)
        args = self.rl_options(weights)
        steps, self.workers = scenario.schedule.total_steps, {"actor": worker(ppo_actor.PolicyModelActor)}
        self.workers["actor"].init_model_from_pretrained(self.strategy, args.actor.model_name_or_path, steps)
        if "reference" in weights:
            self.workers["reference"] = worker(ReferenceModelActor)
            self.workers["reference"].init_model_from_pretrained(self.strategy, str(weights["reference"]))
            self.engines["reference"] = self.workers["reference"].model.model
        self.engines["policy"] = self.workers["actor"].actor.model
        self.watch(self.workers["actor"].trainer.actor_loss_fn, "logprob", "old_logprob", "advantage")
        if "critic" in weights:
            self.workers["critic"] = worker(ppo_critic.CriticModelActor)
            self.workers["critic"].init_model_from_pretrained(self.strategy, args.critic.model_name_or_path, steps)
            self.engines["critic"] = self.workers["critic"].critic
            self.watch(self.workers["critic"].trainer.critic_loss_fn, "critic.value", "critic.old_value", "return")
        groups = {name: Workers(worker) for name, worker in self.workers.items()}
        self.kl = FixedKLController(args.algo.kl.init_coef)
        self.maker = experience_maker.RemoteExperienceMaker(
            groups["actor"],
            groups.get("critic"),
            None,
            groups.get("reference"),
            self.kl,
            self.strategy,
            SimpleNamespace(pad_token_id=0),
        )
        self.loops: dict[str, Any] = {}
        self.strategy.observe(
            on_step=lambda name: self.on_gradients("policy" if name == "actor" else name),
            pause=lambda name, values: self.loops[name].pause(values),
        )
        self.stack.callback(lambda: [loop.close() for loop in self.loops.values()])
        return {"args": repr(args)}

    def rl_options(self, weights: Mapping[str, Path]) -> Any:
        g: Any = self.scenario.objective
        kl, reward_kl = g.kl_loss_coef or g.kl_coef, {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}[g.kl_loss_type]
        if g.kind == "grpo":
            names = {"reinforce_plus_plus": "reinforce", "reinforce_plus_plus_baseline": "reinforce_baseline"}
            names |= {"rloo": "rloo", "grpo": "group_norm" if g.norm_adv_by_std_in_grpo else "dr_grpo"}
        samples = 4 if g.kind == "grpo" else 1
        return self.options("train_ppo_ray", {
            "actor.model_name_or_path": weights["policy"], "critic.model_name_or_path": weights.get("critic"),
            "reward.remote_url": "given", "vllm.num_engines": 1, "vllm.sync_backend": "gloo",
            "rollout.n_samples_per_prompt": samples, "rollout.temperature": g.temperature,
            "rollout.batch_size": self.scenario.data.rows * g.mini_batches // samples,
            "rollout.micro_batch_size": 2, "train.max_epochs": g.ppo_epochs,
            "actor.num_gpus_per_node": self.layout.dp,
            "actor.eps_clip_low_high": (g.clip_ratio_low, g.clip_ratio_high), "actor.dual_clip": g.clip_ratio_c,
            "actor.policy_loss_type": "gspo" if g.loss_mode == "gspo" else "ppo",
            "actor.loss_agg_mode": g.loss_agg_mode if RELEASE >= (0, 11, 2) else None,
            "actor.entropy_coef": g.entropy_coeff or None,
            "algo.kl.init_coef": kl, "algo.kl.use_loss": bool(g.kl_loss_coef) or None,
            "algo.kl.estimator": reward_kl if g.kl_loss_coef else "k1",
            "algo.advantage.estimator": names[g.adv_estimator] if g.kind == "grpo" else "gae",
            "algo.advantage.gamma": g.gamma, "algo.advantage.lambd": getattr(g, "lam", None),
            "critic.value_clip": getattr(g, "cliprange_value", None),
        }, prefixes=("actor.", "critic."))  # fmt: skip

    def begin_rollout(self, batch: parity.Batch) -> None:
        """Makes experience of the whole rollout and gives each worker its rows, in the order of the mini-batches."""
        rows = [row for mini in batch.rollout for row in mini.rows]
        order = sorted(range(len(rows)), key=lambda i: rows[i].documents[0].columns["group"])
        made = self.maker.make_experience_batch([self.sample(rows[i].documents[0]) for i in order])
        at = dict(zip(order, [item for experience in made for item in split_experience_batch(experience)], strict=True))
        start = 0
        for mini in batch.rollout:
            for row in (row for part in self.own(mini) for row in part):
                for name in self.loops_of():
                    self.workers[name].append(make_experience_batch([at[start + row.index]]))
            start += len(mini.rows)
        self.loops = {name: parity.Paused(lambda pause, fit=fit: fit()) for name, fit in self.loops_of().items()}
        self.left = len(batch.rollout) * self.scenario.objective.ppo_epochs

    def loops_of(self) -> dict[str, Callable[[], Any]]:
        fits: dict[str, Callable[[], Any]] = {"actor": lambda: self.workers["actor"].fit(self.kl.value)}
        return fits | ({"critic": self.workers["critic"].fit} if "critic" in self.workers else {})

    def sample(self, document: parity.Document) -> Experience:
        first = document.targets.index(True)
        response = {
            "observation_tokens": list(document.tokens), "action_ranges": [(first, first + sum(document.targets))],
            "reward": document.columns["reward"], "rollout_log_probs": None, "prompt": "", "label": "",
        }  # fmt: skip
        return SamplesGenerator._process_response_into_experience(None, response)

    def train_step(self, batch: parity.Batch, on_gradients: Callable[[str], None]) -> parity.StepMetrics:
        self.begin_step(batch, on_gradients, "logprob", "critic.value")
        if batch.rollout:
            self.begin_rollout(batch)
        self.left -= 1
        values: dict[str, float] = {}
        for name, loop in self.loops.items():
            prefix = "critic." if name == "critic" else ""
            values |= {prefix + key: number for key, number in loop.resume().items()}
            if self.left == 0:
                loop.finish()
        return parity.StepMetrics(values=values | {"token_count": round(self.tokens)}, rows=self.rows)
