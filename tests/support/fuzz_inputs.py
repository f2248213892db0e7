"""Mutates all kinds of user input, and checks the result of each mutation.

A case is a kind and a seed, and always gives the same files. It ends in a valid object that can be used, or in a
UsageError that names the file; never in another exception, a hang, executed code, or a file outside the output folder.
"""

import json
import math
import os
import random
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from fuzz_mutations import TEMPLATES, WORDS, mutate_bytes, mutate_json, rewrite_json, rewrite_toml
from transformers import AutoTokenizer

from conformance.core.errors import UsageError
from conformance.core.host import FIXTURES
from conformance.data.inputs import load_documents, prepare_inputs
from conformance.data.rollouts import build_rollouts
from conformance.matrix.options import Selection
from conformance.matrix.profile import select_cells
from conformance.models.families import read_architecture
from conformance.oracle.decoder import forward, load_weights
from conformance.oracle.run import POLICIES
from conformance.spec.layout import AXES, OPTIONS, Layout
from conformance.spec.scenario import DataConfig, load_scenario, parse_scenario, scenario_to_json
from impl.models.loading import load_model

LIMIT_S = 60.0  # of the clock; a template that loops is stopped after five seconds of computing
MODELS = ("llama", "qwen3", "gemma3", "pangu")

# Whoever imports this leaves a mark.
CODE = "from pathlib import Path\nPath({mark!r}).write_text('this code was run')\nclass Any: pass\n"


class HangError(BaseException):
    """A case took longer than LIMIT_S; no ``except Exception`` of what is tested catches it."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """``folder`` is the case's own. What is mutated lies in ``given`` below it; ``out`` beside may be written to."""

    rng: random.Random
    folder: Path

    @property
    def given(self) -> Path:
        return self.folder / "given"

    @property
    def out(self) -> Path:
        return self.folder / "out"

    @property
    def mark(self) -> Path:
        return self.folder / "code-was-run"


def problem(kind: str, seed: int, folder: Path) -> str:
    """What is wrong with how the suite takes this case; nothing if all is well. ``folder`` is new."""
    case = Case(rng=random.Random(f"{kind} {seed}"), folder=folder)
    case.given.mkdir(parents=True)
    name, use = KINDS[kind](case)
    return outcome(case, name, use)


def outcome(case: Case, name: str, use: Callable[[], object]) -> str:
    """What is wrong with how ``use`` ends; nothing if all is well. A refusal has to have ``name`` in it."""
    before = _listing(case)
    try:
        _within_limit(use)
        found = ""
    except UsageError as error:
        found = _of_message(str(error), name)
    except HangError:
        found = f"it hangs for {LIMIT_S:g} s"
    except Exception as error:
        found = f"{type(error).__name__}: {str(error)[:200]}"
    if case.mark.exists():
        return f"code of the folder was run; {found}"
    if changed := sorted(str(path) for path, _ in before ^ _listing(case)):
        return f"{changed} changed outside the output folder; {found}"
    return found


def _of_message(message: str, name: str) -> str:
    if name not in message:
        return f"the message does not name {name}: {message[:200]}"
    if "Traceback" in message or len(message) > 3000:
        return f"the message is none for people: {message[:200]}"
    return ""


def _listing(case: Case) -> set[tuple[Path, tuple[int, int]]]:
    """All that lies outside the output folder, with size and time."""
    found = set()
    for place, folders, files in os.walk(case.folder):
        if Path(place) == case.folder:
            folders[:] = [name for name in folders if name != case.out.name]
        for path in (Path(place) / name for name in (*folders, *files)):
            status = path.lstat()
            found.add((path, (status.st_size * path.is_file(), status.st_mtime_ns)))
    return found


def _within_limit(use: Callable[[], object]) -> None:
    def stop(*_: object) -> None:
        raise HangError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        use()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# --- the kinds -------------------------------------------------------------------------------------------------------

Use = tuple[str, Callable[[], object]]  # what a refusal has to name, and what is done with the case


def scenario_file(case: Case) -> Use:
    source = case.rng.choice(sorted((FIXTURES / "scenarios").glob("*.toml")))
    file = case.given / source.name
    rewrite_toml(case.rng, source.read_text() + '[objective]\nkind = "sft"\n', file)

    def use() -> None:
        scenario = load_scenario(file, model="models/llama", precision="fp32")
        assert parse_scenario(scenario_to_json(scenario)) == scenario
        assert 1 <= scenario.steps * scenario.data.rows <= 2**22
        assert all(math.isfinite(scenario.schedule.factor(step)) for step in (0, 1, scenario.steps))

    return file.name, use


def layout_text(case: Case) -> Use:
    rng = case.rng
    sizes = (1, 2, 2, 2, 3, 4, 8, 0, 300, 65536, 65537, 10**12)

    def part() -> str:
        if rng.random() < 0.1:
            return f"{rng.choice(list(AXES))}{rng.choice(('02', '٢', '²', '', '-1', '9' * 5000, '1e3'))}"
        return rng.choice((f"{rng.choice((*AXES, 'zero'))}{rng.choice(sizes)}", rng.choice((*OPTIONS, *WORDS))))

    text = ".".join(part() for _ in range(rng.choice((1, 2, 3, 4))))
    given = {name: rng.choice(sizes) for name in ("heads", "kv_heads", "layers", "rows", "accumulation")}

    def use() -> None:
        layout = Layout.parse(text)
        assert Layout.parse(str(layout)) == layout
        assert layout.world_size <= 65536
        assert str(layout).isascii()
        layout.validate(**given)

    return "", use


