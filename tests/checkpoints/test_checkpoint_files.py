"""Exports, inspections and conversions of what backends have written: the same bits as the backend has, for readers
that know nothing of this project, and without running anything that a file says."""

import dataclasses
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from cells import cell_of, exhaustive
from converted import assert_converted, train
from safetensors.torch import load_file, save_file

from conformance.cli import main as cli
from conformance.core import packages
from conformance.core.errors import UsageError
from conformance.core.host import FIXTURES
from conformance.models.families import read_architecture
from conformance.oracle.decoder import forward
from conformance.oracle.run import POLICIES
from conformance.runtime import Pool
from conformance.spec.precision import PrecisionName
from impl.convert.convert import convert, open_checkpoint
from impl.interface.sharded_safetensors import replacing_folder
from impl.models.export import check_target, stored_dtypes, write_folder

MODELS = FIXTURES / "models"
TOKENS = torch.tensor([1, 5, 320, 17, 399, 2, 64, 8])
Write = Callable[..., Path]
# A process of somebody who has never heard of this project: prints the logits of folders, in float64.
PLAIN = """
import json, sys, torch
class Refuse:
    def find_spec(self, name, path=None, target=None):
        assert name.partition(".")[0] not in ("conformance", "impl"), name
sys.meta_path.insert(0, Refuse())
from transformers import AutoModelForCausalLM
*folders, tokens = sys.argv[1:]
torch.set_default_dtype(torch.float64)
for folder in folders:
    said = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).dtype
    model, found = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", trust_remote_code=True, output_loading_info=True
    )
    wrong = [str(name) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for name in found[kind]]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([json.loads(tokens)]), use_cache=False).logits[0]
    print(json.dumps({"dtype": str(said), "wrong": wrong, "logits": logits.tolist()}))
"""


