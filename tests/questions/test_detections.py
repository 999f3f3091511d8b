"""Detections of YOLOS: the chosen query, its logits against the library's, removal, gradients, refusals."""

from functools import cache

import pytest
import torch
from torch import Tensor, nn

import steadygaze as sg
from benchmarks import checks, region_zoo, zoo
from steadygaze.errors import InputError, UnknownNameError, UnsupportedModelError
from steadygaze.questions.detections import QueryClassifier
from steadygaze.trace import forward

BOX = (4, 8, 20, 28)
MIDDLE = pytest.mark.parametrize("middle", [True, False])


@cache
def yolos(middle: bool = True) -> nn.Module:
    return region_zoo.yolos(middle)


def images_of(model: nn.Module, batch: int = 2) -> Tensor:
    return zoo.image_of(model, (3, 32, 40), batch=batch)


def asked(model: nn.Module, label: int | None = None, batch: int = 1) -> QueryClassifier:
    return sg.ask(model, region=sg.Detection(label, BOX), image=images_of(model, batch))


@MIDDLE
def test_the_outputs_are_the_logits_of_the_query(middle: bool) -> None:
    model, question = yolos(middle), asked(yolos(middle))
    images = images_of(model)
    with torch.no_grad():
        expected = model(images).logits[:, question.query]
        torch.testing.assert_close(question(images), expected)
        torch.testing.assert_close(sg.adapt(question)(images), expected)


@MIDDLE
def test_views_reproduce_the_model_and_removal_is_masking(middle: bool) -> None:
    found = checks.check(asked(yolos(middle)))
    assert all(not isinstance(error, str) and error <= 1e-10 for error in found.values()), found


def test_the_query_fits_the_box_and_the_label() -> None:
    """An oracle in a loop: IoU times the probability of the label, over all queries."""
    model = yolos()
    image = images_of(model, 1)
    with torch.no_grad():
        output = model(image)
    chosen = set()
    for label in range(5):
        best, at = -1.0, -1
        for query in range(6):
            x, y, width, height = output.pred_boxes[0, query].tolist()
            left, top = (x - width / 2) * 40, (y - height / 2) * 32
            right, bottom = left + width * 40, top + height * 32
            w = max(0.0, min(right, 20) - max(left, 4))
            h = max(0.0, min(bottom, 28) - max(top, 8))
            iou = w * h / ((right - left) * (bottom - top) + 16 * 20 - w * h)
            value = iou * float(output.logits[0, query].softmax(-1)[label])
            if value > best:
                best, at = value, query
        assert asked(model, label).query == at
        chosen.add(at)
    assert len(chosen) > 1  # the label matters
    found = sg.explain(model, image, sg.Detection(2, BOX), "ixg")
    assert found.target.tolist() == [2] and found.logits.shape == (1, 6) and found.scores.shape == (1, 4, 5)


def test_without_a_label_the_class_of_the_query_is_explained() -> None:
    model = yolos()
    found = sg.explain(model, images_of(model, 1), sg.Detection(box=BOX), "ixg")
    assert found.target.tolist() == found.logits[:, :-1].argmax(1).tolist()


@MIDDLE
def test_gradients_are_those_of_the_model_itself(middle: bool) -> None:
    model, question = yolos(middle), asked(yolos(middle), 2)
    images, vit = images_of(model), sg.adapt(question)
    inputs: list[Tensor] = []
    handles = [
        block.module.register_forward_pre_hook(lambda m, args: inputs.append(args[0])) for block in vit.blocks
    ]
    try:
        score = model(images).logits[:, question.query, 2].sum()
    finally:
        for handle in handles:
            handle.remove()
    run = forward(vit, vit.embed(images).detach())
    trace = run.trace(run.logits[:, 2])
    gradients = torch.autograd.grad(score, inputs)
    for layer, expected in enumerate(gradients):
        for got, own in zip(trace.tokens(layer), (inputs[layer].detach(), expected), strict=True):
            torch.testing.assert_close(got[:, 0], own[:, 0])
            torch.testing.assert_close(got[:, 1:7], own[:, -6:])
            torch.testing.assert_close(got[:, 7:], own[:, 1:-6])
    product = (inputs[0].detach() * gradients[0]).sum(-1)[:, 1:-6].unflatten(1, (4, 5))
    torch.testing.assert_close(sg.explain(question, images, 2, "ixg", score="logit").scores, product)


