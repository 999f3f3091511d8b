"""Shipped recipes that name their authors have the authors' values; the options that some of these need."""

from collections import Counter
from operator import attrgetter

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.training import recipe
from steadygaze.data.preprocess import Preprocess
from steadygaze.training.images import Augmentation
from steadygaze.training.loop import make_schedule
from steadygaze.training.recipe import Augment, read_recipe
from steadygaze.training.sampling import StepSampler

# Of github.com/guoyongcs/TAPADL: the command in the README of each folder, then the defaults of its main.py.
TAP_ADL = {
    "modules.tap": {"branches": 4},  # --num-scales, default 4
    "augment.crop": "resized",  # timm's create_transform
    "augment.scale": [0.08, 1.0],  # its default
    "augment.ratio": [3 / 4, 4 / 3],  # its default
    "augment.flip": 0.5,  # its default
    "augment.color_jitter": 0.0,  # --color-jitter 0.4 has no effect beside --aa in timm
    "augment.rand_augment": "rand-m9-mstd0.5-inc1",  # --aa
    "augment.mixup": 0.8,  # --mixup
    "augment.cutmix": 1.0,  # --cutmix
    "augment.mix_probability": 1.0,  # --mixup-prob, default
    "augment.switch": 0.5,  # --mixup-switch-prob, default
    "losses[cross_entropy].smoothing": 0.1,  # --smoothing
    "losses[cross_entropy].weight": 1.0,
    "losses[adl].weight": 1.0,  # --adloss, default 1
    "losses[adl].tau": 2.0,  # --threshold, default 2
    "losses[adl].form": "code",  # AttentionDiversificationLoss thresholds by > and the mean of whole rows
    "optimizer.name": "adamw",  # --opt
    "optimizer.weight_decay": 0.05,  # --weight-decay
    "optimizer.betas": None,  # --opt-betas, default None: torch's
    "optimizer.eps": None,  # --opt-eps: None or 1e-8, which is torch's
    "optimizer.clip": None,  # --clip-grad, default None
    "optimizer.layer_decay": None,
    "optimizer.decay_all": False,  # create_optimizer excludes biases and norms
    "schedule.name": "cosine",  # --sched
    "schedule.warmup_lr": 1e-6,  # --warmup-lr
    "schedule.cooldown_epochs": 10,  # --cooldown-epochs, default 10
    "epochs": 310,  # --epochs 300, to which create_scheduler adds the cooldown
    "ema.decay": 0.99996,  # --model-ema-decay, default (NVlabs/FAN's script has 0.99992)
    "ema.warmup": False,  # ModelEmaV2 has none
}
FAN = {
    "model.name": "fan_base_16_p4_hybrid",  # --model tap_fan_base_16_p4_hybrid
    # --drop-path .35; their ConvNeXt norm uses the unbiased variance
    "model.arguments": {"drop_path_rate": 0.35, "unbiased_norm": True},
    "augment.interpolation": "random",  # --train-interpolation, default
    "augment.erase": 0.3,  # --reprob
    "augment.repeats": 1,  # no repeated augmentation
    "batch": 4096,  # 8 nodes of 8 GPUs, -b 64
    "optimizer.lr": 4e-3,  # --lr 40e-4, not scaled
    "optimizer.lr_batch": 4096,
    "schedule.warmup_epochs": 10.0,  # --warmup-epochs
    "schedule.min_lr": 1e-6,  # --min-lr
    "precision": "fp16",  # --amp
}
RVT = {
    "model.name": "rvt_tiny_plus",  # the command has tap_rvt_base_plus; patch augmentation is of plus models
    "model.arguments": {"drop_path_rate": 0.1},  # --drop-path, default
    "data.interpolation": "bicubic",  # of testing: Resize(interpolation=3)
    "augment.interpolation": "bicubic",  # --train-interpolation, default
    "augment.erase": 0.25,  # --reprob, default
    "augment.repeats": 3,  # --repeated-aug, default: RASampler
    "batch": 2048,  # 8 nodes of 4 GPUs, --batch-size 64
    "optimizer.lr": 2e-3,  # --lr 5e-4, times 2048 / 512
    "optimizer.lr_batch": 2048,
    "schedule.warmup_epochs": 5.0,  # --warmup-epochs, default
    "schedule.min_lr": 1e-5,  # --min-lr, default
    "precision": "float32",  # autocast(enabled=False)
    # --use_patch_aug, engine.py: kornia's crop, noise and flip
    "losses[patch_augmentation].weight": 1.0,  # both gradients add up
    "losses[patch_augmentation].patch": 16,
    "losses[patch_augmentation].scale": [0.85, 1.0],
    "losses[patch_augmentation].crop": 0.1,
    "losses[patch_augmentation].crop_draw": "batch",  # kornia 0.6.1 (requirements.txt) gives p to p_batch
    "losses[patch_augmentation].noise": 0.01,
    "losses[patch_augmentation].noisy": 0.1,
    "losses[patch_augmentation].flip": 0.1,
}