@pytest.fixture(scope="module")
def write(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Trains two steps with a backend, once for each choice, and gives the folder of what is wanted of it."""
    written: dict[tuple[str, ...], Path] = {}

    def once(backend: str, layout: str, model: Path, precision: PrecisionName) -> Path:
        key = (backend, layout, str(model), precision)
        if key not in written:
            folder = tmp_path_factory.mktemp(f"{backend}-{layout}")
            asked = cell_of(backend, "sft-packed", "qwen3", layout, precision)
            asked = dataclasses.replace(asked, scenario=dataclasses.replace(asked.scenario, model=str(model)))
            train(pool, folder, backend, asked)
            written[key] = folder
        return written[key]

    return once


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The fixture of a family with its tensors in bf16, cut into files and with an index, as large models are."""
    made: dict[str, Path] = {}

    def once(family: str) -> Path:
        if family not in made:
            made[family] = folder = tmp_path_factory.mktemp("models") / family
            weights = load_file(MODELS / family / "model.safetensors").items()
            source = shutil.copytree(MODELS / family, tmp_path_factory.mktemp("source") / family)
            save_file({name: weight.bfloat16() for name, weight in weights}, source / "model.safetensors")
            (source / "generation_config.json").write_text('{"max_new_tokens": 7}')
            write_folder(folder, source=source, weights=weights, dtype="source", file_size=30_000)
        return made[family]

    return once


def _logits(folders: list[Path], where: Path) -> list[dict[str, Any]]:
    """What a fresh process makes of Hugging Face folders."""
    arguments = [sys.executable, "-c", PLAIN, *map(str, folders), json.dumps(TOKENS.tolist())]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(arguments, cwd=where, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


EXPORTED = [
    exhaustive("fsdp2", "dp2", "qwen3"),
    *(exhaustive("fsdp2", layout, "llama") for layout in ("dp2", "tp2", "sp2", "dp2.tp2")),
    *(exhaustive("fsdp2", "tp2", family) for family in ("qwen3", "gemma3", "pangu")),
    *(exhaustive("deepspeed", f"dp2.zero{stage}", "qwen3") for stage in range(4)),
    *(exhaustive("deepspeed", layout, "llama") for layout in ("tp2.zero1", "dp2.tp2.zero3", "sp2.zero2")),
    *(exhaustive("deepspeed", "dp2.zero3", family) for family in ("gemma3", "pangu")),
    *(exhaustive("megatron", layout, "qwen3") for layout in ("dp2.zero1", "tp2", "pp2")),
    *(exhaustive("megatron", layout, "llama") for layout in ("tp2.pp2", "sp2", "pp2.vpp2")),
    exhaustive("megatron", "tp2", "pangu"),
]


@pytest.mark.parametrize(("backend", "layout", "family"), EXPORTED)
def test_an_export_is_a_model_for_those_who_know_nothing_of_this_project(
    write: Write, half: Callable[[str], Path], tmp_path: Path, backend: str, layout: str, family: str
) -> None:
    source = half(family)
    folder = write(backend, layout, source, "fp32")
    masters = load_file(folder / "masters.safetensors")
    rounded = {name: weight.bfloat16() for name, weight in masters.items()}
    assert any(not torch.equal(rounded[name].float(), weight) for name, weight in masters.items())
    for exported, weights, dtype in (("masters", masters, "float32"), ("source", rounded, "bfloat16")):
        path = folder / exported
        index = path / "model.safetensors.index.json"
        stored = load_file(path / "model.safetensors")
        assert not index.exists()  # of the source
        assert stored.keys() == weights.keys()  # a tied head is none of them
        assert all(torch.equal(stored[name], weight) for name, weight in weights.items())
        assert json.loads((path / "config.json").read_text()).get("dtype") == dtype
        kept = {file.name for file in source.iterdir() if not file.name.startswith("model-")} - {index.name}
        assert {"generation_config.json", "chat_template.jinja", "tokenizer.json", "tokenizer_config.json"} <= kept
        assert {file.name for file in path.iterdir()} - {"__pycache__"} == {*kept, "model.safetensors"}
    found = _logits([folder / "masters", folder / "source"], tmp_path)
    for seen, weights, dtype in zip(found, (masters, rounded), ("float32", "bfloat16"), strict=True):
        exact = {name: weight.double() for name, weight in weights.items()}
        expected = forward(TOKENS, exact, read_architecture(source), POLICIES["float64"])
        difference = (torch.tensor(seen["logits"], dtype=torch.float64) - expected).norm() / expected.norm()
        assert seen["wrong"] == []
        assert seen["dtype"] == f"torch.{dtype}"
        assert difference < 1e-6  # transformers' norms and rotary tables are in float32, whatever is asked for


CONVERTED = [
    ("fsdp2", "dp2", "fp32"),
    exhaustive("fsdp2", "dp2.tp2", "exact"),
    exhaustive("fsdp2", "dp2", "fp16"),
    exhaustive("deepspeed", "dp2.zero2", "bf16"),
    *(exhaustive("deepspeed", f"dp2.zero{stage}", precision) for stage in range(4) for precision in ("exact", "fp16")),
    *(exhaustive("deepspeed", f"dp2.zero{stage}", "bf16") for stage in (0, 1, 3)),
    *(exhaustive("deepspeed", layout, "fp32") for layout in ("tp2.zero1", "dp2.tp2.zero3")),
    exhaustive("megatron", "dp2.tp2.zero1", "bf16"),
    *(exhaustive("megatron", "tp2.pp2", precision) for precision in ("exact", "fp16")),
    *(exhaustive("megatron", "dp2.zero1", precision) for precision in ("exact", "fp16")),
]


@pytest.mark.parametrize(("backend", "layout", "precision"), CONVERTED)
def test_a_converted_checkpoint_is_the_state_that_the_backend_exports(
    write: Write, half: Callable[[str], Path], tmp_path: Path, backend: str, layout: str, precision: PrecisionName
) -> None:
    pytest.importorskip(backend if backend == "deepspeed" else "torch")
    source = half("qwen3")
    folder = write(backend, layout, source, precision)
    assert_converted(folder, source, tmp_path)
    for file in (folder / "source").glob("*.json"):  # in the exact tier the ranks' own is never rounded
        assert precision == "exact" or (tmp_path / "hf" / file.name).read_bytes() == file.read_bytes(), file.name


# --- what does not fit -----------------------------------------------------------------------------------------------


def _state(folder: Path, tensors: Mapping[str, torch.Tensor] = MappingProxyType({}), **told: Any) -> Path:
    """A training state of Llama's fixture, with other tensors in the place of some."""
    weights = {**load_file(MODELS / "llama/model.safetensors"), **tensors}
    for kind in ("weight", "exp_avg"):
        (folder / kind).mkdir(parents=True)
        save_file({n: w for n, w in weights.items() if w.numel()}, folder / kind / "model.safetensors")
    own = {"format": "backend-parity training state", "version": 1, "kinds": ["weight", "exp_avg"], "progress": {}}
    (folder / "training_state.json").write_text(json.dumps({**own, **told}))
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": torch.ones(0)}, "model.norm.weight is missing"),
        ({"model.norm.weight": torch.ones(3)}, r"model.norm.weight has shape \(3,\) instead of \(64,\)"),
        ({"model.other.weight": torch.ones(3)}, "model.other.weight is not expected"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_before_anything_is_written(
    tmp_path: Path, change: dict[str, torch.Tensor], message: str
) -> None:
    state = _state(tmp_path / "state", change)
    with pytest.raises(UsageError, match=f"does not fit the model in .*{message}"):
        convert(state, tmp_path / "new", to="hf", model=MODELS / "llama", report=lambda *_: None)
    assert {path.name for path in tmp_path.iterdir()} == {"state"}


def test_nothing_is_overwritten_and_a_model_needs_its_configuration(tmp_path: Path) -> None:
    state = _state(tmp_path / "state")
    (tmp_path / "new").mkdir()
    with pytest.raises(UsageError, match="new exists, and nothing is overwritten"):
        convert(state, tmp_path / "new", to="state", model=None, report=lambda *_: None)
    with pytest.raises(UsageError, match="add --model"):
        convert(state, tmp_path / "other", to="hf", model=None, report=lambda *_: None)
    with pytest.raises(UsageError, match="is a Hugging Face folder, which every training reads"):
        convert(MODELS / "llama", tmp_path / "other", to="state", model=None, report=lambda *_: None)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", b'{"architectures": [', "config.json is not JSON"),
        ("model.safetensors", b"\x93" * 500, "model.safetensors is not a readable safetensors file"),
    ],
)
def test_a_damaged_hugging_face_folder_is_not_said_to_need_no_conversion(
    tmp_path: Path, file: str, content: bytes, message: str
) -> None:
    folder = tmp_path / "ck"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes(content if name == file else (MODELS / "llama" / name).read_bytes())
    with pytest.raises(UsageError, match=message):
        convert(folder, tmp_path / "new", to="hf", model=MODELS / "llama", report=lambda *_: None)


def test_a_crash_leaves_the_folder_that_was_there(tmp_path: Path) -> None:
    source, folder = MODELS / "llama", tmp_path / "model"
    weights = load_file(source / "model.safetensors")
    write_folder(folder, source=source, weights=weights.items(), dtype="source", file_size=30_000)
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    index = json.loads(before["model.safetensors.index.json"])
    assert index["metadata"]["total_size"] == sum(weight.nbytes for weight in weights.values())
    for path in folder.glob("*.safetensors"):
        assert len(load_file(path)) == 1 or sum(weight.nbytes for weight in load_file(path).values()) <= 30_000

    def fails() -> Any:
        yield from list(weights.items())[:9]
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        write_folder(folder, source=source, weights=fails(), dtype="source", file_size=30_000)
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before
    write_folder(folder, source=source, weights=weights.items(), dtype="source")
    assert [path.name for path in folder.glob("model*")] == ["model.safetensors"]  # nothing stale
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert set(stored_dtypes(folder).values()) == {torch.float32}


def test_what_a_killed_process_left_is_cleared_and_what_it_had_moved_comes_back(tmp_path: Path) -> None:
    source, folder = MODELS / "llama", tmp_path / "model"
    weights = load_file(source / "model.safetensors")
    for left in (".model.unfinished", ".model.replaced"):
        (tmp_path / left).mkdir()
        (tmp_path / left / "config.json").write_text(left)
    with pytest.raises(OSError, match="no space"), replacing_folder(folder):
        raise OSError("no space left")
    assert {path.name for path in tmp_path.iterdir()} == {"model"}
    assert (folder / "config.json").read_text() == ".model.replaced"
    write_folder(folder, source=source, weights=weights.items(), dtype="source")
    assert {path.name for path in tmp_path.iterdir()} == {"model"}


def test_a_model_replaces_a_model_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/diary.txt").write_text("x")
    for target, message in ((tmp_path / "notes", "is not a Hugging Face folder"), (tmp_path, "was loaded from")):
        with pytest.raises(UsageError, match=message):
            check_target(target, source=tmp_path)
    check_target(MODELS / "llama", source=tmp_path)
    check_target(tmp_path / "new", source=tmp_path)


# --- what is in a file is never run ----------------------------------------------------------------------------------


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.folder,)