@pytest.mark.parametrize("method", ["gaze", "ixg", "rise:budget=8"])
def test_batch_equals_singles_and_every_image_has_its_own_query(method: str) -> None:
    model, images = yolos(), images_of(yolos())
    both = sg.explain(model, images, sg.Detection(1, BOX), method)
    other = sg.Detection(3, (0, 0, 40, 32))
    each = sg.explain(model, images, [sg.Detection(1, BOX), other], method)
    for index, detection in enumerate((sg.Detection(1, BOX), other)):
        alone = sg.explain(model, images[index : index + 1], detection, method)
        torch.testing.assert_close(each[index].scores, alone.scores)
    torch.testing.assert_close(both[0].scores, each[0].scores)
    assert both.target.tolist() == [1, 1] and each.target.tolist() == [1, 3]


def test_the_query_stays_when_patches_are_removed_and_verify_removes() -> None:
    model = yolos()
    image = images_of(model, 1)
    question = asked(model, 1)
    rows = sg.verify(question, [(image, torch.tensor([1]))], methods=["ixg", "random"]).to_pandas()
    assert rows["value"].notna().all() and set(rows["note"]) == {"removal"}
    scores = sg.explain(question, image, 1, "occlusion", score="logit").scores.flatten()
    vit = sg.adapt(question)
    with torch.no_grad():
        tokens = vit.embed(image)
        whole = vit.logits(tokens)[0, 1]
        for patch in (0, 7, 19):
            kept = torch.tensor([[other for other in range(20) if other != patch]])
            torch.testing.assert_close(scores[patch], whole - vit.logits(vit.select(tokens, kept))[0, 1])


def test_names_of_the_configuration_are_labels_and_no_object_is_the_last() -> None:
    model, image = yolos(), images_of(yolos(), 1)
    before, model.config.id2label = (
        model.config.id2label,
        dict(enumerate(["dog", "cat", "cup", "car", "bus"])),
    )
    try:
        question = sg.ask(model, region=sg.Detection("cup", BOX), image=image)
        assert question.class_names == ("dog", "cat", "cup", "car", "bus", "no object")
        assert sg.explain(model, image, sg.Detection("cup", BOX), "ixg").target.tolist() == [2]
        assert sg.explain(question, image, "no object", "ixg").target.tolist() == [5]
        with pytest.raises(UnknownNameError, match="cupp"):
            sg.explain(model, image, sg.Detection("cupp", BOX))
    finally:
        model.config.id2label = before


def test_nothing_is_left_on_the_model() -> None:
    model, images = yolos(), images_of(yolos())
    model(images)
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    attributes = [sorted(vars(m)) for m in model.modules()]
    model.train()
    sg.explain(model, images, sg.Detection(1, BOX), method=["gaze", "ixg"])
    assert all(module.training for module in model.modules())
    model.eval()
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == hooks
    assert [sorted(vars(m)) for m in model.modules()] == attributes
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


def test_refusals_say_what_to_do() -> None:
    model, images = yolos(), images_of(yolos())
    with pytest.raises(InputError, match="give the box"):
        sg.Detection("dog")
    with pytest.raises(InputError, match="right <= 40"):
        sg.explain(model, images[:1], sg.Detection(1, (0, 0, 41, 10)))
    with pytest.raises(InputError, match=r"class 5 is out of range; the model has classes 0\.\.4"):
        sg.explain(model, images[:1], sg.Detection(5, BOX))
    with pytest.raises(InputError, match="expected the image it is in"):
        sg.ask(model, region=sg.Detection(1, BOX))
    with pytest.raises(UnsupportedModelError, match="is a detector"):
        sg.explain(model, images, sg.Region(1, box=BOX))
    with pytest.raises(UnsupportedModelError, match=r"target=steadygaze\.Detection"):
        sg.explain(model, images, 1)


def test_a_box_that_no_query_overlaps_is_refused() -> None:
    model, image = yolos(), images_of(yolos(), 1)
    last = model.bbox_predictor.layers[-1]
    with torch.no_grad():
        weight, bias = last.weight.clone(), last.bias.clone()
        last.weight.zero_()
        last.bias.copy_(torch.tensor([3.0, 3.0, -3.0, -3.0]))  # all boxes at the lower right corner
    try:
        with pytest.raises(InputError, match="none of the 6 boxes"):
            sg.explain(model, image, sg.Detection(1, (0, 0, 8, 8)))
    finally:
        with torch.no_grad():
            last.weight.copy_(weight)
            last.bias.copy_(bias)
