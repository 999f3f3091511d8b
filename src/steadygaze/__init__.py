"""steadygaze: explain vision transformers, verify the explanations, measure robustness and improve it."""

import lazy_loader

__version__ = "0.3.0"

# the public names are declared in __init__.pyi, for editors and type checkers too, and imported on first use
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__all__ += ["__version__"]
