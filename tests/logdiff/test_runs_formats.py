"""Logs of every framework are read as they are printed. Lines that no program here prints are from public logs.

Sources of the console lines: verl, runs under Ray that users published with their lines (numpy 2's types and older
ones); torchtitan, its documentation and benchmarks; Megatron-LM, published job outputs; OpenRLHF, a published run.
"""

import contextlib
import io
import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c as masked

from conformance.core.errors import UsageError
from reports.logdiff.metrics import METRICS, STEP, TOKENS
from reports.logdiff.readers import read_log
from reports.logdiff.run import Run, run_of

VERL = """\
\x1b[36m(TaskRunner pid=3165)\x1b[0m step:0 - val-core/openai/gsm8k/reward/mean@1:0.104
Training Progress:   1%|          | 1/140 [00:49<1:53:43, 49.09s/it]
\x1b[36m(TaskRunner pid=3165)\x1b[0m step:1 - global_seqlen/min:69484 - actor/entropy:0.1194450631737709 \
- critic/vf_loss:np.float64(0.007003280876688223) - critic/grad_norm:np.float64(42.70210337638855) \
- critic/lr:np.float64(1e-05) - actor/pg_loss:np.float64(-0.0006611689302644663) \
- actor/ppo_kl:np.float64(0.00019574521718368487) - actor/grad_norm:np.float64(3.804414212703705) \
- actor/lr:np.float64(1e-06) - training/global_step:1 - critic/score/mean:0.63671875 - timing_s/step:38.46
(main_task pid=144783) step:2 - actor/entropy_loss:0.452 - actor/pg_loss:-0.052 - actor/grad_norm:0.675 - \
actor/lr:0.000 - critic/score/mean:0.056 - critic/vf_loss:nan
"""
TORCHTITAN = """\
[rank0]:[titan] 2025-10-30 14:32:58,897 - root - INFO - Training starts at step 1
[rank0]:[titan] 2025-10-30 14:32:58,897 - root - INFO - \x1b[31mstep:  1  \x1b[32mloss:  8.1661  \
\x1b[38;2;180;60;0mgrad_norm:  3.6855  \x1b[36mmemory:  2.47GiB(3.12%)  \x1b[34mtps: 3,502  \
\x1b[36mtflops: 1.90  \x1b[35mmfu: 0.19%\x1b[39m
[rank0]:[titan] 2025-10-30 14:32:58,897 - root - INFO - Synchronizing and adjusting timeout for all ProcessGroups
2024-10-03 16:44:32,658 - root - INFO - step: 10  loss: 10.6590  memory: 33.11GiB(74.54%)  wps: 1,962  mfu: 26.95%
[titan] 2025-10-30 14:33:01,000 - root - INFO - validate step: 10  loss:  6.5000  memory:  2.5GiB(3.1%)  tps: 9,000
"""
MEGATRON = """\
 > number of parameters on (tensor, pipeline) model parallel rank (0, 0): 124439808
 [2024-09-14 19:44:19] iteration       10/     200 | consumed samples:          160 | elapsed time per iteration (ms): \
995.3 | learning rate: 0.000000E+00 | global batch size:    16 | loss scale: 8388608.0 | number of skipped iterations: \
 10 | number of nan iterations:   0 |
 [2024-09-14 19:44:24] iteration       20/     200 | consumed samples:          320 | elapsed time per iteration (ms): \
457.6 | learning rate: 2.343750E-07 | global batch size:    16 | lm loss: 1.105231E+01 | loss scale: 262144.0 | \
grad norm: 23.668 | number of skipped iterations:   5 | number of nan iterations:   0 |
-----------------------------------------------------------------------------------------
 validation loss at iteration 20 | lm loss value: 9.009587E+00 | lm loss PPL: 8.181144E+03 |
 validation loss at iteration 200 on test set | lm loss value: 1.000000E+00 | lm loss PPL: 1.000000E+00 |
INFO [2026-06-22 19:28:40] >>  iteration        30/    2000 | consumed samples:          8 | consumed tokens:      \
32768 | learning rate: 9.999994E-06 | global batch size:     8 | lm loss: 1.304194E+00 | grad norm: 8.515 |
"""
OPENRLHF = """\
(PPOTrainer pid=1) INFO 01-02 03:04:05 ppo_trainer.py:547] ✨ Global step 1: {'response_length': 40.375, \
'kl': 1.5e-05, 'rollout/num_samples': 16.0, 'policy_loss': -0.25, 'timing/generation': 2.95, 'actor_lr': 3.25e-06}
(PPOTrainer pid=1) INFO 01-02 03:04:09 ppo_trainer.py:547] ✨ Global step 2: {'response_length': 49.5625, 'kl': nan, \
'policy_loss': 0.125, 'actor_lr': 5.0e-07}
"""


