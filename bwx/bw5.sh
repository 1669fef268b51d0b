timeout 96 python3 -P -m pytest -v -m gpu -n 12 --tb=short -W ignore -p no:cacheprovider tests/kernels/test_dq_accum.py tests/kernels/test_dq_schedule.py tests/kernels/test_hopper_on_gpu.py tests/kernels/test_numerics.py > $OUT/t.txt 2>&1
grep -c PASSED $OUT/t.txt; grep -E "FAILED|ERROR" $OUT/t.txt | head; tail -c 1500 $OUT/t.txt
