# needs: peers
for i in 0 1 2 3 4 5 6 7 8; do timeout 40 python3 bwx/bw4_main.py $i >/dev/null 2>$OUT/err$i & done; wait; cat $OUT/err* | tail -5; rm $OUT/err*
timeout 85 python3 bwx/bw4_main.py 2>&1 | grep -v Warn