def profile_file(case: Case) -> Use:
    file = case.given / "mine.toml"
    source = case.rng.choice(sorted((FIXTURES / "profiles").glob("*.toml")))
    tables = source.read_text().replace('"sft-', f'"{FIXTURES}/scenarios/sft-').split("\n\n")
    chosen = [table for table in tables if table.startswith("[[")]
    text = "\n\n".join([tables[0], *(t for t in tables if t.startswith("[programs]")), *case.rng.sample(chosen, 2)])
    rewrite_toml(case.rng, text.replace(f"{FIXTURES}/scenarios/", ""), file)

    def use() -> None:
        for cell in select_cells(Selection(profile=str(file), backend=("plain_backend:Plain",))):
            assert cell.world_size <= 65536
            assert str(cell).isprintable()

    return file.name, use


@cache
def _tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FIXTURES / "models" / "llama")


def _samples(count: int) -> list[dict[str, str]]:
    return [{"question": f"What is {i} plus {i}?", "answer": f"It is {2 * i}."} for i in range(count)]


def jsonl_file(case: Case) -> Use:
    rng, file = case.rng, case.given / "data.jsonl"
    lines = [json.dumps(sample).encode() for sample in _samples(6)]
    place, way = rng.randrange(6), rng.randrange(5)
    if way == 0:
        lines[place] = mutate_bytes(rng, lines[place])
    elif way == 1:
        lines[place] = json.dumps(mutate_json(rng, json.loads(lines[place]))).encode()
    elif way == 2:
        lines[place] = rng.choice((b"[" * 10**5, b'{"question":' * 10**5, b'{"question": %s}' % (b"9" * 5000), b"NaN"))
    elif way == 3:
        text = rng.choice(("\ud800", "x" * 3 * 10**6, "\u2028", "\0", "<|user|>", "🙂" * 200, "<eos>" * 50, "\x85"))
        lines[place] = json.dumps({"question": "2?", "answer": text}, ensure_ascii=rng.random() < 0.5).encode(
            errors="surrogatepass"
        )
    data = b"\n".join(lines) + b"\n"
    if way == 4:
        data = mutate_bytes(rng, data)
    file.write_bytes(data)

    def use() -> None:
        config = DataConfig(path=str(file))
        try:
            documents = load_documents(config, _tokenizer())
        except UsageError as error:
            if any(word in str(error) for word in ("line ", "sample", "is empty", "data.max_len")):
                raise
            raise AssertionError(f"no line is named: {error}") from None
        assert all(1 < len(document.tokens) <= config.max_len for document in documents)

    return file.name, use


