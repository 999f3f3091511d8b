"""Examples for public names whose docstrings have none; tests run them, in this order, as one session."""

SETUP = """
>>> import steadygaze as sg, torch
>>> loaded = sg.load_model("embedded")  # a small ViT inside the package: 32 x 32 pixels, 8 x 8 patches
>>> images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
>>> data = [(images, torch.tensor([3, 5]))]
"""

EXAMPLES = {
    "load_model": """
>>> import steadygaze as sg
>>> loaded = sg.load_model("embedded")  # or "deit_tiny_patch16_224", a folder, a module
>>> loaded.class_names[3], len(loaded.class_names)
('cat', 10)
""",
    "LoadedModel": """
>>> from PIL import Image
>>> loaded.preprocess(Image.new("RGB", (100, 80))).shape
torch.Size([3, 32, 32])
>>> loaded.to_image(images[0]).size
(32, 32)
""",
    "adapt": """
>>> vit = sg.adapt(loaded.model)
>>> vit.grid  # rows and columns of patches
(8, 8)
""",
    "ViT": """
>>> tokens = vit.embed(images)
>>> few = vit.select(tokens, torch.arange(10).expand(2, 10))  # keep ten patches; positions stay
>>> for block in vit.blocks:
...     few = block(few)
>>> vit.head(few).shape
torch.Size([2, 10])
""",
    "explain": """
>>> attribution = sg.explain(loaded, images)  # the predicted class, the default method
>>> attribution.scores.shape  # positive: evidence for the class; negative: against it
torch.Size([2, 8, 8])
>>> maps = sg.explain(loaded, images, target=3, method=["gae", "decompx+skipplus"])  # shares passes
>>> list(maps)
['gae', 'decompx+skipplus']
""",
    "Attribution": """
>>> attribution.target.shape, attribution.logits.shape
(torch.Size([2]), torch.Size([2, 10]))
>>> attribution[0].overlay(loaded.to_image(images[0])).mode
'RGB'
""",
    "Attributions": """
>>> type(maps).__name__, maps["gae"].scores.shape
('Attributions', torch.Size([2, 8, 8]))
""",
    "Attention": """
>>> looked = sg.attention(loaded, images)
>>> looked.overlay(layer=-1, head=1).mode  # of the class token, second head
'RGB'
""",
    "Features": """
>>> found = sg.features(loaded, images)
>>> found.similarity(0, (2, 3)).shape  # of every patch to the one in row 2, column 3 of the first image
torch.Size([2, 8, 8])
""",
    "Lens": """
>>> sg.lens(loaded, images, target="cat").heads.shape  # images, layers, heads
torch.Size([2, 6, 4])
""",
    "list_methods": """
>>> info = sg.list_methods()[0]
>>> info.name, info.family, info.class_specific
('raw_attention', 'attention', False)
""",
    "ask": """
>>> classifier = sg.ask(model, text=["a dog", "a cat"])  # doctest: +SKIP
>>> sg.explain(classifier, images, target=0)  # doctest: +SKIP
""",
    "zero_shot": """
>>> model = sg.load_model("openai/clip-vit-base-patch32")  # doctest: +SKIP
>>> classifier = sg.zero_shot(model, ["dog", "cat"], templates="seven")  # doctest: +SKIP
""",
    "Region": """
>>> sg.Region("road", point=(120, 80)).label
'road'
>>> sg.explain(segmenter, images, target=sg.Region("road", point=(120, 80)))  # doctest: +SKIP
""",
    "Detection": """
>>> sg.Detection("dog", box=(10, 20, 110, 140)).box
(10, 20, 110, 140)
>>> sg.explain(yolos, images, target=sg.Detection("dog", box=(10, 20, 110, 140)))  # doctest: +SKIP
""",
    "verify": """
>>> rows = sg.verify(loaded, data, methods=["gaze_removal", "random"], metrics=["insertion_aopc"])
>>> len(rows)  # two images, two methods, one metric
4
""",
    "Rows": """
>>> sorted(rows.to_pandas()["method"].unique())
['gaze_removal', 'random']
""",
    "list_metrics": """
>>> info = next(info for info in sg.list_metrics() if info.name == "insertion_aopc")
>>> info.unit, info.better
('points', 'higher')
""",
    "stress": """
>>> rows = sg.stress(loaded, data, suites=["occlusion"])
>>> len(rows) > 0
True
""",
    "list_suites": """
>>> "corruptions" in [info.name for info in sg.list_suites()]
True
""",
    "train": """
>>> sg.train("cifar10-tap", "runs/tap", changes={"data.train": "cifar10/train"})  # doctest: +SKIP
""",
    "list_losses": """
>>> [info.name for info in sg.list_losses()][:2]
['cross_entropy', 'relevance']
""",
    "Progress": """
>>> seen = []
>>> _ = sg.verify(loaded, data, methods=["random"], on_progress=seen.append)
>>> seen[-1].done == seen[-1].total
True
""",
    "UnsupportedModelError": """
>>> sg.adapt(torch.nn.Linear(3, 4))  # doctest: +ELLIPSIS
Traceback (most recent call last):
...
steadygaze.errors.UnsupportedModelError: ...
""",
    "UnknownNameError": """
>>> sg.explain(loaded, images, method="atcat")  # doctest: +ELLIPSIS
Traceback (most recent call last):
...
steadygaze.errors.UnknownNameError: ...
""",
    "InputError": """
>>> sg.explain(loaded, images, target=99)  # doctest: +ELLIPSIS
Traceback (most recent call last):
...
steadygaze.errors.InputError: ...
""",
    "SteadygazeError": """
>>> try:
...     sg.load_model("no_such_model")
... except sg.SteadygazeError as error:
...     print(type(error).__name__)
UnknownNameError
""",
}
