"""What torchrun starts in test_parallel.py: bench_parallel.py with its CSVs in the folder that the first argument names."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark"))
    import bench_parallel

    bench_parallel.RESULTS = Path(sys.argv[1])
    bench_parallel.main(sys.argv[2:])
