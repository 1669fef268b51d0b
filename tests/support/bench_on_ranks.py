"""What torchrun starts in tests of benchmarks on several ranks: the script that the first argument names, with its CSVs in the folder that
the second one names."""

import importlib
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark"))
    bench = importlib.import_module(sys.argv[1])
    bench.RESULTS = Path(sys.argv[2])
    bench.main(sys.argv[3:])
