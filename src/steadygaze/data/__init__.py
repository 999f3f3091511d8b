"""Image files, labels, masks and label maps.

| file | subject |
| --- | --- |
| `images.py` | finding and reading image files |
| `preprocess.py` | from an image to the tensor that a model takes |
| `folders.py` | labeled images in class folders or an index.csv |
| `masks.py` | object masks, in the layouts of several data sets |
| `label_maps.py`, `confusion.py` | a class for every pixel; confusion matrices and IoU |
| `sources.py` | data in memory: batches, `Dataset`, `DataLoader` |
| `streams/` | WebDataset shards, Hugging Face datasets, Parquet folders |
| `imagenet.py`, `dataset_tree.py` | classes of ImageNet; checks of downloaded data sets |
| `image_sets.py`, `cifar100.py` | image sets with a training and a test part, for k-nearest neighbors |
"""
