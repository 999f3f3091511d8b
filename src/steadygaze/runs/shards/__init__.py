"""One run split over jobs that know nothing of one another.

| file | subject |
| --- | --- |
| `shard.py` | which shard of how many, and what it owns |
| `keys.py` | which rows of each image are there |
| `tally.py` | how many images and rows a process has |
| `progress_files.py` | `progress-*.json`, which a process writes for others |
| `status.py` | the status of a run, from these files |
| `locks.py` | one writer for each shard, and no two numbers of shards at the same time |
"""
