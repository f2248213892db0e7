"""Progress: what a user sees while a training runs: a bar with the time that is left on a terminal, else lines."""

import sys

from tqdm import tqdm

from impl.train.run_log import Numbers

SHOWN = {  # of a line of the log, with the format of each
    "loss": ".4f",
    "reward_mean": ".3f",
    "grad_norm": ".3f",
    "lr": ".2e",
    "tokens_per_second": ",.0f",
    "mfu": ".1%",
    "eval_loss": ".4f",
    "eval_reward": ".3f",
}


class Progress:
    """``done`` of ``steps`` updates have been made before. Quiet on all ranks but the one that says so."""

    def __init__(self, *, steps: int, done: int, shown: bool) -> None:
        self._steps, self._shown = steps, shown
        self._bar = tqdm(total=steps, initial=done, unit="step") if shown and sys.stderr.isatty() else None

    def step(self, step: int, numbers: Numbers) -> None:
        told = _told(numbers)
        if self._bar is not None:
            self._bar.set_postfix_str(told, refresh=False)
            self._bar.update(step - self._bar.n)
        else:
            self.say(f"step {step}/{self._steps}  {told}")

    def say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(text)
        elif self._shown:
            print(text, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _told(numbers: Numbers) -> str:
    held = {name: numbers.get(name) for name in SHOWN}
    return "  ".join(f"{name} {format(value, SHOWN[name])}" for name, value in held.items() if value is not None)
