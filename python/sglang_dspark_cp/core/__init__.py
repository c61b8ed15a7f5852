"""The path of one prefill batch, in the order in which data flows. Torch only, no sglang.

topology -> layout -> capture -> pack -> gather -> align -> inject -> (Mooncake sends what rank 0 holds)

Shape symbols, used in every module here:

| symbol | meaning |
|---|---|
| T | tokens of the batch (sum of the extend lengths), global order = request after request |
| C | attention-CP size |
| P | ceil(T / C), physical rows per rank; rank r holds global rows r, r+C, r+2C, ... |
| A | captured target layers |
| H | hidden size of the target |
| S | draft stages |
| D | 512, width of a draft-KV row before it is quantised |
| W | sliding window in tokens (128) |
"""
