"""Modules that go into a stock vision transformer: token-aware average pooling (TAP) and context broadcasting (CB).

    better = sg.modules.insert(model, tap=sg.modules.TAP(), cb=sg.modules.CB())      # the model given is left as it was
    plain = sg.modules.remove(better)
"""

from steadygaze.modules.base import Cost, Inserted
from steadygaze.modules.cb import CB, ContextBroadcast
from steadygaze.modules.insert import cost, insert, inserted, remove, restore
from steadygaze.modules.tap import TAP, TokenPool

__all__ = ["CB", "TAP", "ContextBroadcast", "Cost", "Inserted", "TokenPool", "cost", "insert", "inserted", "remove", "restore"]
