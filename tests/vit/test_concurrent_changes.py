"""Another thread changes the model while `explain` runs: the change stays, the disturbed call is refused."""

import threading

import pytest
import torch
from torch import nn

import steadygaze as sg
from oracles.models import tiny
from steadygaze.vit.contexts import evaluation_mode


class Meanwhile:
    """Runs `change` in another thread when the model's first block is first called inside `explain`."""

    def __init__(self, model: nn.Module, change) -> None:
        self.called, self.done = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._run, args=(change,))
        self.handle = model.blocks[0].register_forward_pre_hook(self._pause)
        self.thread.start()

    def _run(self, change) -> None:
        assert self.called.wait(30)
        change()
        self.done.set()

    def _pause(self, *_) -> None:
        if not self.called.is_set():
            self.called.set()
            assert self.done.wait(30)

    def close(self) -> None:
        self.handle.remove()
        self.called.set()
        self.thread.join()


@pytest.fixture
def model():
    model = tiny("class")
    sg.adapt(model)  # its check runs the model: the change must fall into the call that is tested
    return model


def images(model):
    return torch.rand(1, *sg.adapt(model).plan.input_size, dtype=next(model.parameters()).dtype)


def explain_while(model, change):
    given = images(model)
    other = Meanwhile(model, change)
    try:
        return sg.explain(model, given, method="ixg")
    finally:
        other.close()


@pytest.mark.parametrize("before", [True, False])
def test_training_mode_set_meanwhile_stays_and_is_reported(model, before):
    model.train(before)
    with pytest.raises(sg.ModelChangedError, match="training mode"):
        explain_while(model, model.train)
    assert all(module.training for module in model.modules())


def test_training_mode_of_one_part_is_seen(model):
    model.eval()
    with pytest.raises(sg.ModelChangedError, match="training mode"):
        explain_while(model, model.blocks[1].train)
    assert model.blocks[1].training and not model.blocks[0].training


def test_a_step_of_an_optimizer_is_refused(model):
    model.eval()
    weight = model.head.weight
    before = weight.detach().clone()

    def step() -> None:
        weight.grad = torch.ones_like(weight)
        torch.optim.SGD([weight], lr=0.1).step()

    with pytest.raises(sg.ModelChangedError, match="weights"):
        explain_while(model, step)
    assert not torch.equal(weight, before), "the step stays"
    assert weight.requires_grad


def test_loaded_and_replaced_weights_are_refused(model):
    state = {name: value + 1 for name, value in model.state_dict().items()}
    with pytest.raises(sg.ModelChangedError, match="weights"):
        explain_while(model, lambda: model.load_state_dict(state))
    weight = model.head.weight
    with pytest.raises(sg.ModelChangedError, match="weights"):
        explain_while(model, lambda: setattr(weight, "data", weight.data + 1))


def test_what_changes_nothing_is_no_alarm(model):
    model.train()
    result = explain_while(model, lambda: [p.requires_grad_(True) for p in model.parameters()])
    assert torch.isfinite(result.scores).all()
    assert all(module.training for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_other_calls_are_no_change(model):
    """Two explanations at once, of a model in training mode."""
    model.train()
    given = images(model)
    alone = sg.explain(model, given, method="ixg").scores
    results = []
    together = explain_while(model, lambda: results.append(sg.explain(model, given, method="ixg").scores))
    assert torch.equal(results[0], alone) and together is not None
    assert all(module.training for module in model.modules())


def test_an_error_is_not_replaced(model):
    model.eval()
    with pytest.raises(KeyError), evaluation_mode(model):
        model.train()
        raise KeyError("its own")
    assert model.training


@pytest.mark.parametrize("training", [True, False])
def test_a_training_step_meanwhile_gets_words_and_a_prediction_does_not(model, training):
    model.train(training)
    given, errors, hooks = images(model), [], len(model._forward_pre_hooks)

    def step() -> None:
        try:
            with torch.set_grad_enabled(training):
                model(given)
        except sg.ModelChangedError as error:
            errors.append(error)

    assert torch.isfinite(explain_while(model, step).scores).all()
    assert len(errors) == training and model.training == training
    assert len(model._forward_pre_hooks) == hooks
    if training:
        model(given).sum().backward()  # afterwards it is trained as before
        assert next(model.parameters()).grad is not None
