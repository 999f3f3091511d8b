"""From a name, a checkpoint or a module to a model that is ready to use.

| file | subject |
| --- | --- |
| `load.py` | `load_model`, the entry point, and `list_models` |
| `loaded.py` | `LoadedModel`, its result; `ModelOptions`, how a model is built |
| `inputs.py` | `prepare_inputs`: images as people have them, preprocessed for the model |
| `ask.py` | `ask` and `zero_shot`: a model and a question, as a classifier of images |
| `build.py` | `build_model`, the one factory: for `load_model`, recipes and run folders |
| `timm.py`, `torchvision.py`, `transformers.py`, `open_clip.py` | one library each |
| `run_folder.py` | models that `steadygaze train` wrote |
| `checkpoint.py` | weights from files and from the hub |
| `paths.py` | whether models and weights that are named by a path exist |
| `options.py` | class names, image size, normalization and arguments that users state |
"""
