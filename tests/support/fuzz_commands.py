"""Mutates the files that commands read, runs the commands in this process, and checks what each of them does.

A command ends within LIMIT_S of computing, with one of its exit codes and with one message if it refuses. It shows no
traceback and no control character, prints at most LONGEST characters, runs no code, leaves nothing and changes nothing
but its own output. A mutation that certainly changes numbers never ends like an unchanged file.

For longer, on other seeds: ``python tests/support/fuzz_commands.py SEED COUNT [KIND...]`` prints a table by kind.
"""

import argparse
import atexit
import contextlib
import functools
import io
import json
import math
import os
import random
import re
import resource
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import fuzz_inputs
import torch
from fuzz_inputs import Case, Use, model_folder, outcome
from fuzz_mutations import JUNK, TOML_JUNK, mutate_bytes, mutate_json, rewrite_json, rewrite_toml
from record_mutations import mutate
from run_sample import write_sample_run
from safetensors.torch import load_file
from test_checkpoint_pickles import Planted, forge
from test_checkpoint_trainers import KINDS as CHECKPOINTS
from test_checkpoint_trainers import MODELS

import parity
from conformance.cli import EXIT
from conformance.cli import main as cli
from conformance.core.errors import UsageError
from impl.checkpoints.safe_pickle import METADATA
from impl.convert.convert import convert

LIMIT_S, LONGEST, MEMORY_KIB = 5.0, 2**20, 2**20
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")
LLAMA = MODELS / "llama"
HOSTILE = (
    *("9" * 400, "9" * 5000, "1" * 30_000 + "x", "NaN", "'nan'", "-inf", "1e999", "[" * 3000, '{"a":' * 3000, '"', "'"),
    *("\x1b[2J", "\x1b]0;t\x07", "\0", "\u2028", "\r", "a:" * 9000, "(", "| " * 9000, "," * 140_000, "x" * 140_000),
    *(
        "1," * 50_000,
        "٣",
        "}",
        "step: 7 ",
        "-",
        "'a':" * 5000,
        " " * 30_000,
        "\ud800",
        "#2",
        "a" * 9000 + " ",
        "pid=1)",
    ),
)
CODES = Counter[int]()  # how often commands ended with each code
Change = Callable[[random.Random, Path], None]


def flip(rng: random.Random, file: Path) -> None:
    data = bytearray(file.read_bytes())
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def no_file(rng: random.Random, file: Path) -> None:
    """Puts something else in the place of a file."""
    aside = file.with_name("aside")
    file.rename(aside)
    way = rng.randrange(7)
    if way == 0:
        os.mkfifo(file)
    elif way <= 2:
        file.symlink_to(rng.choice(("/dev/zero", "nowhere", file.name, file.parent, aside.name, "/dev/tty")))
    elif way == 3:
        file.mkdir()
    elif way == 4:
        file.write_bytes(b"")
    elif way == 5:
        file.touch()
        os.truncate(file, 2**42)
    if way != 2:
        aside.unlink()


def odd_pickle(rng: random.Random, file: Path) -> None:
    """Changes a value inside a file of torch.save, or plants code in it."""
    try:
        values = torch.load(file, weights_only=False)
    except Exception:  # not a file of torch.save
        return flip(rng, file)
    if rng.random() < 0.15 and isinstance(values, dict):
        values["planted"] = Planted(file.with_name("code-was-run"))
    else:
        shared: Any = ["x"] * 10
        for _ in range(9):
            shared = [shared] * 10
        holder, key = values, None
        while isinstance(holder, dict) and holder and (key is None or rng.random() < 0.7):
            key = rng.choice(list(holder))
            if not isinstance(holder[key], dict):
                break
            holder = holder[key]
        if isinstance(holder, dict) and holder:
            holder[key] = rng.choice((*JUNK, shared, torch.ones(3), torch.tensor(math.nan), "\x1b[2J", {"\x1b]0;": 1}))
    torch.save(values, file)


