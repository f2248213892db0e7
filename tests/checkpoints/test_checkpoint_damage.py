"""Damaged checkpoints are refused with the file's name, whatever the damage; verification needs no ranks for that."""

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cells import exhaustive
from resume_runs import Ranks

from conformance.core.errors import UsageError
from conformance.runtime import Pool
from impl.checkpoints import manifest
from impl.checkpoints.manifest import FILE, About, Manifest, file_names, read_manifest, verify

FORMS = ("native", "state")


def saved(pool: Pool, folder: Path, backend: str, layout: str, forms: tuple[str, ...], *, steps: int = 1) -> list[Path]:
    """A checkpoint of each form."""
    ranks = Ranks(pool=pool, folder=folder, backend=backend, layout=layout)
    ranks("save_forms", folder=str(folder), forms=list(forms), steps=steps)
    return [folder / form / "checkpoint" for form in forms]


# Each changes a copy of a checkpoint, with random numbers and another checkpoint of the same training; the file that
# it picks is any but the manifest.
Mutation = Callable[[random.Random, Path, Path], None]


def truncate(numbers: random.Random, folder: Path, _: Path) -> None:
    path = any_file(numbers, folder)
    os.truncate(path, numbers.randrange(max(1, path.stat().st_size)))


def flip(numbers: random.Random, folder: Path, _: Path) -> None:
    flip_a_bit(numbers, any_file(numbers, folder))


def flip_in_manifest(numbers: random.Random, folder: Path, _: Path) -> None:
    flip_a_bit(numbers, folder / FILE)


def truncate_manifest(numbers: random.Random, folder: Path, _: Path) -> None:
    os.truncate(folder / FILE, numbers.randrange((folder / FILE).stat().st_size))


def remove(numbers: random.Random, folder: Path, _: Path) -> None:
    any_file(numbers, folder).unlink()


def remove_manifest(_: random.Random, folder: Path, __: Path) -> None:
    (folder / FILE).unlink()


def append(numbers: random.Random, folder: Path, _: Path) -> None:
    with any_file(numbers, folder).open("ab") as file:
        file.write(numbers.randbytes(numbers.randrange(1, 100)))


def add(numbers: random.Random, folder: Path, _: Path) -> None:
    shutil.copyfile(path := any_file(numbers, folder), path.with_name(f"{numbers.random()}{path.suffix}"))


def swap(numbers: random.Random, folder: Path, _: Path) -> None:
    one, other = any_file(numbers, folder), any_file(numbers, folder)
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def exchange_manifest(_: random.Random, folder: Path, other: Path) -> None:
    shutil.copyfile(other / FILE, folder / FILE)


def take_file_of_other(numbers: random.Random, folder: Path, other: Path) -> None:
    name = str(any_file(numbers, folder).relative_to(folder))
    if (other / name).exists():
        shutil.copyfile(other / name, folder / name)


def link(numbers: random.Random, folder: Path, _: Path) -> None:
    path = any_file(numbers, folder)
    path.rename(target := folder.with_name("elsewhere"))
    path.symlink_to(target)


def link_folder(numbers: random.Random, folder: Path, _: Path) -> None:
    path = any_file(numbers, folder).parent
    if path != folder:
        path.rename(target := folder.with_name("elsewhere"))
        path.symlink_to(target)


def link_manifest(_: random.Random, folder: Path, __: Path) -> None:
    (folder / FILE).rename(target := folder.with_name("elsewhere"))
    (folder / FILE).symlink_to(target)


def pipe(numbers: random.Random, folder: Path, _: Path) -> None:
    path = any_file(numbers, folder)
    path.unlink()
    os.mkfifo(path)


def pipe_for_manifest(_: random.Random, folder: Path, __: Path) -> None:
    (folder / FILE).unlink()
    os.mkfifo(folder / FILE)


MUTATIONS: tuple[Mutation, ...] = (
    *(truncate, flip, flip_in_manifest, truncate_manifest, remove, remove_manifest, append, add, swap),
    *(exchange_manifest, take_file_of_other, link, link_folder, link_manifest, pipe, pipe_for_manifest),
)


def any_file(numbers: random.Random, folder: Path) -> Path:
    return folder / numbers.choice(list(file_names(folder)))


