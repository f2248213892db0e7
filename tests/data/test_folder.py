"""Model folders of others: nothing but their own files is copied, and their code is run when the user says so only."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.backends.protocol import find_backend
from conformance.core.errors import UsageError
from conformance.core.host import FIXTURES
from conformance.data.inputs import prepare_inputs
from conformance.data.tokenizer import load_tokenizer
from conformance.matrix.cell import Cell
from conformance.models.folder_checks import BUNDLED_CODE, check_model_folder, folder_code, runs_code
from conformance.oracle.role_model import decoder_of
from conformance.runner.session import Session
from conformance.spec.layout import Layout
from conformance.spec.scenario import Scenario, parse_scenario
from impl.models.loading import load_model, read_config
from impl.models.support import plan_styles

MODELS = FIXTURES / "models"
FAMILIES = ("pangu", "llama", "qwen3", "gemma3")
UNTRUSTED = r"/{file} names Python code of the folder \(auto_map\).* add --trust-remote-code if you trust it"


def scenario(model: Path, **changes: Any) -> Scenario:
    values = {"name": "any", "model": str(model), "precision": "fp32", "optimizer": {"name": "sgd", "lr": 0.1}}
    return parse_scenario({**values, "steps": 1, "data": {"rows": 2}, **changes})


def copy(family: str, folder: Path) -> Path:
    return Path(shutil.copytree(MODELS / family, folder / family))


# --- files and links -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plain_folder_is_accepted(family: str) -> None:
    check_model_folder(MODELS / family)


def pipe(folder: Path) -> None:
    os.mkfifo(folder / "generation_config.json")


def pipe_below(folder: Path) -> None:
    (folder / "sub").mkdir()
    os.mkfifo(folder / "sub" / "pipe")


def link(name: str, to: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(to)

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (pipe, r"llama/generation_config.json is a pipe, a socket or a device"),
        (pipe_below, r"llama/sub/pipe is a pipe, a socket or a device"),
        (link("loop.json", "loop.json"), r"llama/loop.json cannot be read: .*symbolic links"),
        (link("self", "."), r"llama/self is a link to a folder"),
        (link("up", ".."), r"llama/up is a link that leaves the folder"),
        (link("zero", "/dev/zero"), r"llama/zero is a link that leaves the folder, to /dev/zero"),
        (
            link("secret.json", "../secret.json"),
            r"llama/secret.json is a link that leaves the folder, to .*/secret.json",
        ),
        (link("model.safetensors", "../secret.json"), r"llama/model.safetensors is a link that leaves the folder"),
        (link("gone.json", "nowhere"), r"llama/gone.json is a broken link"),
        (link("config.json", "nowhere"), r"llama is not a Hugging Face model folder: it has no config.json"),
    ],
)
def test_what_cannot_be_copied_is_named_and_nothing_is(
    damage: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    folder = copy("llama", tmp_path)
    (tmp_path / "secret.json").write_text("{}")
    damage(folder)
    with pytest.raises(UsageError, match=message):
        prepare_inputs(scenario(folder), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_links_inside_the_folder_and_files_that_are_not_copied_are_no_concern(tmp_path: Path) -> None:
    folder = copy("llama", tmp_path)
    (folder / "tokenizer.json").rename(folder / "real.json")
    (folder / "tokenizer.json").symlink_to("real.json")
    (folder / "pytorch_model.bin").symlink_to("/dev/zero")
    (folder / ".git").mkdir()
    os.mkfifo(folder / ".git" / "pipe")
    model = prepare_inputs(scenario(folder), tmp_path / "out").models["policy"]
    assert not (model / "tokenizer.json").is_symlink()
    assert (model / "tokenizer.json").read_bytes() == (folder / "real.json").read_bytes()
    assert not (model / ".git").exists()


def test_a_snapshot_in_hugging_faces_cache_may_link_to_its_blobs(tmp_path: Path) -> None:
    """There, every file of a snapshot is a link to a folder beside the snapshots."""
    blobs, snapshot = tmp_path / "models--any" / "blobs", tmp_path / "models--any" / "snapshots" / "abc"
    shutil.copytree(MODELS / "llama", blobs)
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    model = prepare_inputs(scenario(snapshot), tmp_path / "out").models["policy"]
    assert (model / "config.json").read_bytes() == (MODELS / "llama" / "config.json").read_bytes()
    (snapshot / "other.json").symlink_to("../../../secret.json")
    with pytest.raises(UsageError, match=r"other.json is a link that leaves the folder"):
        check_model_folder(snapshot)


def test_nothing_is_copied_into_the_model_folder_itself(tmp_path: Path) -> None:
    folder = copy("llama", tmp_path)
    before = sorted(folder.rglob("*"))
    with pytest.raises(UsageError, match=r"out lies inside the model folder .*/llama, which is copied there; give ano"):
        prepare_inputs(scenario(folder), folder / "parity-out" / "out")
    assert sorted(folder.rglob("*")) == before


# --- code ------------------------------------------------------------------------------------------------------------


def evil(family: str, folder: Path, *, file: str, references: Any) -> tuple[Path, Path]:
    """A folder with code that leaves a mark where it is run, and the mark."""
    made, mark = copy(family, folder), folder / "mark"
    (made / "evil.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass Any: pass\n")
    values = json.loads((made / file).read_text())
    (made / file).write_text(json.dumps(values | {"auto_map": references}))
    return made, mark


OF_MODELS: list[dict[str, Any]] = [
    {"AutoConfig": "evil.Any"},
    {"AutoModelForCausalLM": "evil.Any"},
    {"AutoConfig": "somebody/else--evil.Any"},
]
OF_TOKENIZERS: list[Any] = [{"AutoTokenizer": ["evil.Any", None]}, ["evil.Any", "evil.Any"]]


@pytest.mark.parametrize(
    ("family", "file", "references"),
    [
        *(("pangu", "config.json", references) for references in OF_MODELS),
        *((family, "tokenizer_config.json", references) for family in FAMILIES for references in OF_TOKENIZERS),
    ],
)
def test_code_is_refused_before_any_of_it_runs_wherever_it_would(
    family: str, file: str, references: Any, tmp_path: Path
) -> None:
    folder, mark = evil(family, tmp_path, file=file, references=references)
    # The tokenizer's auto_map stands behind that of the shipped configuration.
    message = UNTRUSTED.format(file="config.json" if family == "pangu" else file)
    for load in (
        lambda: prepare_inputs(scenario(folder), tmp_path / "out"),  # the controller
        lambda: load_tokenizer(folder),
        lambda: read_config(folder),  # the ranks
        lambda: load_model(folder, dtype=torch.float32, attention="eager"),
        lambda: load_model(folder, dtype=torch.float32, attention="eager", head="value"),
    ):
        with pytest.raises(UsageError, match=message):
            load()
    assert not mark.exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("references", OF_MODELS)
def test_code_of_a_family_of_transformers_never_runs(references: Any, trusted: bool, tmp_path: Path) -> None:
    """As the published folder of DeepSeek-V3, whose code no current transformers can import."""
    folder, mark = evil("qwen3", tmp_path, file="config.json", references=references)
    given = scenario(folder, trust_remote_code=trusted)
    assert "took its place" in decoder_of(given, folder).not_judged[0]
    prepared = prepare_inputs(given, tmp_path / "out").models["policy"]
    load_tokenizer(folder, trusted=trusted)
    model = load_model(prepared, dtype=torch.float32, attention="eager", trusted=trusted)
    assert type(model).__module__ == "transformers.models.qwen3.modeling_qwen3"
    assert plan_styles(given)
    assert not mark.exists()


def test_code_that_the_folder_lacks_is_named(tmp_path: Path) -> None:
    folder = copy("pangu", tmp_path)
    (folder / "modeling_openpangu_dense.py").unlink()
    message = r"pangu lacks 'modeling_openpangu_dense\.py', which config\.json names in auto_map; download it"
    with pytest.raises(UsageError, match=message):
        runs_code(folder, trusted=True)
    config = json.loads((folder / "config.json").read_text()) | {"auto_map": {"AutoModel": f"{'x' * 3000}.Any"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=r"pangu lacks 'x{119}\.\.\., which config\.json names"):
        runs_code(folder, trusted=True)


def test_trusted_code_is_run(tmp_path: Path) -> None:
    folder = copy("pangu", tmp_path)
    mark = tmp_path / "mark"
    with (folder / "configuration_openpangu_dense.py").open("a") as code:
        code.write(f"open({str(mark)!r}, 'w').close()\n")
    with pytest.raises(UsageError, match=UNTRUSTED.format(file="config.json")):
        prepare_inputs(scenario(folder), tmp_path / "out")
    assert not mark.exists()
    trusted = prepare_inputs(scenario(folder, trust_remote_code=True), tmp_path / "out").models["policy"]
    assert mark.exists()
    loaded = load_model(trusted, dtype=torch.float32, attention="eager", trusted=True)
    assert type(loaded).__name__ == "PanguEmbeddedForCausalLM"


def test_trusted_code_is_run_in_ranks_too_and_the_cells_conform(session: Session, tmp_path: Path) -> None:
    folder, mark = copy("pangu", tmp_path), tmp_path / "mark"
    with (folder / "modeling_openpangu_dense.py").open("a") as code:
        code.write(f"import os\nwith open({str(mark)!r}, 'a') as mark: mark.write(f'{{os.getpid()}} ')\n")
    trusted = scenario(folder, trust_remote_code=True)
    for backend in ("fsdp2", "deepspeed"):
        cell = Cell.single(scenario=trusted, backend=find_backend(backend), layout=Layout.parse("dp1"))
        verdict = session.run(cell).verdict
        assert verdict.state == "conforms", verdict.reason
        assert {int(pid) for pid in mark.read_text().split()} - {os.getpid()}
        mark.unlink()


def test_the_shipped_openpangu_is_what_was_looked_at() -> None:
    """Whoever changes it looks again, and writes the new digest down."""
    assert folder_code(MODELS / "pangu") == BUNDLED_CODE


def change_code(folder: Path) -> None:
    file = folder / "modeling_openpangu_dense.py"
    file.write_text(file.read_text() + "\n")


def add_code(folder: Path) -> None:
    (folder / "more.py").touch()


def lead_elsewhere(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(file.read_text().replace("modeling_openpangu_dense", "somebody/else--modeling_openpangu_dense"))


def tokenizer_too(folder: Path) -> None:
    file = folder / "tokenizer_config.json"
    references = {"AutoTokenizer": ["modeling_openpangu_dense.PanguEmbeddedModel", None]}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"auto_map": references}))


@pytest.mark.parametrize("change", [change_code, add_code, lead_elsewhere, tokenizer_too])
def test_a_changed_copy_of_the_shipped_model_is_not_the_shipped_one(
    change: Callable[[Path], None], tmp_path: Path
) -> None:
    folder = copy("pangu", tmp_path)
    assert runs_code(folder, trusted=False)
    change(folder)
    with pytest.raises(UsageError, match=UNTRUSTED.format(file="config.json")):
        runs_code(folder, trusted=False)


def test_where_there_is_no_code_transformers_is_never_told_to_trust_any(tmp_path: Path) -> None:
    folder = copy("llama", tmp_path)
    (folder / "evil.py").write_text("1 / 0")
    assert not runs_code(folder, trusted=True)
    assert not runs_code(folder, trusted=False)
