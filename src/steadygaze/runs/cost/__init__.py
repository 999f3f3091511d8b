"""What a run costs: forward passes, seconds, rows, bytes, memory. `--dry-run` prints it before a run starts.

One forward pass is one run of the model's blocks on all tokens of one image. A run on half of the tokens
counts half, a backward pass counts as a forward pass. docs/scale.md carries the numbers to large runs.

| file | subject |
| --- | --- |
| `declared.py` | forward passes that methods declare, for messages and limits |
| `counting.py` | forward passes of any code, counted |
| `timing.py` | seconds and memory of a piece of a run, from a few images |
| `estimate.py` | the estimate of a run, and of its shards |
| `verify.py`, `stress.py`, `train.py` | the pieces of each kind of run |
"""
