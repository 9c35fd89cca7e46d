"""benchmarks/products.py shows each product beside the memory's bandwidth and the multiplier's peak."""

from scripts import script
from slipstream.kernels.library import PORTABLE, level, processor_flags
from toys.kernels import needs_kernel

products = script("benchmarks/products.py")


@needs_kernel
def test_the_peak_counts_the_products_that_it_adds() -> None:
    """Baseline instructions have none here; where there are some, every round adds as many as the one before."""
    none = next(each for each in PORTABLE if each.fits and "avx2" not in each.flags)
    assert products.Peaks(none).products("int4", 3) == 0
    if "avx2" in processor_flags():
        peaks = products.Peaks(level())
        for name in products.FORMATS:
            assert peaks.products(name, 0) == 0
            assert peaks.products(name, 6) == 3 * peaks.products(name, 2) > 0
        assert peaks.products("int4", 1) >= peaks.products("int8", 1) > peaks.products("float32", 1)


def test_the_table_judges_six_rows_and_shows_shares_of_the_peak() -> None:
    times = {1: 1000.0, 2: 1100.0, 6: 1500.0, 16: 3000.0, 64: 9000.0}
    case = {"level": "native", "matrix": "100x40", "bytes": 4000, "bandwidth": 8.0, "peak": 32.0, "times": times}
    shown = products.table({"processor": "toy", "cases": [case | {"format": name} for name in ("bfloat16", "int4")]})
    bfloat16, int4 = (line.split(" | ") for line in shown.splitlines()[2:4])
    assert bfloat16[5:11] == ["0.50", "1.5", "1.50", "1.4 missed", "32", "0.50"] and int4[7:9] == ["1.50", "1.6"]
    assert int4[-1] == "0.89 |"
