"""Callbacks of Lightning and of transformers' Trainer: what they log, and the model stays as it was."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import steadygaze as sg
from steadygaze.callbacks import LightningGaze, TrainerGaze

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
LABELS = torch.tensor([3, 5])
PICTURES = {f"gaze/{kind}/{i}" for kind in ("overlay", "attention") for i in range(2)}


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    size = {"image_size": 32, "patch_size": 8, "hidden_size": 32, "intermediate_size": 64}
    return ViTForImageClassification(
        ViTConfig(num_hidden_layers=2, num_attention_heads=2, num_labels=10, hidden_dropout_prob=0.1, **size)
    )


class Board:
    """Stands for the objects of Weights & Biases and MLflow: keeps (name, step) of pictures."""

    def __init__(self) -> None:
        self.pictures: list[tuple[str, int]] = []

    def Image(self, picture):  # the name in wandb
        assert picture.mode == "RGB"
        return picture

    def log(self, values):  # wandb
        step = values.pop("train/global_step")
        self.pictures += [(name, step) for name in values]

    def log_image(self, picture, *, key, step):  # mlflow
        assert picture.mode == "RGB"
        self.pictures.append((key, step))


def trainer_of(model: nn.Module, tmp_path, **options):
    from transformers import Trainer, TrainingArguments

    given = {"per_device_train_batch_size": 4, "num_train_epochs": 2, "report_to": "none", "use_cpu": True}
    arguments = TrainingArguments(str(tmp_path), save_strategy="no", disable_tqdm=True, **given | options)
    data = [{"pixel_values": IMAGES[i % 2], "labels": i % 10} for i in range(8)]
    return Trainer(model, arguments, train_dataset=data)


def test_trainer_gaze_logs_to_every_integration_and_changes_no_weight(tmp_path):
    from transformers import TrainerCallback

    class Integration(TrainerCallback):
        """As those of transformers, which keep the logger in these attributes."""

        def __init__(self, **loggers) -> None:
            self.__dict__.update(loggers)

    pytest.importorskip("tensorboard")
    boards = [Board(), Board()]
    weights = []
    for watched in (True, False):
        trainer = trainer_of(vit(), tmp_path, report_to="tensorboard" if watched else "none")
        if watched:
            for name, board in zip(("_wandb", "_ml_flow"), boards, strict=True):
                trainer.add_callback(Integration(**{name: board}))
            gaze = TrainerGaze(IMAGES, trainer, target=LABELS, method="rollout")
            assert isinstance(gaze, TrainerCallback)
            trainer.add_callback(gaze)
        trainer.train()
        weights.append(copy.deepcopy(trainer.model.state_dict()))
        scores = {
            e["step"]: e["gaze/versus_chance"] for e in trainer.state.log_history if "gaze/versus_chance" in e
        }
        assert set(scores) == ({0, 2, 4} if watched else set())
        if watched:
            final = sg.explain(trainer.model, IMAGES, LABELS, method="rollout", check=True)
            assert scores[4] == pytest.approx(float(final.check.versus_chance.mean()), abs=1e-6)
    for board in boards:
        assert sorted(board.pictures) == sorted((name, step) for name in PICTURES for step in (0, 2, 4))
    read = events(tmp_path)
    assert set(read.Tags()["images"]) == PICTURES and "train/gaze/versus_chance" in read.Tags()["scalars"]
    assert [event.step for event in read.Images("gaze/overlay/0")] == [0, 2, 4]
    # dropout drew the same numbers with and without it
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


def test_trainer_gaze_by_steps_warns_where_it_cannot_look_and_is_strict_at_the_start(tmp_path):
    model = vit()
    trainer = trainer_of(model, tmp_path)
    gaze = TrainerGaze(IMAGES, trainer, every=3)
    state = SimpleNamespace(global_step=3, is_world_process_zero=True)
    assert [step for step in range(1, 8) if gaze._due(step)] == [3, 6]
    before = copy.deepcopy(model.train().state_dict())
    loss = model(pixel_values=IMAGES, labels=LABELS).loss
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    gaze.on_step_end(None, state, None)
    assert model.training and all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    now = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(gradients, now, strict=True))
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())
    with torch.no_grad():
        model.classifier.weight.fill_(float("nan"))
    state.global_step = 6
    with pytest.warns(UserWarning, match="nothing was logged at step 6"):
        gaze.on_step_end(None, state, None)
    with pytest.raises(sg.SteadygazeError):
        TrainerGaze(IMAGES, trainer).on_train_begin(None, state, None)
    with pytest.raises(sg.InputError, match="of at least 1, got 0"):
        TrainerGaze(IMAGES, trainer, every=0)
    with pytest.raises(sg.InputError, match="expected a Trainer of transformers, got Tensor"):
        TrainerGaze(trainer, IMAGES)


def events(folder):
    """The event files of TensorBoard below a folder, read."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (place,) = {file.parent for file in folder.rglob("events.out.tfevents*")}
    return EventAccumulator(str(place), size_guidance={"images": 0}).Reload()


def test_lightning_gaze_logs_and_changes_no_weight(tmp_path):
    lightning = pytest.importorskip("lightning")
    pytest.importorskip("tensorboard")
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = vit()

        def training_step(self, batch, index):
            return self.net(pixel_values=batch[0], labels=batch[1]).loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    data = torch.utils.data.TensorDataset(IMAGES.repeat(4, 1, 1, 1), LABELS.repeat(4))
    weights = []
    for watched in (True, False):
        gaze = LightningGaze(IMAGES, target=LABELS, method="rollout", model="net", every=2)
        assert isinstance(gaze, lightning.Callback) and copy.deepcopy(gaze).every == 2
        assert torch.equal(pickle.loads(pickle.dumps(gaze)).images, IMAGES)
        loggers = [TensorBoardLogger(tmp_path / "board", version=0), CSVLogger(tmp_path / "csv", version=0)]
        quiet = {"enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False}
        trainer = lightning.Trainer(
            max_epochs=1,
            accelerator="cpu",
            logger=loggers if watched else False,
            callbacks=[gaze] if watched else [],
            log_every_n_steps=1,
            **quiet,
        )
        module = Classifier()
        module.train()
        torch.manual_seed(3)
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=2))
        weights.append(module.net.state_dict())
    read = events(tmp_path / "board")
    assert set(read.Tags()["images"]) == PICTURES
    assert [event.step for event in read.Images("gaze/attention/1")] == [0, 2, 4]
    assert [event.step for event in read.Scalars("gaze/versus_chance")] == [0, 2, 4]
    (table,) = (tmp_path / "csv").rglob("metrics.csv")
    assert "gaze/versus_chance" in table.read_text()
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


def test_lightning_that_is_not_installed_is_named(monkeypatch):
    import sys

    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(sg.InputError, match="pip install lightning"):
        LightningGaze(IMAGES)
