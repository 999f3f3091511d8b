"""Modules inserted into a vision transformer (TAP, context broadcasting, registers), and a segmentation head.

better = sg.modules.insert(model, tap=sg.modules.TAP(), cb=sg.modules.CB())      # a copy; `model` is
                                                                                 unchanged
plain = sg.modules.remove(better)
scores = sg.modules.segmenter(model, classes=21)(images)                         # (B, 21, H, W)
"""

from steadygaze.modules.base import Cost, Inserted
from steadygaze.modules.cb import CB, ContextBroadcast
from steadygaze.modules.insert import cost, insert, inserted, remove, restore
from steadygaze.modules.registers import RegisterNeurons, Registers, RegisterTokens
from steadygaze.modules.segmenter import SegFormerDecoder, Segmenter, segmenter
from steadygaze.modules.tap import TAP, TokenPool

__all__ = [
    "CB",
    "TAP",
    "ContextBroadcast",
    "Cost",
    "Inserted",
    "RegisterNeurons",
    "RegisterTokens",
    "Registers",
    "SegFormerDecoder",
    "Segmenter",
    "TokenPool",
    "cost",
    "insert",
    "inserted",
    "remove",
    "restore",
    "segmenter",
]