@pytest.fixture
def opened(tmp_path: Path) -> Callable[[str | bytes], Run]:
    def read(content: str | bytes, name: str = "log") -> Run:
        file = tmp_path / name
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        return run_of(read_log(str(file)), name=name)

    return read


Opened = Callable[[str | bytes], Run]


def points(run: Run, metric: str) -> dict[float, float]:
    curve = run.curves[metric]
    return dict(zip(curve.steps.tolist(), curve.values.tolist(), strict=True))


def test_every_name_means_one_thing() -> None:
    names = [*STEP, *TOKENS, *(alias for aliases in METRICS.values() for alias in aliases)]
    assert len(names) == len(set(names))
    assert all(name in aliases for name, aliases in METRICS.items())


def test_verl_prints_numbers_with_numpys_types_behind_rays_prefix(opened: Opened) -> None:
    run = opened(VERL)
    assert run.format == "verl console"
    assert points(run, "policy_loss") == {1: -0.0006611689302644663, 2: -0.052}
    assert points(run, "lr") == {1: 1e-6, 2: 0.0}
    assert points(run, "critic_grad_norm") == {1: 42.70210337638855}
    assert points(run, "reward") == {1: 0.63671875, 2: 0.056}
    assert points(run, "entropy") == {1: 0.1194450631737709, 2: 0.452}
    assert list(run.curves["critic_loss"].steps) == [1, 2]  # and the second is NaN


def test_verls_sft_logs_a_learning_rate_in_its_own_unit(opened: Opened) -> None:
    run = opened("step:1 - train/loss:1.5 - train/lr(1e-3):0.02\nstep:2 - train/loss:1.25 - train/lr(1e-3):0.01\n")
    assert points(run, "lr") == pytest.approx({1: 2e-5, 2: 1e-5})


def test_torchtitan_prints_in_colours(opened: Opened) -> None:
    run = opened(TORCHTITAN)
    assert run.format == "torchtitan console"
    assert points(run, "loss") == {1: 8.1661, 10: 10.659}
    assert points(run, "grad_norm") == {1: 3.6855}
    assert points(run, "eval_loss") == {10: 6.5}


def test_megatron_leaves_out_the_loss_of_skipped_iterations(opened: Opened) -> None:
    run = opened(MEGATRON)
    assert run.format == "Megatron console"
    assert run.averaged == {"loss"}
    assert points(run, "loss") == {20: 11.05231, 30: 1.304194}
    assert points(run, "grad_norm") == {20: 23.668, 30: 8.515}
    assert points(run, "lr") == {10: 0.0, 20: 2.34375e-07, 30: 9.999994e-06}
    assert points(run, "eval_loss") == {20: 9.009587}


def test_openrlhf_prints_a_dictionary_behind_its_step(opened: Opened) -> None:
    run = opened(OPENRLHF)
    assert run.format == "OpenRLHF console"
    assert points(run, "policy_loss") == {1: -0.25, 2: 0.125}
    assert points(run, "response_length") == {1: 40.375, 2: 49.5625}
    assert points(run, "lr") == {1: 3.25e-6, 2: 5e-7}


def test_verls_file_logger_nests_its_metrics(opened: Opened) -> None:
    assert points(opened('{"step": 3, "data": {"actor/grad_norm": 0.5}}\n{"step": 4, "data": {}}\n'), "grad_norm") == {
        3: 0.5
    }


def test_wandbs_history_counts_by_the_trainers_step_and_not_by_its_own(opened: Opened) -> None:
    run = opened(
        '{"_step": 0, "_timestamp": 1.0, "train/loss": 3.0, "train/global_step": 10}\n'
        '{"_step": 1, "_timestamp": 2.0, "train/loss": 2.0, "train/global_step": 20}\n'
    )
    assert run.format == "wandb history"
    assert points(run, "loss") == {10: 3.0, 20: 2.0}


