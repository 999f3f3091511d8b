"""Training: recipes, losses, the loop; trained explanation methods and TokenCut masks."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