def rollout_file(case: Case) -> Use:
    rng, file = case.rng, case.given / "data.jsonl"
    lines: list[Any] = [
        {"group": i // 2, "prompt_ids": [1, 4], "completion_ids": [7] * i, "logprobs": [-1.5] * i, "reward": i / 2}
        for i in range(8)
    ]
    packed, place, way = rng.random() < 0.5, rng.randrange(8), rng.randrange(5)
    if way == 0:
        rng.shuffle(lines)
    elif way == 1:
        lines[place][rng.choice(sorted(lines[place]))] = rng.choice((10**400, [10**400], [[7]], [400], 0.5, "7", None))
    elif way <= 3:
        lines[place] = mutate_json(rng, lines[place])
    data = "".join(json.dumps(each) + "\n" for each in lines).encode()
    file.write_bytes(mutate_bytes(rng, data) if way == 4 else data)
    shape = {"path": str(file), "packed": packed, "rows": rng.choice((1, 2, 4, 4)), "max_len": rng.choice((9, 40, 96))}
    objective = {"kind": rng.choice(("grpo", "ppo")), "mini_batches": rng.choice((1, 2))}

    def use() -> None:
        values = {"name": "any", "model": str(FIXTURES / "models" / "llama"), "precision": "fp32", "steps": 3}
        scenario = parse_scenario(
            {**values, "optimizer": {"name": "sgd", "lr": 0.1}, "data": shape, "objective": objective}
        )
        try:
            batches = build_rollouts(scenario, Path(scenario.model))
        except UsageError as error:
            if any(word in str(error) for word in ("line ", "lines of", "is empty", "data.max_len", "rollout of ")):
                raise
            raise AssertionError(f"no line is named: {error}") from None
        assert batches[0].rollout
        assert all(len(batch.rows) == scenario.data.rows and batch.target_count > 1 for batch in batches)
        assert all(row.length <= scenario.data.max_len for batch in batches for row in batch.rows)

    return file.name, use


def model_folder(case: Case) -> Path:
    """A whole model, small data beside it."""
    folder = case.given / "model"
    shutil.copytree(FIXTURES / "models" / case.rng.choice(MODELS), folder)
    (case.given / "data.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in _samples(4)))
    return folder


def use_model(case: Case) -> Callable[[], None]:
    """Prepare the inputs from the folder, and use them as a cell does: oracle and transformers compute with them."""
    seed = case.rng.choice((0, 0, 1))
    values = {"name": "any", "model": str(case.given / "model"), "precision": "fp32", "steps": 1, "seed": seed}
    data = {"path": str(case.given / "data.jsonl"), "rows": 2}

    def use() -> None:
        scenario = parse_scenario({**values, "optimizer": {"name": "sgd", "lr": 0.1}, "data": data})
        folder = prepare_inputs(scenario, case.out).models["policy"]
        architecture = read_architecture(folder)
        weights = load_weights(folder, architecture, torch.float64)
        tokens = torch.tensor([0, architecture.vocab_size - 1, 1 % architecture.vocab_size])
        logits = forward(tokens, weights, architecture, POLICIES["float64"])
        model = load_model(folder, dtype=torch.float64, attention="eager")
        assert logits.shape == model(input_ids=tokens[None]).logits[0].shape

    return use


def config_file(case: Case) -> Use:
    folder = model_folder(case)
    rewrite_json(case.rng, folder / "config.json")
    return "config.json", use_model(case)


def weights_file(case: Case) -> Use:
    rng, folder = case.rng, model_folder(case)
    file, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    way = rng.randrange(5)
    if way == 0:
        file.write_bytes(mutate_bytes(rng, data))
    elif way == 1:
        place = rng.randrange(8 + size)
        file.write_bytes(data[:place] + rng.randbytes(rng.choice((1, 4, 8))) + data[place + 1 :])
    elif way == 2:
        new = json.dumps(mutate_json(rng, header)).encode()
        file.write_bytes(len(new).to_bytes(8, "little") + new + data[8 + size :])
    else:
        parts = ("a.safetensors", "b.safetensors")
        for part in parts[: rng.choice((1, 2, 2))]:
            shutil.copy(file, folder / part)
        names = [name for name in header if name != "__metadata__"]
        index.write_text(json.dumps({"metadata": {}, "weight_map": {n: rng.choice(parts) for n in names}}))
        if way == 4:
            rewrite_json(rng, index)
    return "given/model", use_model(case)


def tokenizer_files(case: Case) -> Use:
    rng, folder = case.rng, model_folder(case)
    name = rng.choice(("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"))
    if name != "chat_template.jinja":
        rewrite_json(rng, folder / name)
    elif rng.random() < 0.5:
        (folder / name).write_text(rng.choice(TEMPLATES))
    else:
        (folder / name).write_bytes(mutate_bytes(rng, (folder / name).read_bytes()))
    return "given/model", use_model(case)


def odd_files(case: Case) -> Use:
    """Files that are none, links that lead elsewhere, and code that nobody has agreed to."""
    rng, folder = case.rng, model_folder(case)
    outside = case.given / "secret.json"
    outside.write_text((folder / "config.json").read_text())
    name = rng.choice([*(file.name for file in folder.iterdir()), "new.json", "model.safetensors.index.json", "sub"])
    place = folder / name
    way = rng.randrange(9)
    if way < 7 and place.is_file():
        place.unlink()
    if way == 0:
        os.mkfifo(place)
    elif way == 1:
        place.symlink_to(rng.choice((place, folder, folder.parent, "/", Path(name))))
    elif way == 2:
        place.symlink_to(rng.choice((outside, Path("/dev/zero"), Path("/etc/hostname"), Path("../secret.json"))))
    elif way == 3:
        place.symlink_to("nowhere")
    elif way == 4:
        place.mkdir()
        (place / "inside").write_text("x")
    elif way == 5:
        place.mkdir()
        os.mkfifo(place / "inside")
    elif way >= 7:
        _add_code(case, folder)
    return "given/model", use_model(case)


def _add_code(case: Case, folder: Path) -> None:
    """``auto_map`` in one of the files that have it, to code that leaves a mark."""
    rng = case.rng
    (folder / "evil.py").write_text(CODE.format(mark=str(case.mark)))
    for script in folder.glob("*openpangu*.py"):
        script.write_text(CODE.format(mark=str(case.mark)) + script.read_text())
    file = folder / rng.choice(("config.json", "tokenizer_config.json"))
    kinds = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer")
    code: Any = dict.fromkeys(rng.sample(kinds, rng.choice((1, 2, 4))), "evil.Any")
    if rng.random() < 0.2:  # as older folders have it, or nobody
        code = rng.choice(("evil.Any", ["evil.Any", "evil.Any"], [None, "evil.Any"]))
    file.write_text(json.dumps(json.loads(file.read_text()) | {"auto_map": code}))


KINDS: dict[str, Callable[[Case], Use]] = {
    "scenario": scenario_file,
    "layout": layout_text,
    "profile": profile_file,
    "data": jsonl_file,
    "rollouts": rollout_file,
    "config": config_file,
    "weights": weights_file,
    "tokenizer": tokenizer_files,
    "files": odd_files,
}
