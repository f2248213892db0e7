"""Values: what the options of ``parity train`` are, read in their types."""

from collections.abc import Mapping
from pathlib import Path

from conformance.validation import UsageError
from impl.train.flags import SAME_SIZE, Value


class Values:
    """Reads values in their types, which resolve_values has checked."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        self._values = values

    def text(self, name: str) -> str:
        return str(self._values[name])

    def whole(self, name: str) -> int:
        value = self._values[name]
        assert isinstance(value, int)
        return value

    def number(self, name: str) -> float:
        value = self._values[name]
        assert isinstance(value, float)
        return value

    def flag(self, name: str) -> bool:
        return bool(self._values[name])

    def path(self, name: str) -> Path | None:
        return None if self._values[name] is None else Path(self.text(name)).expanduser().absolute()

    def given(self, name: str) -> bool:
        return self._values[name] is not None

    def cut(self, name: str) -> int:
        """A size that has two names, of which one may be given."""
        other = SAME_SIZE[name]
        if self.given(name) and self.given(other) and self.whole(name) != self.whole(other):
            raise UsageError(
                f"--{name} {self.whole(name)} and --{other} {self.whole(other)} are two names of one size; give one"
            )
        return self.whole(name) if self.given(name) else self.whole(other) if self.given(other) else 1

    @property
    def stages(self) -> int:
        return self.whole("pipeline_model_parallel_size")
