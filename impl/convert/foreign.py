"""Recognizes checkpoints that are not read, and says which command of their framework makes one that is read."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from conformance.core.errors import UsageError
from conformance.models.folder_checks import CONFIG

WEIGHTS = "model*.safetensors"
LFS = b"version https://git-lfs.github.com/spec/"
_SUFFIXES = (".pt", ".distcp", ".safetensors", ".json")  # of files in all forms; a folder of such a name is none


@dataclass(frozen=True, kw_only=True)
class ForeignForm:
    """Describes a form by its files. patterns: each matches a file of it; absent: matches no file of it.

    advice: what to run first; ``{folder}`` is the checkpoint.
    """

    name: str
    patterns: tuple[str, ...]
    absent: tuple[str, ...] = ()
    advice: str

    def is_in(self, folder: Path) -> bool:
        return all(any(folder.glob(p)) for p in self.patterns) and not any(any(folder.glob(p)) for p in self.absent)


FOREIGN = (
    ForeignForm(
        name="verl, FSDP",
        patterns=("model_world_size_*_rank_*.pt",),
        advice="python -m verl.model_merger merge --backend fsdp --local_dir {folder} --target_dir NEW",
    ),
    ForeignForm(
        name="verl, Megatron",
        patterns=("dist_ckpt", "huggingface"),
        advice="python -m verl.model_merger merge --backend megatron --local_dir {folder} --target_dir NEW",
    ),
    ForeignForm(
        name="Megatron-LM, legacy",
        patterns=("mp_rank_*/model_optim_rng.pt",),
        advice="Megatron-LM's training script with --load {folder}/.. --ckpt-convert-format torch_dist "
        "--ckpt-convert-save NEW",
    ),
    ForeignForm(
        name="PEFT adapter",
        patterns=("adapter_config.json",),
        absent=(WEIGHTS,),
        advice="AutoPeftModelForCausalLM.from_pretrained('{folder}').merge_and_unload().save_pretrained('NEW')",
    ),
    ForeignForm(
        name="Meta's consolidated files",
        patterns=("params.json", "consolidated*.pth"),
        absent=(WEIGHTS,),
        advice="python src/transformers/models/llama/convert_llama_weights_to_hf.py --input_dir {folder} --num_shards "
        "N --llama_version VERSION --output_dir NEW, in transformers' repository",
    ),
    ForeignForm(
        name="Mistral's consolidated files",
        patterns=("params.json", "consolidated*.safetensors"),
        absent=(WEIGHTS,),
        advice="python src/transformers/models/mistral/convert_mistral_weights_to_hf.py {folder} NEW, in transformers' "
        "repository",
    ),
    ForeignForm(
        name="PyTorch Lightning",
        patterns=("*.ckpt",),
        absent=(CONFIG,),
        advice="load the .ckpt file with load_from_checkpoint of its LightningModule, then save_pretrained('NEW') of "
        "the model in it",
    ),
    ForeignForm(
        name="Hugging Face folder with pickled weights",
        patterns=(CONFIG, "pytorch_model*.bin"),
        absent=(WEIGHTS,),
        advice="AutoModelForCausalLM.from_pretrained('{folder}').save_pretrained('NEW')",
    ),
    ForeignForm(
        name="accelerate's save_state",
        patterns=("random_states_*.pkl", WEIGHTS),
        absent=(CONFIG,),
        advice="load_state('{folder}') in the script that saved it, then save_pretrained('NEW') of the unwrapped model",
    ),
)


def refuse(folder: Path) -> None:
    """Raises UsageError, with the advice, for a checkpoint of a foreign form."""
    for form in FOREIGN:
        if form.is_in(folder):
            raise UsageError(
                f"{folder} is a checkpoint of another form ({form.name}), which is not read; run first: "
                f"{form.advice.format(folder=folder)}"
            )


def check_files(folder: Path) -> None:
    """Raises UsageError for what is no file in a checkpoint, and for pointers of Git LFS."""
    for path in _paths(folder):
        try:
            if not path.is_file():
                raise UsageError(
                    f"{path} is a folder, a pipe, a device or a broken link, but a checkpoint has a file there"
                )
            with path.open("rb") as file:
                start = file.read(len(LFS))
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from None
        if start == LFS:
            raise UsageError(
                f"{path} is a Git LFS pointer, not the file itself; run first: git lfs pull, in the clone of {folder}"
            )


def _paths(folder: Path) -> Iterator[Path]:
    """Yields all paths below that should be files; the files of a folder of the Hugging Face cache are links."""
    for path in sorted(folder.iterdir()):
        if not path.is_dir() or path.suffix in _SUFFIXES:
            yield path
        elif not path.is_symlink():
            yield from _paths(path)
