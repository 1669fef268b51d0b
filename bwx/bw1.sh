nvidia-smi --query-gpu=name,power.limit,clocks.max.sm --format=csv,noheader
for i in 0 1 2 3 4 5 6 7 8 9 10 11; do timeout 40 python3 bwx/bw1_main.py $i >/dev/null 2>$OUT/err$i & done; wait; cat $OUT/err* | tail -5
timeout 70 python3 bwx/bw1_main.py 2>&1 | grep -v Warn
