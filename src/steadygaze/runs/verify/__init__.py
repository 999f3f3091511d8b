"""`verify`: how faithful are attribution maps, on this model and these images?

| file | subject |
| --- | --- |
| `api.py` | `verify`, the public function |
| `request.py` | what a run is given, checked before anything is written |
| `plan.py` | columns (methods with scores) and the maps behind them |
| `images.py` | from files or tensors to batches |
| `measure.py` | the rows of a batch |
| `summary.py` | from rows to a ranking |
| `grouping.py` | which runs can share a table |
| `samples.py` | the images and maps that the report shows |
"""