def test_a_line_that_a_kill_has_cut_is_left_out_and_told(opened: Opened) -> None:
    run = opened('{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.0}\n{"step": 3, "lo')
    assert points(run, "loss") == {1: 3.0, 2: 2.0}
    assert run.notes == ("1 lines are no JSON, perhaps cut off, first line 3; they were left out",)


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_csv_has_a_header_with_a_step(delimiter: str, opened: Opened) -> None:
    text = "Step,Train/Loss,grad_norm,comment\n1,3.0,0.5,a\n2,,,b\n3,1.0,0.25,\n".replace(",", delimiter)
    run = opened("\ufeff" + text)
    assert run.format == "CSV"
    assert points(run, "loss") == {1: 3.0, 3: 1.0}
    assert points(run, "grad_norm") == {1: 0.5, 3: 0.25}


PANEL = (
    '"Step","a - 1 - train/loss","a - 1 - train/loss__MIN","a - 1 - train/loss__MAX",'
    '"b - train/loss","b - train/loss__MIN","b - train/loss__MAX"\n'
    '"10","3.0","2.9","3.1","2.0","1.9","2.1"\n"20","2.5","2.4","2.6","","",""\n'
)


def test_a_panel_of_wandb_is_read_one_run_at_a_time(tmp_path: Path) -> None:
    panel = tmp_path / "panel.csv"
    panel.write_text(PANEL, encoding="utf-8")
    with pytest.raises(UsageError, match=r"holds 2 runs; name one: .*panel.csv#a - 1 or .*panel.csv#b"):
        read_log(str(panel))
    with pytest.raises(UsageError, match="holds no run 'c'; it has a - 1, b"):
        read_log(f"{panel}#c")
    run = run_of(read_log(f"{panel}#a - 1"), name="a")
    assert run.format == "wandb CSV"
    assert points(run, "loss") == {10: 3.0, 20: 2.5}
    assert points(run_of(read_log(f"{panel}#b"), name="b"), "loss") == {10: 2.0}


# What TensorFlow's and tensorboard_logger's own tests hold their writers to: the file's first event, v/1 = 1.5 at step
# 1, v/22 = 16 at step 2. No package here writes event files, so these are the real bytes.
HEAD = b'\x18\0\0\0\0\0\0\0\xa3\x7fK"\t\0\0\0\0\0\x08p@\x1a\rbrain.Event:2\xbc\x98!+'
FIRST = b"\x19\0\0\0\0\0\0\0\x8b\xf1\x08(\t\0\0\0\0\0\x08p@\x10\x01*\x0c\n\n\n\x03v/1\x15\0\0\xc0?,\xec\xc0\x87"
SECOND = b"\x1a\0\0\0\0\0\0\0\x12\x9b\xd8-\t\0\0\0\0\0\x08p@\x10\x02*\r\n\x0b\n\x04v/22\x15\0\0\x80A\x8f\xa3\xb6\x88"


def test_event_files_of_tensorboard_are_read_as_other_libraries_write_them(tmp_path: Path) -> None:
    (tmp_path / "events.out.tfevents.1.host").write_bytes(HEAD + FIRST)
    (tmp_path / "events.out.tfevents.2.host").write_bytes(HEAD + SECOND + FIRST[:20])
    for name in (str(tmp_path), str(tmp_path / "events.out.tfevents.1.host")):
        assert read_log(name).rows[0].values == {"v/1": 1.5}
    log = read_log(str(tmp_path))
    assert [(row.step, dict(row.values)) for row in log.rows] == [(1, {"v/1": 1.5}), (2, {"v/22": 16.0})]
    assert log.notes == ("events.out.tfevents.2.host ends within a record (the run goes on, or was killed)",)
    with pytest.raises(UsageError, match=r"no metric that can be compared .*it has v/1, v/22"):
        run_of(log, name="log")
    with pytest.raises(UsageError, match="holds several runs of TensorBoard; name one"):
        read_log(str(tmp_path.parent))


def record(event: bytes) -> bytes:
    length = struct.pack("<Q", len(event))
    return length + struct.pack("<I", masked(length)) + event + struct.pack("<I", masked(event))


def field(number: int, kind: int, content: bytes) -> bytes:
    return bytes([number << 3 | kind]) + (bytes([len(content)]) if kind == 2 else b"") + content


def test_tensorflow_2_writes_scalars_as_tensors(opened: Opened) -> None:
    tensors = [
        field(1, 0, b"\x01") + field(4, 2, struct.pack("<f", 1.5)),  # float32, as raw bytes
        field(1, 0, b"\x02") + field(6, 2, struct.pack("<d", 2.5)),  # float64, as a packed list
        field(1, 0, b"\x07") + field(8, 2, b"text"),  # a string
    ]
    events = [
        field(2, 0, bytes([step])) + field(5, 2, field(1, 2, field(1, 2, b"train/loss") + field(8, 2, tensor)))
        for step, tensor in enumerate(tensors, 1)
    ]
    assert points(opened(HEAD + b"".join(map(record, events))), "loss") == {1: 1.5, 2: 2.5}