def damage(rng: random.Random, file: Path) -> None:
    """Changes any file: its bytes, its JSON, its pickle, or what it is."""
    way = rng.randrange(10)
    if way == 0:
        no_file(rng, file)
    elif way <= 2:
        file.write_bytes(mutate_bytes(rng, file.read_bytes()))
    elif way == 3:
        flip(rng, file)
    elif way == 4:
        text = file.read_bytes().decode(errors="replace")
        place = rng.randrange(len(text) + 1)
        file.write_bytes((text[:place] + rng.choice(HOSTILE) + text[place:]).encode(errors="surrogatepass"))
    elif file.suffix == ".json":
        rewrite_json(rng, file)
    elif file.suffix == ".jsonl":
        lines = file.read_text().splitlines()
        place = rng.randrange(len(lines))
        lines[place] = json.dumps(mutate_json(rng, json.loads(lines[place])))
        file.write_text("\n".join(lines) + "\n")
    elif file.suffix in (".pt", METADATA) or file.name == METADATA:
        odd_pickle(rng, file)
    elif file.suffix == ".safetensors":
        data = file.read_bytes()
        size = int.from_bytes(data[:8], "little")
        new = json.dumps(mutate_json(rng, json.loads(data[8 : 8 + size]))).encode()
        file.write_bytes(len(new).to_bytes(8, "little") + new + data[8 + size :])
    else:
        file.write_bytes(mutate_bytes(rng, file.read_bytes()))


def command(case: Case, arguments: list[str], *, never: int | None = None) -> Use:
    """Runs a command. Raises UsageError with its message if it refuses, and AssertionError for whatever must not be."""

    def use() -> None:
        said, errors = io.StringIO(), io.StringIO()
        memory, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        kept = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE") if name in os.environ}
        tempfile.tempdir = str(case.out / "tmp")
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(errors):
                code = cli.main(arguments)
        except SystemExit as ended:
            code = int(ended.code or 0)
        finally:
            tempfile.tempdir = None
            os.environ.update(kept)
        text = said.getvalue() + errors.getvalue()
        took = time.process_time() - begun
        CODES[code] += 1
        assert "Traceback" not in text, text[-900:]
        assert code in EXIT.values(), f"exit {code}"
        assert took < LIMIT_S, f"{took:.1f} s"
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < memory + MEMORY_KIB, "memory"
        assert len(text) < LONGEST, f"prints {len(text)} characters"
        assert not CONTROLS.search(text), f"control characters: {text[:300]!r}"
        assert not list((case.out / "tmp").iterdir()), "files in TMPDIR"
        assert not any(case.folder.rglob("code-was-run")), "code was run"
        assert code != never, f"exit {code} for other numbers"
        if code == EXIT["usage"]:
            raise UsageError(errors.getvalue())

    (case.out / "tmp").mkdir(parents=True)
    return "", use


# --- the kinds -------------------------------------------------------------------------------------------------------

LOGS = {
    "jsonl": '{{"step": {s}, "loss": {v}, "grad_norm": 0.5}}',
    "csv": "{s},{v},0.5",
    "hf": "{{'loss': '{v}', 'grad_norm': '0.5', 'learning_rate': '1e-06', 'epoch': '0.{s}'}}",
    "verl": "(TaskRunner pid=3165) step:{s} - actor/pg_loss:np.float64({v}) - actor/grad_norm:0.5",
    "titan": "[rank0]:[titan] 2026-01-05 10:00:00,123 - root - INFO - step:  {s}  loss:  {v}  grad_norm:  0.5000",
    "megatron": " iteration       {s}/     200 | consumed samples:          160 | lm loss: {v} | grad norm: 0.500 |"
    " number of skipped iterations:   0 |",
    "openrlhf": "INFO 01-02 03:04:05 ppo_trainer.py:547] Global step {s}: {{'policy_loss': {v}, 'actor_lr': 1e-06}}",
    "bar": "Train step of epoch 0: 1%|   | {s}/60 [00:01<01:00,  1.02s/it, gpt_loss={v}, lr=1e-06, grad_norm=0.5]",
    "nanogpt": "iter {s}: loss {v}, time 193.77ms, mfu 12.00%",
    "mlflow": "170000000000{s} {v} {s}",
    "slime": "[2026-01-05 10:00:00] model.py:460 - step {s}: {{'train/loss': {v}, 'train/grad_norm': 0.5}}",
}
STEPS = 9


