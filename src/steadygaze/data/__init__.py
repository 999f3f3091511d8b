"""Image files, labels, masks and label maps.

| file | subject |
| --- | --- |
| `decoding.py` | from the bytes of an image file to pixels, in bounded time and memory |
| `images.py` | finding and reading image files |
| `preprocess.py` | from an image to the tensor that a model takes |
| `transforms.py` | the same by a transform that the user gives |
| `folders.py` | labeled images in class folders or an index.csv |
| `masks.py` | object masks, in the layouts of several data sets |
| `label_maps.py` | a class for every pixel; confusion matrices and IoU |
| `memory.py` | data in memory: batches, `Dataset`, `DataLoader` |
| `streams.py`, `stream_spec.py` | streamed data, and how it is named |
| `tar_shards.py`, `tables.py` | WebDataset shards; Hugging Face datasets and Parquet folders |
| `datasets/` | published data sets, in their own layouts |
"""
