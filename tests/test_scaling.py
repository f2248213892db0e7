"""docs/scaling.md: that it is what benchmarks/scaling.py calculates, and how far that is from what was measured."""

import sys

import pytest

from conformance.paths import FIXTURES

ROOT = FIXTURES.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
import scaling  # noqa: E402


def test_the_page_is_what_is_calculated() -> None:
    assert (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8") == scaling.document()


def test_memory_is_calculated_to_a_third_of_what_was_measured() -> None:
    models = scaling.measured_models()
    for one in scaling.MEASURED:
        found = scaling.rank_bytes(models[one.model], one.backend, one.layout, moments=one.moments) / scaling.GIB
        assert 0.75 < found / one.peak < 4 / 3, one


@pytest.mark.parametrize(
    ("number", "billions", "active"), [(0, 8.03, 8.03), (1, 32.8, 32.8), (2, 70.6, 70.6), (3, 235.1, 22.2)]
)
def test_the_models_have_their_published_sizes(number: int, billions: float, active: float) -> None:
    model = scaling.models()[number]
    assert model.count / 1e9 == pytest.approx(billions, rel=2e-3)
    assert model.active / 1e9 == pytest.approx(active, rel=2e-2)