def _deepspeed(folder: Path, planted: Any, **told: Any) -> None:
    (folder / "state").mkdir(parents=True)
    (folder / "latest").write_text("state")
    model = {"module": {}, "ds_config": {}, "global_steps": 1, "client": planted, **told}
    torch.save(model, folder / "state/mp_rank_00_model_states.pt")


def _distributed(folder: Path, planted: Any) -> None:
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(planted))


@pytest.mark.parametrize("write_evil", [_deepspeed, _distributed])
def test_code_in_a_checkpoint_is_refused_and_not_run(
    tmp_path: Path, write_evil: Callable[[Path, Any], None], announced: None, capsys: pytest.CaptureFixture[str]
) -> None:
    write_evil(tmp_path / "evil", Evil(tmp_path / "run"))
    assert cli.main(["inspect", str(tmp_path / "evil")]) == 2
    assert cli.main(["convert", str(tmp_path / "evil"), str(tmp_path / "new"), "--to", "state"]) == 2
    assert capsys.readouterr().err.count("is rejected: it names 'posix.mkdir', which no checkpoint needs") == 2
    assert {path.name for path in tmp_path.iterdir()} == {"evil"}


@pytest.fixture
def announced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands that this tree announces, installed or not."""
    project = tomllib.loads((FIXTURES.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    own = project["entry-points"][packages.COMMANDS].items()
    entries = [EntryPoint(name, value, packages.COMMANDS) for name, value in own]
    entries.append(EntryPoint("broken", "no_such_module:X", packages.COMMANDS))
    monkeypatch.setattr(packages, "entry_points_of", lambda group: entries)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, "is not a folder; give the folder of a checkpoint"),
        (Path.mkdir, "is not a checkpoint of a known format"),
        (lambda folder: _state(folder / "policy"), "is not a checkpoint of one model; give one of .*/policy"),
        (lambda folder: _state(folder, kinds=["../x"]), "as kinds of tensors; use some of weight, exp_avg"),
        (lambda folder: _deepspeed(folder, None, ds_config=[]), "cannot be read; it is damaged or of another version"),
    ],
)
def test_what_is_no_checkpoint_is_told_in_one_line(
    tmp_path: Path,
    make: Callable[[Path], Any],
    message: str,
    announced: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make(tmp_path / "x")
    assert cli.main(["inspect", str(tmp_path / "x")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(f"parity: .*{message}.*", line)


def test_a_command_that_cannot_be_imported_stops_no_other(announced: None, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["x", "--to", "state"], ["-h"]):
        assert cli.main(["broken", *arguments]) == 2
        assert "not available: ModuleNotFoundError: No module named 'no_such_module'" in capsys.readouterr().err
    assert cli.main(["inspect", str(MODELS / "qwen3"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["format"] == "Hugging Face folder"
    assert found["kinds"]["weight"]["dtypes"] == ["float32"]
    shapes = {tensor["name"]: tensor["shape"] for tensor in found["tensors"]}
    assert shapes["model.embed_tokens.weight"] == [400, 64]


def test_inspect_tells_what_backends_wrote(
    write: Write, half: Callable[[str], Path], announced: None, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write("fsdp2", "dp2", half("qwen3"), "fp32")
    for name, form in (("checkpoint", "torch.distributed.checkpoint"), ("state", "training state, version 1")):
        found = open_checkpoint(folder / name)
        assert (found.format, found.facts["step"], found.progress) == (form, 2, {"schedule": 2})
        assert cli.main(["inspect", str(folder / name)]) == 0
        assert "exp_avg_sq   model.layers.0.mlp.up_proj.weight  56x64  float32" in capsys.readouterr().out