def training_log(case: Case) -> Use:
    rng, form = case.rng, case.rng.choice(list(LOGS))
    head = ["step,loss,grad_norm"] if form == "csv" else []
    values: list[Any] = [round(2 + math.cos(step), 4) for step in range(1, STEPS + 1)]
    files = [case.given / f"{side}.{form}" for side in "ab"]
    never, way = None, rng.randrange(8)

    def write(file: Path) -> list[str]:
        lines = head + [LOGS[form].format(s=step, v=value) for step, value in enumerate(values, 1)]
        file.write_text("\n".join(lines) + "\n")
        return lines

    write(files[0])
    if way == 0:
        values[rng.randrange(STEPS)] *= 3
        never = EXIT["conforms"]
    elif way == 1:
        values = values[: rng.randrange(1, STEPS)] + [rng.choice(("NaN", "nan"))] * STEPS
        values, never = values[:STEPS], EXIT["conforms"]
    elif way <= 3:
        values[rng.randrange(STEPS)] = rng.choice((*HOSTILE, *JUNK))
    lines = write_safely(files[1], write)
    if way == 4:
        place = rng.randrange(len(lines))
        at = rng.randrange(len(lines[place]))
        lines[place] = lines[place][:at] + rng.choice(HOSTILE) + lines[place][at:]
    elif way == 5:
        rng.choice((rng.shuffle, list.reverse, lambda all_of: all_of.extend(all_of), list.clear))(lines)
    if way in (4, 5):
        files[1].write_text("\n".join(lines) + "\n", errors="surrogatepass")
    elif way >= 6:
        damage(rng, files[1])
    names = [str(files[0]), str(files[1]) + rng.choice(("", "", "", "#1", "#x"))]
    more: tuple[list[str], ...] = (
        ["--json"],
        ["--out", str(case.out / "diff")],
        ["--metric", "loss"],
        ["--by", "tokens"],
        [],
        [],
        [],
    )
    options = [] if never is not None else rng.choice(more)
    return command(case, ["diff", *(names if rng.random() < 0.5 or never else names[::-1]), *options], never=never)


def write_safely(file: Path, write: Callable[[Path], list[str]]) -> list[str]:
    try:
        return write(file)
    except UnicodeEncodeError:  # a lone surrogate
        file.write_text("step 1\n")
        return ["step 1"]