def flip_a_bit(numbers: random.Random, path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[numbers.randrange(len(content))] ^= 1 << numbers.randrange(8)
    path.write_bytes(content)


def same_bytes(one: Path, other: Path) -> bool:
    """Whether two folders hold the same regular files; a link is none."""
    names = sorted(file_names(one))
    return names == sorted(file_names(other)) and all(is_copy(one / name, other / name) for name in (*names, FILE))


def is_copy(path: Path, other: Path) -> bool:
    return not path.is_symlink() and path.is_file() and path.read_bytes() == other.read_bytes()


@pytest.mark.parametrize(
    ("backend", "layout", "forms", "count"),
    [
        ("plain", "dp2", ("native",), 3),
        exhaustive("fsdp2", "dp2", FORMS, 32),
        exhaustive("deepspeed", "dp2.zero1", ("native",), 32),
        exhaustive("megatron", "tp2", ("native",), 32),
    ],
)
def test_no_damage_is_accepted(
    pool: Pool, tmp_path: Path, backend: str, layout: str, forms: tuple[str, ...], count: int
) -> None:
    """``count``: of each mutation. A name of the damaged checkpoint, or of the file, is in every message."""
    for checkpoint in saved(pool, tmp_path, backend, layout, forms):
        wanted = read_manifest(checkpoint).about
        verify(checkpoint, wanted)
        form = checkpoint.parent.name
        (other,) = saved(pool, tmp_path / "other" / form, backend, layout, (form,), steps=2)
        unharmed = 0
        for mutate in MUTATIONS:
            for number in range(count):
                numbers = random.Random(f"{mutate.__name__} {number}")
                damaged = tmp_path / "damaged" / "checkpoint"
                shutil.copytree(checkpoint, damaged)
                mutate(numbers, damaged, other)
                unharmed += verdict_on(damaged, wanted, checkpoint, told=f"{mutate.__name__} {number}")
                shutil.rmtree(damaged.parent)
        assert unharmed < count * 3  # those that happened to change nothing


def verdict_on(damaged: Path, wanted: About, whole: Path, *, told: str) -> bool:
    """Whether nothing was changed; else it has to be refused."""
    if same_bytes(damaged, whole):
        verify(damaged, wanted)
        return True
    with pytest.raises(UsageError) as refused:
        verify(damaged, wanted)
    assert str(damaged) in str(refused.value), told
    return False


WANTED = About(
    form="native", backend="fsdp2", layout="dp2", precision="fp32", objective="sft", optimizer="adamw", step=3,
    world_size=2, models={"policy": {"a": (2, 3), "b": (4,)}},
)  # fmt: skip
OTHER_FORM = {"form": "state"}


@pytest.mark.parametrize(
    ("found", "wanted", "message"),
    [
        ({"backend": "deepspeed"}, {}, "was written by backend 'deepspeed', and fsdp2 cannot read it; save a"),
        ({"precision": "bf16"}, {}, "has precision bf16, but this training has fp32; .* or save a training state"),
        ({"precision": "exact"} | OTHER_FORM, OTHER_FORM, "has precision exact, but this training has fp32; resume in"),
        ({"optimizer": "sgd"}, {}, "has the state of 'sgd', but the optimizer is adamw"),
        (OTHER_FORM, {}, "is a training state for all backends, but a backend's own checkpoint is required"),
        ({"models": {"actor": {}}}, {}, "has the models actor, but this training trains policy"),
        (
            {"models": {"policy": {"a": (2, 3)}}},
            {},
            "is of another model: policy's b is missing there and 4 in the given",
        ),
        (
            {"models": {"policy": {"a": (3, 3), "b": (5,)}}},
            {},
            r"is of another model: policy's a is 3x3 there and 2x3 .* 1 others differ",
        ),
    ],
)
def test_what_does_not_fit_is_told(found: dict[str, Any], wanted: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=f"^CHECKPOINT {message}"):
        manifest.check_fits(replace(WANTED, **found), replace(WANTED, **wanted), source="CHECKPOINT")


def test_manifest_fits_other_layout_step_and_ranks() -> None:
    elsewhere = replace(WANTED, layout="tp4", step=9, world_size=4)
    manifest.check_fits(elsewhere, WANTED, source="")
    state = replace(elsewhere, form="state", backend="megatron", precision="bf16")
    manifest.check_fits(state, replace(WANTED, form="state"), source="")


@pytest.mark.parametrize(("old", "new"), [('"step": 3', '"step": 4'), ('"layout"', '"layout" '), ("dp2", "dp4")])
def test_a_manifest_that_is_sound_in_itself_but_was_changed_is_damaged(old: str, new: str) -> None:
    text = manifest.to_text(Manifest(suite_version="", about=WANTED, files={}))
    with pytest.raises(UsageError, match="FILE is damaged: its digest does not fit its content"):
        manifest.from_text(text.replace(old, new), source="FILE")


def test_another_version_is_told() -> None:
    text = manifest.to_text(Manifest(suite_version="9.0", about=WANTED, files={}))
    assert manifest.from_text(text, source="").about == WANTED
    with pytest.raises(UsageError, match=r"FILE has format version 2, written by suite version '9\.0'"):
        manifest.from_text(text.replace('"version": 1', '"version": 2'), source="FILE")
