# needs: peers
(timeout -s INT 44 python3 -P -m pytest -v -m gpu -n 14 --tb=short -W ignore -p no:cacheprovider tests/kernels/test_hopper_on_gpu.py tests/kernels/test_dq_accum.py tests/kernels/test_dq_schedule.py  > $OUT/t.txt 2>&1) &
for i in 0 1 2 3 4 5; do timeout 44 python3 bwx/bw4_main.py $i >/dev/null 2>$OUT/err$i & done; wait; cat $OUT/err* | tail -5; rm $OUT/err*
grep -c PASSED $OUT/t.txt; grep -E "FAILED|ERROR" $OUT/t.txt | head; tail -n 3 $OUT/t.txt | cut -c1-300
timeout 56 python3 bwx/bw4_main.py 2>&1 | grep -v Warn