@functools.cache
def base(kind: str) -> Path:
    """The files of a kind before they are mutated, written by their own library."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    with contextlib.redirect_stdout(io.StringIO()):
        BASES[kind](folder)
    return folder


def write_records(folder: Path) -> None:
    torch.manual_seed(0)
    for side in "ab":
        line = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(line.parameters(), lr=0.1)
        with parity.record(line, optimizer, out=folder / side, full=True) as recorder:
            for _ in range(2):
                loss = line(torch.ones(2, 4)).sum()
                loss.backward()
                optimizer.step()
                recorder.step(loss=loss.item())


def write_checkpoints(folder: Path) -> None:
    """Each form as it is, within a folder with digests, and converted to a Hugging Face folder."""
    for name, save in CHECKPOINTS.items():
        (folder / name).mkdir()
        with warnings.catch_warnings(action="ignore"):  # torch warns of a single process
            save(folder / name / "policy", dict(load_file(LLAMA / "model.safetensors")))
        forge(Path(shutil.copytree(folder / name, folder / f"{name}{WITH_DIGESTS}")))
        made = folder / "good" / name
        convert(folder / name / "policy", made, to="hf", model=LLAMA, report=lambda *_: None)
    state = folder / "state" / "policy"
    convert(folder / "DCP" / "policy", state, to="state", model=LLAMA, report=lambda *_: None)
    shutil.copytree(LLAMA, folder / "model" / "policy")


def write_run(folder: Path) -> None:
    summary = write_sample_run(folder / "out") / "summary.json"
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"selection": "--profile mine", "selected": "1"}))


def write_history(folder: Path) -> None:
    assert cli.main(["history", str(folder), "--add", str(base("run") / "out")]) == 0


WITH_DIGESTS = " with digests"
BASES = {"records": write_records, "checkpoints": write_checkpoints, "run": write_run, "history": write_history}


def recorded(case: Case) -> Use:
    shutil.copytree(base("records"), case.given, dirs_exist_ok=True)
    damage(case.rng, case.rng.choice([file for file in sorted((case.given / "b").rglob("*")) if file.is_file()]))
    options = case.rng.choice(([], ["--json"], ["--threshold", "0.1"], ["--out", str(case.out / "diff")]))
    return command(case, ["diff", str(case.given / "a"), str(case.given / "b"), *options])


def checkpoint(case: Case) -> Use:
    rng = case.rng
    name = rng.choice([*CHECKPOINTS, *(f"{name}{WITH_DIGESTS}" for name in CHECKPOINTS), "state", "model"])
    shutil.copytree(base("checkpoints") / name, case.given, dirs_exist_ok=True)
    folder = case.given / "policy"
    target = rng.choice([file for file in sorted(folder.rglob("*")) if file.is_file()])
    before = target.read_bytes()
    changed = flip if name.endswith(WITH_DIGESTS) or rng.random() < 0.4 else damage
    changed(rng, target)
    with_digests = name.endswith(WITH_DIGESTS) or (name == "state" and changed is flip and target.suffix != ".json")
    never = 0 if with_digests and target.read_bytes() != before else None
    if rng.random() < 0.4:
        return command(case, ["inspect", str(folder), *rng.choice(([], ["--json"]))], never=never)
    new, to = case.out / "new", rng.choice(("state", "hf", "hf"))
    arguments = ["convert", str(folder), str(new), "--to", to, *rng.choice((["--model", str(LLAMA)],) * 5 + ([],))]
    found, use = command(case, arguments, never=never)

    def checked() -> None:
        use()
        if to == "hf" and changed is flip and name != "state":
            good = load_file(base("checkpoints") / "good" / name.removesuffix(WITH_DIGESTS) / "model.safetensors")
            made = load_file(new / "model.safetensors")
            assert made.keys() == good.keys()
            assert all(torch.equal(made[key], good[key]) for key in good), "converted to other numbers"

    return found, checked


def history(case: Case) -> Use:
    shutil.copytree(base("history"), case.given / "history")
    damage(case.rng, case.given / "history" / "history.sqlite")
    shutil.copytree(case.given / "history", case.out / "history", symlinks=True, copy_function=link_or_copy)
    options = case.rng.choice(([], ["--json"], ["--keep", "1"], ["--add", str(base("run") / "out")], ["--last", "2"]))
    return command(case, ["history", str(case.out / "history"), *options])


def link_or_copy(source: str, target: str) -> None:
    """Copies a file; a pipe or a huge file is linked, because it cannot be copied."""
    status = Path(source).lstat()
    copied = (status.st_mode & 0o170000) == 0o100000 and status.st_size < 2**30
    shutil.copy2(source, target) if copied else os.link(source, target, follow_symlinks=False)


def output_folder(case: Case) -> Use:
    rng = case.rng
    out = Path(shutil.copytree(base("run") / "out", case.out / "run"))
    if rng.random() < 0.5:
        mutate(out, rng)
    else:
        damage(rng, rng.choice([file for file in sorted(out.rglob("*")) if file.is_file()]))
    other = str(base("run") / "out")
    merged, added = str(case.out / "merged"), str(case.out / "history")
    commands = (
        *(["report", str(out)], ["compare", str(out)], ["compare", str(out), other], ["compare", other, str(out)]),
        *(["merge", str(out), other, "--out", merged], ["history", added, "--add", str(out)]),
    )
    return command(case, [*rng.choice(commands), *rng.choice(([], ["--json"]))])


def training(case: Case) -> Use:
    """A recipe, a model's folder and prompts, as far as the ranks."""
    rng, folder = case.rng, model_folder(case)
    kind = rng.choice(("sft", "grpo", "ppo"))
    lines = {
        "backend": f'"{rng.choice(("fsdp2", "fsdp2", "deepspeed"))}"',
        **{"pretrain": f'"{folder}"', "dataset": f'"{case.given / "data.jsonl"}"', "param_dtype": '"fp32"'},
        **{"max_len": "192", "train_batch_size": "8", "micro_train_batch_size": "1", "max_steps": "2"},
        **{"ckpt_path": f'"{case.out / "run"}"', "device": '"cpu"', "learning_rate": "1e-3"},
        **({} if kind == "sft" else {"rollout_batch_size": "4", "n_samples_per_prompt": "2", "generate_max_len": "8"}),
    }
    recipe = case.given / rng.choice(("recipe.toml", "recipe.yaml"))
    between = " = " if recipe.suffix == ".toml" else ": "
    text = "\n".join(f"{key} = {value}" for key, value in lines.items())
    way = rng.randrange(5)
    if way <= 1:
        rewrite_toml(rng, text, recipe)
        text = recipe.read_bytes().decode(errors="surrogateescape")
    recipe.write_bytes(text.replace(" = ", between).encode(errors="surrogateescape"))
    if way == 2:
        damage(rng, recipe)
    elif way >= 3:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, "pad_token_id": 0}))
        damage(rng, folder / rng.choice(("config.json", "generation_config.json", "tokenizer_config.json")))
    return command(case, ["train", kind, "--config", str(recipe), *rng.choice(([], ["--dry-run"]))])


