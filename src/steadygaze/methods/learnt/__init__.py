"""Methods that are trained for a model before they explain it.

| module   | content                                                                             |
| -------- | ----------------------------------------------------------------------------------- |
| files    | safetensors files of what was learnt, and `--diffmask FILE`, `--shapley FILE`        |
| states   | the hidden states that are read, on one grid                                         |
| diffmask | Vision DiffMask: gates that learn which patches to mask                              |
| shapley  | ViT-Shapley: a network that predicts the Shapley values of the patches               |
"""

from steadygaze.methods.learnt import diffmask, shapley

__all__ = ["diffmask", "shapley"]
