"""From a name, a checkpoint or a module to a model that is ready to use.

| file | subject |
| --- | --- |
| `load.py` | `load_model`, the entry point |
| `loaded.py` | `LoadedModel`, its result |
| `build.py` | `build_model`, the one factory: for `load_model`, recipes and run folders |
| `timm_models.py`, `torchvision_models.py`, `transformers_models.py`, `embedded.py` | one library each |
| `run_folder.py` | models that `steadygaze train` wrote |
| `checkpoint.py` | weights from files and from the hub |
| `model_options.py` | class names, image size, normalization and arguments that users state |
| `model_names.py` | `list_models` |
"""