def options(case: Case) -> Use:
    """Any options of the commands that start no ranks."""
    rng = case.rng
    names = ("list", "plan", "report", "compare", "merge", "judge", "history", "inspect", "convert", "diff")
    name = rng.choice((*names, "list", "list"))
    parser = argparse.ArgumentParser()
    cli_command(name).add_arguments(parser)
    arguments = [name]
    words = [
        *map(str, JUNK),
        *TOML_JUNK,
        *HOSTILE[:4],
        "a",
        str(base("run") / "out"),
        "1",
        "sft-packed",
        "dp2",
        "exact",
    ]
    words = [word for word in words if "\0" not in word and "\ud800" not in word and word != "-"]
    for action in parser._actions:
        wanted = rng.random() < (0.95 if not action.option_strings else 0.2)
        if not wanted or action.dest in ("help", "trust_remote_code", "python", "out", "target"):
            continue
        value = rng.choice([*map(str, action.choices), "x"]) if action.choices else rng.choice(words)
        takes = action.nargs != 0
        arguments += [*action.option_strings[-1:], *([value] if takes else [])]
    return command(case, arguments)


def cli_command(name: str) -> Any:
    from conformance.cli.main import find_command

    return find_command(name)


KINDS: dict[str, Callable[[Case], Use]] = {
    "logs": training_log,
    "records": recorded,
    "checkpoints": checkpoint,
    "history": history,
    "output": output_folder,
    "training": training,
    "options": options,
}


def problem(kind: str, rng: random.Random) -> str:
    """What is wrong with how commands take this case; nothing if all is well."""
    with tempfile.TemporaryDirectory() as place:
        case = Case(rng=rng, folder=Path(place) / "case")
        case.given.mkdir(parents=True)
        with mock.patch("impl.train.launch.run_ranks", return_value=0):
            return outcome(case, *({**fuzz_inputs.KINDS, **KINDS}[kind](case)))


def main(seed: str, count: int, kinds: list[str]) -> int:
    failed = 0
    for kind in kinds or [*KINDS, *fuzz_inputs.KINDS]:
        begun, slowest, wrong = time.process_time(), 0.0, 0
        for number in range(count):
            at = time.process_time()
            if found := problem(kind, random.Random(f"{seed} {kind} {number}")):
                wrong += 1
                print(f"{kind} {number}: {found}"[:1500], flush=True)
            slowest = max(slowest, time.process_time() - at)
        failed += wrong
        ends = ", ".join(f"{code}: {times}" for code, times in sorted(CODES.items()))
        print(
            f"| {kind} | {count} | {ends} | {wrong} | {slowest:.1f} s | {time.process_time() - begun:.0f} s in all",
            flush=True,
        )
        CODES.clear()
    return failed


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])))
