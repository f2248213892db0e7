"""Checkpoints in ranks: generators, the folder of a training, ranks that fail and ranks that are killed."""

import random
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from cells import exhaustive, slow
from resume_runs import Ranks

from conformance.core.errors import UsageError
from conformance.runtime import Pool
from impl.checkpoints.folder import TrainingFolder, _explained
from impl.checkpoints.manifest import FILE, read_manifest, verify
from impl.interface.distributed import FileFailure

MOMENTS = 20
WRITER = "megatron.core.dist_checkpointing.strategies.filesystem_async:FileSystemWriterAsync"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("backend", "layout"),
    [
        ("fsdp2", "dp2"),
        ("fsdp2", "dp2.tp2"),
        ("deepspeed", "dp2.zero1"),
        ("deepspeed", "dp2.zero3"),
        ("megatron", "tp2.seqpar"),
        ("megatron", "dp2.zero1"),
    ],
)
def test_a_resumed_training_drops_out_what_an_uninterrupted_one_does(
    pool: Pool, tmp_path: Path, backend: str, layout: str
) -> None:
    ranks = Ranks(pool=pool, folder=tmp_path, backend=backend, layout=layout)
    train = partial(ranks, "go_on", folder=str(tmp_path), dropout=backend != "megatron")
    whole = train(first=0, save_at=1)
    assert train(first=1, save_at=None, fresh=True) == whole
    others = train(first=1, save_at=None, of_first_rank=True)
    assert others[0]["told"] != whole[0]["told"]


@pytest.mark.parametrize(
    ("backend", "layout", "failing", "rank", "exports"),
    [
        ("plain", "dp3", "impl.checkpoints.folder:save_generators", 2, False),
        ("plain", "dp3", "impl.interface.sharded_safetensors:TensorWriter.add", 0, True),
        exhaustive("fsdp2", "dp2", "torch.distributed.checkpoint.filesystem:FileSystemWriter.write_data", 1, False),
        exhaustive("deepspeed", "dp2.zero1", "torch:save", 1, False),
        slow("deepspeed", "dp2.zero1", "deepspeed.runtime.engine:copyfile", 0, False),
        exhaustive("megatron", "tp2", f"{WRITER}.write_preloaded_data", 0, False),
        exhaustive("megatron", "tp2", "torch:save", 0, False),
    ],
)
def test_no_rank_waits_for_one_that_cannot_write(
    pool: Pool, tmp_path: Path, backend: str, layout: str, failing: str, rank: int, exports: bool
) -> None:
    ranks = Ranks(pool=pool, folder=tmp_path, backend=backend, layout=layout)
    for told in ranks("one_rank_fails", folder=str(tmp_path), failing=failing, rank=rank, exports=exports):
        assert re.match("FileFailure: .*No space left on device", told), told
    if not exports:
        with pytest.raises(UsageError, match=r"there is no .*checkpoint, and .*checkpoint\.partial is half-written"):
            read_manifest(tmp_path / "checkpoint")


def test_the_last_two_checkpoints_stay_and_rests_of_crashes_go(pool: Pool, tmp_path: Path) -> None:
    root = tmp_path / "training"
    ranks = Ranks(pool=pool, folder=tmp_path, backend="plain", layout="dp3")
    *_, third, last = ranks("keep_two", root=str(root))[0]
    assert third == ["latest", "step-000002", "step-000003"]
    assert last == ["latest", "step-000003", "step-000004"]
    assert TrainingFolder(root=root).latest() == root / "step-000004"
    (root / "latest").write_text("../step-000004")
    with pytest.raises(UsageError, match=r"must contain the name of a checkpoint, got '\.\./step-000004'"):
        TrainingFolder(root=root).latest()
    (root / "latest").unlink()
    with pytest.raises(UsageError, match=r"no checkpoint was finished there; .*: step-000003, step-000004"):
        TrainingFolder(root=root).latest()


