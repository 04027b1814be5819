import pytest

from benchmarks.stats import Comparison, Growth, Sample, best_per_s, best_us, is_flat, joined, median_us


def sample(us: float, *, items: int = 1000, wall_s: float = 1.0, waited_s: float = 0.0) -> Sample:
    return Sample(items, wall_s, us * items / 1e6, waited_s)


def test_time_per_item_and_rate() -> None:
    one = Sample(200, 0.5, 0.02)
    assert one.cpu_us == pytest.approx(100)
    assert one.per_s == 400


@pytest.mark.parametrize("empty", [Sample(10, 1.0), Sample(0, 1.0, 0.5)])
def test_nothing_measured_is_no_number(empty: Sample) -> None:
    with pytest.raises(ValueError, match="no CPU time"):
        _ = empty.cpu_us


def test_waiting_for_the_core_is_a_disturbance() -> None:
    assert not sample(1, waited_s=0.05).is_disturbed
    assert sample(1, waited_s=0.2).is_disturbed


def test_windows_are_joined() -> None:
    assert joined([Sample(10, 1.0, 0.25, 0.5), Sample(30, 2.0, 0.5, 0.0)]) == Sample(40, 3.0, 0.75, 0.5)
    assert joined([Sample(10, 1.0)]).cpu_s is None


def test_ratio_is_best_to_best_and_median_is_by_round() -> None:
    result = Comparison(
        gateway=[sample(300), sample(200), sample(500)],
        haproxy=[sample(100), sample(50), sample(100, waited_s=0.5)],
        direct=[],
    )
    assert result.ratio == pytest.approx(4.0)
    assert result.median_ratio == pytest.approx(4.0)
    assert best_us(result.gateway) == pytest.approx(200)
    assert median_us(result.gateway) == pytest.approx(300)
    assert result.disturbed_rounds == 1


def test_rounds_must_match() -> None:
    with pytest.raises(ValueError, match="zip"):
        _ = Comparison([sample(1)], [], []).median_ratio


def test_best_rate() -> None:
    assert best_per_s([sample(1, items=10), sample(1, items=30)]) == 30
    assert best_per_s([]) == 0


MIB = 1024 * 1024


def test_growth_looks_at_the_second_half() -> None:
    growth = Growth(800, [50 * MIB, 58 * MIB, 60 * MIB, 60 * MIB, 60 * MIB + 400])
    assert growth.total_bytes == 10 * MIB + 400
    assert growth.late_bytes == 400
    assert growth.bytes_per_request == pytest.approx(1.0)
    assert is_flat(growth)


def test_steady_growth_is_not_flat() -> None:
    assert not is_flat(Growth(100, [i * MIB for i in range(50, 59)]))
