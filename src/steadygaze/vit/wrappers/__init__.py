"""Models around a vision transformer: LightningModules, normalisation, heads of one's own, LoRA.

| file | subject |
| --- | --- |
| `plan.py` | the plan of such a model: the blocks of the ViT, and the outer model's own code as the head |
| `readout.py` | which tokens feed that head |
| `module_calls.py` | answering a module's calls in its place, in one thread |
"""