@pytest.mark.parametrize(
    ("backend", "layout", "moments"),
    [
        ("plain", "dp2", 2),
        exhaustive("plain", "dp2", MOMENTS),
        exhaustive("fsdp2", "dp2", MOMENTS),
        exhaustive("deepspeed", "dp2.zero1", MOMENTS),
        exhaustive("megatron", "tp2", MOMENTS),
    ],
)
@pytest.mark.parametrize("asynchronous", [slow(False, id="at-once"), pytest.param(True, id="behind")])
def test_the_checkpoint_before_loads_wherever_a_save_is_killed(
    pool: Pool, tmp_path: Path, backend: str, layout: str, moments: int, asynchronous: bool
) -> None:
    ranks = Ranks(pool=pool, folder=tmp_path, backend=backend, layout=layout)
    numbers = random.Random(f"{backend} {moments}")
    half_written, losses = 0, dict[float, list[float]]()
    for moment in range(MOMENTS):
        root = tmp_path / str(moment)
        killed = ranks.outcome(
            "train_until_killed",
            root=str(root),
            victim=moment % 2,
            fraction=numbers.uniform(0.0, 1.0),
            asynchronous=asynchronous,
        )
        assert "killed" in killed.reason or "SIGKILL" in killed.reason, killed.reason
        step, *after = ranks("load_latest", root=str(root))[0]
        assert losses.setdefault(step, after) == after
        second = told_of(root / "step-000002")
        assert not second or step == 1  # whole and not yet the latest it may be, too
        half_written += bool(second)
        if half_written and moment + 1 >= moments:
            return
    raise AssertionError("no save was killed in the middle")


@pytest.mark.parametrize(
    ("backend", "layout"),
    [
        ("plain", "dp2"),
        slow("fsdp2", "dp2"),
        exhaustive("deepspeed", "dp2.zero1"),
        exhaustive("megatron", "tp2"),
        exhaustive("fsdp2", "dp2.tp2"),
        exhaustive("deepspeed", "dp2.zero0"),
        exhaustive("deepspeed", "dp2.zero3"),
        exhaustive("deepspeed", "tp2.zero2"),
        exhaustive("megatron", "dp2.zero1"),
        exhaustive("megatron", "pp2"),
    ],
)
def test_async_save_holds_state_at_time_of_call(pool: Pool, tmp_path: Path, backend: str, layout: str) -> None:
    ranks, root = Ranks(pool=pool, folder=tmp_path, backend=backend, layout=layout), str(tmp_path / "training")
    uninterrupted = ranks("train_behind_a_save", root=root)
    for told in uninterrupted:
        assert told["before"] == ["step-000001.partial"]
        assert told["written"] < told["size"] / 2  # generators, lists of what is where
        assert told["after"] == ["latest", "step-000001"]
    assert ranks("load_latest", root=root) == [[1, *told["losses"]] for told in uninterrupted]


def test_a_save_waits_for_the_one_before_and_says_what_became_of_it(pool: Pool, tmp_path: Path) -> None:
    root = tmp_path / "training"
    ranks = Ranks(pool=pool, folder=tmp_path, backend="plain", layout="dp3")
    for told in ranks("save_one_after_another", root=str(root)):
        assert told["second"] == ["latest", "step-000001", "step-000002.partial"]
        assert told["told"] == f"writing the checkpoint {root / 'step-000002'}: [Errno 28] No space left on device"
        assert told["third"] == ["latest", "step-000001", "step-000002.partial"]
        assert told["after"] == ["latest", "step-000001", "step-000003"]


def test_a_full_disk_is_named_whatever_a_library_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("unexpected pos 704 vs 598")
    assert _explained(error, tmp_path) is error
    monkeypatch.setattr("os.statvfs", lambda _: SimpleNamespace(f_bavail=3, f_frsize=4096))
    told = _explained(error, tmp_path)
    assert (type(told), str(told)) == (FileFailure, "No space left on device (unexpected pos 704 vs 598)")


def told_of(folder: Path) -> str:
    """What reading a checkpoint of a killed training says; nothing where it is whole."""
    if (folder / FILE).exists():  # the rank that did not die may have come to the end
        verify(folder, read_manifest(folder).about)
        return ""
    with pytest.raises(UsageError, match=rf"{folder}\.partial is half-written|there is no checkpoint {folder}"):
        read_manifest(folder)
    return "half-written"