@pytest.mark.parametrize("place", [8, 20, len(HEAD) + 8, len(HEAD) + 30])
def test_a_damaged_event_file_is_refused(place: int, tmp_path: Path) -> None:
    data = bytearray(HEAD + FIRST + SECOND)
    data[place] ^= 1
    (tmp_path / "events.out.tfevents.1").write_bytes(data)
    with pytest.raises(UsageError, match=r"tfevents.1 is damaged at byte \d+"):
        read_log(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ('{"step": 1, "loss": 1.0}\n{"step": 1.5, "loss": 2.0}\n{"step": NaN, "loss": 3.0}\n[1]\n', [1]),
        ('{"step": 2, "loss": 1.0, "id": 1' + "0" * 400 + '}\n{"step": 3, "loss": Infinity}\n', [2, 3]),
        ('{"step": 2, "loss": 1.0}\n' + "[" * 100_000 + "\n", [2]),
        ('{"log_history": [1, {"step": 4, "loss": 1.0}, {"step": 4, "train_loss": 9.0, "train_runtime": 1.0}]}', [4]),
        ("step,loss\n1,2.0\nnan,3.0\n\n2\n3,x\n,1\n", [1]),
    ],
)
def test_what_is_no_row_is_left_out(text: str, steps: list[float], opened: Opened) -> None:
    curve = opened(text).curves["loss"]
    assert list(curve.steps) == steps
    assert curve.values[0] in (1.0, 2.0)


def test_an_event_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.tfevents").write_bytes(HEAD + record(b"\x2b\x00"))
    with pytest.raises(UsageError, match="has a record that is not an event of TensorBoard"):
        read_log(str(tmp_path))


def test_the_trainers_mean_of_a_whole_run_is_no_loss_of_its_last_step(opened: Opened) -> None:
    run = opened(
        '{"_step": 1, "_timestamp": 1, "train/loss": 3.0}\n{"_step": 2, "_timestamp": 1, "train/train_loss": 9.0}'
    )
    assert points(run, "loss") == {1: 3.0}


def test_what_no_reader_knows_is_refused_with_its_first_line(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("\nDear diary, the loss fell.\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"looked for: JSON lines, .*verl.*It begins 'Dear diary, the loss fell.'"):
        read_log(str(file))
    with pytest.raises(UsageError, match="there is no log"):
        read_log(str(tmp_path / "missing"))
    file.write_text("", encoding="utf-8")
    with pytest.raises(UsageError, match=r"notes.txt is empty"):
        read_log(str(file))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="neither TensorBoard's event files nor a record"):
        read_log(str(tmp_path / "empty"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, float]]]:
    """A run of Hugging Face's Trainer: what it printed and saved, and what it logged, as it holds it."""
    from trainer_run import main

    folder = tmp_path_factory.mktemp("trainer")
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        main(str(folder))
    (folder / "stdout.log").write_text(out.getvalue(), encoding="utf-8")
    (folder / "both.log").write_text(err.getvalue() + out.getvalue(), encoding="utf-8")
    return folder, json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]


@pytest.mark.parametrize("name", ["trainer_state.json", "both.log"])
def test_a_run_of_hugging_faces_trainer_is_read_with_its_steps(
    name: str, trained: tuple[Path, list[dict[str, float]]]
) -> None:
    folder, history = trained
    run = run_of(read_log(str(folder / name)), name=name)
    assert run.format.startswith("Hugging Face")
    assert run.averaged == {"loss"}
    for metric, own in (
        ("loss", "loss"),
        ("grad_norm", "grad_norm"),
        ("lr", "learning_rate"),
        ("eval_loss", "eval_loss"),
    ):
        expected = {one["step"]: one[own] for one in history if own in one}
        assert points(run, metric) == pytest.approx(expected, rel=1e-3)
    assert list(run.curves["loss"].steps) == [2, 4, 6, 8]


def test_without_a_progress_bar_the_trainers_lines_are_counted_and_that_is_told(
    trained: tuple[Path, list[dict[str, float]]],
) -> None:
    run = run_of(read_log(str(trained[0] / "stdout.log")), name="stdout.log")
    assert list(run.curves["loss"].steps) == [1, 2, 3, 4]
    assert run.notes == ("the log counts no steps: its lines are counted instead (1, 2, 3, ...)",)
