"""One run split over jobs that know nothing of one another.

| file | subject |
| --- | --- |
| `shard.py` | which shard of how many, and what it owns |
| `locks.py` | one writer for each shard, and no two numbers of shards at the same time |
"""