def value_of(shipped, key: str):
    table, bracket, option = key.partition("].")
    if not bracket:
        found = attrgetter(key)(shipped)
    else:
        found = getattr(shipped.losses[table.partition("[")[2]], option)
    return found


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("tap-adl-fan-base-hybrid", TAP_ADL | FAN), ("tap-adl-rvt-tiny", TAP_ADL | RVT)],
)
def test_recipes_of_tap_and_adl_have_the_authors_values(name, wanted):
    shipped = read_recipe(name)
    assert {key: value_of(shipped, key) for key in wanted} == wanted
    losses = {key.partition("]")[0].removeprefix("losses[") for key in wanted if key.startswith("losses")}
    assert set(shipped.losses) == losses
    assert shipped.batch == shipped.optimizer.lr_batch, "the learning rate is not scaled"


def test_cooldown_is_at_the_lowest_rate(data):
    given = recipe(data, epochs=6, schedule={"cooldown_epochs": 2, "min_lr": 1e-4, "warmup_epochs": 1})
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=given.optimizer.lr)
    schedule, rates = make_schedule(optimizer, given, steps_per_epoch=5), []
    for step in range(30):
        schedule.step_update(step)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates[20:] == [1e-4] * 10 and min(rates[5:20]) > 1e-4
    with pytest.raises(ValueError, match=r"cooldown_epochs: expected fewer than epochs = 2, got 2"):
        recipe(data, epochs=2, schedule={"cooldown_epochs": 2})


def test_repeated_augmentation_spreads_different_views_over_the_processes():
    """Each of the images of a step comes three times, as another view each, in three different processes."""
    samplers = [StepSampler(24, 12, 1, 0, rank, 4, 3) for rank in range(4)]
    epochs = []
    for epoch in range(2):
        seen = []
        for step in (2 * epoch, 2 * epoch + 1):
            parts = [sampler.micro_batches(step)[0] for sampler in samplers]
            for part in parts:
                assert len({index for _, index in part}) == len(part) == 3
            keys = [key for part in parts for key in part]
            assert len(set(keys)) == 12, "no view twice"
            assert set(Counter(index for _, index in keys).values()) == {3}
            assert {view // 3 for view, _ in keys} == {epoch}
            seen += keys
        epochs.append({index for _, index in seen})
        assert len(epochs[-1]) == 8, "a third of the images"
    assert epochs[0] != epochs[1]
    plain, before = StepSampler(24, 12, 2, 0), StepSampler(24, 12, 2, 0, repeats=1)
    assert plain.micro_batches(3) == before.micro_batches(3)


def test_interpolation_of_augmentation():
    preprocess = Preprocess.resize_and_crop(size=(12, 12), resize=12, mean=(0.5,) * 3, std=(0.5,) * 3)
    noise = np.random.default_rng(0).integers(0, 255, (20, 20, 3), dtype=np.uint8)
    image = Image.fromarray(noise)

    def crops(interpolation: str | None) -> set[bytes]:
        augmentation = Augmentation(Augment(interpolation=interpolation, flip=0.0), preprocess)
        found = set()
        for _ in range(12):
            torch.manual_seed(0)  # the same box
            found.add(augmentation.random_crop(image).tobytes())
        return found

    bilinear, bicubic = crops("bilinear"), crops("bicubic")
    assert len(bilinear) == len(bicubic) == 1 and bilinear != bicubic
    assert crops("random") == bilinear | bicubic
    assert crops(None) == (bicubic if preprocess.interpolation == "bicubic" else bilinear)
    options = Augment(interpolation="bicubic", rand_augment="rand-m9-mstd0.5-inc1")
    (operation,) = Augmentation(options, preprocess)._color_operations
    assert {op.kwargs["resample"] for op in operation.ops} == {Image.Resampling.BICUBIC}
