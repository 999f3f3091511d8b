"""Corruptions: seeds, shapes, bad input; slow reference versions; agreement with the reference package."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.ndimage import gaussian_filter, map_coordinates

from benchmarks.corruptions import sample_image
from helpers.tiers import tiered
from steadygaze.data.datasets.imagenet import COMMON, CORRUPTIONS, EXTRA
from steadygaze.errors import InputError, UnknownNameError
from steadygaze.robustness.corruptions import blurs, frost, pixelwise, weather
from steadygaze.robustness.corruptions import filters as kernels
from steadygaze.robustness.corruptions.corrupt import CIFAR, IMAGENET, TINY_IMAGENET, corrupt

RANDOM = (
    "gaussian_noise",
    "shot_noise",
    "impulse_noise",
    "glass_blur",
    "motion_blur",
    "snow",
    "frost",
    "fog",
    "elastic_transform",
    "speckle_noise",
    "spatter",
)
FIXED = tuple(name for name in CORRUPTIONS if name not in RANDOM)
IMAGE = sample_image(80, seed=1)
SMALL = sample_image(32, seed=2)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_names_and_settings_are_complete():
    assert (len(COMMON), len(EXTRA), len(CORRUPTIONS)) == (15, 4, 19)
    for table in (IMAGENET, TINY_IMAGENET, CIFAR):
        assert set(table) == set(CORRUPTIONS)
        assert all(len(levels) == 5 for _, levels in table.values())


@pytest.mark.parametrize("name", CORRUPTIONS)
@pytest.mark.parametrize("image", [IMAGE, SMALL], ids=["imagenet", "cifar"])
def test_seeded_pure_and_batched(name, image):
    before, state = image.copy(), np.random.get_state()[1].copy()  # noqa: NPY002
    torch_state = torch.get_rng_state()
    read_only = image.copy()
    read_only.flags.writeable = False
    one = corrupt(read_only, name, 3, seed=7)
    assert one.dtype == np.uint8
    assert one.shape == image.shape
    assert (image == before).all()
    assert not np.shares_memory(one, image)
    assert (one == corrupt(image, name, 3, seed=7)).all()
    batch = np.stack([image, image, image[::-1]])
    many = corrupt(batch, name, 3, seed=7)
    assert (many[0] == one).all()
    assert (many[0] != many[1]).any() == (name in RANDOM)
    listed = corrupt(batch, name, 3, seed=[4, 7, 9])
    assert (listed[1] == one).all()
    assert (listed[2] == corrupt(image[::-1], name, 3, seed=9)).all()
    assert (np.random.get_state()[1] == state).all()  # noqa: NPY002
    assert (torch.get_rng_state() == torch_state).all()


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_any_size_from_eight_pixels(name):
    for shape in ((8, 8), (8, 50), (70, 9), (97, 131)):
        image = sample_image(150, seed=4)[: shape[0], : shape[1]]
        for settings in (None, "imagenet", "tiny-imagenet", "cifar"):
            for severity in (1, 5):
                assert corrupt(image, name, severity, seed=0, settings=settings).shape == image.shape
    for flat in (0, 255):
        corrupt(np.full((70, 70, 3), flat, dtype=np.uint8), name, 3, seed=0)


@pytest.mark.parametrize(
    "name",
    [name for name in CORRUPTIONS if name not in ("brightness", "saturate", "frost", "elastic_transform")],
)
def test_severity_takes_the_image_further_away(name):
    image = sample_image(224, seed=6)

    def far(severity: int) -> float:
        made = corrupt(np.stack([image] * 3), name, severity, seed=3, settings="imagenet")
        return float(np.abs(made.astype(float) - image).mean())

    assert far(5) > far(1) > 0.1


def test_settings_are_chosen_by_size():
    for name in ("gaussian_noise", "jpeg_compression"):
        assert (corrupt(SMALL, name, 2, seed=0) == corrupt(SMALL, name, 2, seed=0, settings="cifar")).all()
        assert (corrupt(SMALL, name, 2, seed=0) != corrupt(SMALL, name, 2, seed=0, settings="imagenet")).any()
        assert (corrupt(IMAGE, name, 2, seed=0) == corrupt(IMAGE, name, 2, seed=0, settings="imagenet")).all()
        for size, settings in ((48, "cifar"), (49, "tiny-imagenet"), (64, "tiny-imagenet"), (65, "imagenet")):
            made = corrupt(IMAGE[:size], name, 2, seed=0)
            assert (made == corrupt(IMAGE[:size], name, 2, seed=0, settings=settings)).all()


def test_threads_give_the_same_bytes():
    work = [(name, seed) for name in CORRUPTIONS for seed in range(2)]
    alone = [corrupt(IMAGE, name, 4, seed=seed) for name, seed in work]
    ready = threading.Barrier(4)

    def run(part: int) -> list[np.ndarray]:
        ready.wait()
        return [corrupt(IMAGE, name, 4, seed=seed) for name, seed in work[part::4]]

    with ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(run, range(4)))
    for part, made in enumerate(parts):
        for ours, wanted in zip(made, alone[part::4], strict=True):
            assert (ours == wanted).all()


@pytest.mark.parametrize(
    ("image", "name", "severity", "options", "kind", "words"),
    [
        (IMAGE, "gausian_noise", 1, {}, UnknownNameError, "Did you mean 'gaussian_noise'"),
        (IMAGE, "fog", 0, {}, InputError, "severity of 1, 2, 3, 4 or 5, got 0"),
        (IMAGE, "fog", 6, {}, InputError, "got 6"),
        (IMAGE, "fog", 2.0, {}, InputError, "got 2.0"),
        (IMAGE, "fog", True, {}, InputError, "got True"),
        (IMAGE / 255, "fog", 1, {}, InputError, "dtype float64"),
        (IMAGE[..., 0], "fog", 1, {}, InputError, r"shape \(80, 80\)"),
        (IMAGE[..., :1], "fog", 1, {}, InputError, "gray and RGBA"),
        (np.zeros((80, 80, 4), dtype=np.uint8), "fog", 1, {}, InputError, "gray and RGBA"),
        (IMAGE.transpose(2, 0, 1), "fog", 1, {}, InputError, "channels last"),
        (IMAGE.tolist(), "fog", 1, {}, InputError, "got list"),
        (IMAGE[:7], "fog", 1, {}, InputError, "at least 8 x 8 pixels, got 7 x 80"),
        (IMAGE, "fog", 1, {"settings": "cifr"}, UnknownNameError, "Did you mean 'cifar'"),
        (IMAGE, "fog", 1, {"seed": -1}, InputError, "integer >= 0"),
        (IMAGE, "fog", 1, {"seed": 1.5}, InputError, "seed"),
        (IMAGE, "fog", 1, {"seed": [1, 2]}, InputError, "2 seeds"),
        (IMAGE, "frost", 1, {"frost_folder": "no such folder"}, InputError, "frost1.png"),
    ],
)
def test_bad_input(image, name, severity, options, kind, words):
    with pytest.raises(kind, match=words):
        corrupt(image, name, severity, **({"seed": 0} | options))


# -- slow versions of the quick parts --------------------------------------------------------------


def test_normal_draws():
    x = kernels.draw_normal(rng(), (400, 500)).astype(np.float64)
    assert abs(x.mean()) < 0.01
    assert x.std() == pytest.approx(1, abs=0.01)
    assert (x**4).mean() == pytest.approx(3, abs=0.1)
    assert np.mean(np.abs(x) > 1.96) == pytest.approx(0.05, abs=0.003)


@pytest.mark.parametrize("photons", [3, 12, 60, 500])
def test_alias_tables_hold_the_poisson_law(photons):
    bits, limit, own, other = pixelwise._poisson_tables(photons)
    columns = 1 << bits
    for level in (0, 1, 90, 255):
        row = slice(level * columns, (level + 1) * columns)
        share = limit[row] / float(1 << (32 - bits)) / columns
        law = np.zeros(256)
        np.add.at(law, own[row], share)
        np.add.at(law, other[row], 1 / columns - share)
        wanted = np.zeros(256)
        mass = np.exp(-level * photons / 255)
        left = 1.0
        for count in range(photons):
            wanted[int(count / photons * 255)] += mass
            left -= mass
            mass *= level * photons / 255 / (count + 1)
        wanted[255] += max(left, 0)
        assert np.abs(law - wanted).max() < 1e-6


@pytest.mark.parametrize(("reach", "times"), [(1, 1), (1, 2), (2, 3), (4, 2)])
def test_glass_shuffle_is_the_loop(reach, times):
    h, w = 23, 31
    source, draw = np.arange(h * w), rng(5)
    for _ in range(times):
        step = draw.integers(-reach, reach, size=(2, h - 2 * reach, w - 2 * reach), dtype=np.int8).astype(int)
        for y in range(h - reach, reach, -1):
            for x in range(w - reach, reach, -1):
                dy, dx = step[:, y - reach - 1, x - reach - 1]
                source[y * w + x] = source[(y + dy) * w + x + dx]
    assert (blurs._shuffle((h, w), reach, times, rng(5)) == source).all()


@pytest.mark.parametrize("angle", [-135, -90, -40, 0, 17, 45])
def test_motion_is_a_loop_over_shifts(angle):
    x = rng().random((20, 26, 2)).astype(np.float32)
    weights = np.exp(-0.5 * (np.arange(15) / 4) ** 2)
    weights /= weights.sum()
    wanted = np.zeros_like(x)
    for step, weight in enumerate(weights):
        dy = int(np.ceil(step * np.sin(np.deg2rad(angle)) - 0.5))
        dx = int(np.ceil(step * np.cos(np.deg2rad(angle)) - 0.5))
        rows, columns = np.clip(np.arange(20) + dy, 0, 19), np.clip(np.arange(26) + dx, 0, 25)
        wanted += weight * x[rows][:, columns]
    assert np.abs(kernels.motion(torch.from_numpy(x), 7, 4, angle).numpy() - wanted).max() < 1e-5


def test_distance_is_the_shortest_way():
    """By steps of OpenCV's 5 x 5 mask: along a side, along a diagonal, and a knight's move."""
    mask = rng(2).random((30, 40)) < 0.01
    lengths = {(0, 1): 1.0, (1, 1): 1.4, (1, 2): 2.1969}
    moves = [
        (dy, dx) for dy in range(-2, 3) for dx in range(-2, 3) if tuple(sorted((abs(dy), abs(dx)))) in lengths
    ]
    wanted = np.where(mask, 0.0, np.inf)
    for _ in range(70):
        wide = np.pad(wanted, 2, constant_values=np.inf)
        for dy, dx in moves:
            length = lengths[tuple(sorted((abs(dy), abs(dx))))]
            wanted = np.minimum(wanted, wide[2 + dy : 32 + dy, 2 + dx : 42 + dx] + length)
    assert np.abs(weather.distance(mask, 20) - np.minimum(wanted, 20)).max() < 1e-5
    assert (weather.distance(np.zeros((9, 9), dtype=bool), 20) == 20).all()


def test_distance_is_that_of_opencv():
    cv2 = pytest.importorskip("cv2")
    mask = rng(3).random((120, 90)) < 0.002
    wanted = cv2.distanceTransform(np.where(mask, 0, 255).astype(np.uint8), cv2.DIST_L2, 5)
    assert wanted.max() > 20
    assert np.abs(weather.distance(mask, 20) - np.minimum(wanted, 20)).max() < 1e-3


def test_mean_of_equal_pixels_is_exact():
    """A mean just below a whole gray level would lose it when the fraction is cut off."""
    for level in range(1, 21):
        assert (weather._box3(torch.full((5, 5), float(level))) == level).all()


def test_edges_are_those_of_opencv():
    cv2 = pytest.importorskip("cv2")
    noise = torch.from_numpy(rng(3).normal(0.65, 0.3, (120, 90, 1)).astype(np.float32))
    liquid = kernels.gaussian(noise, 2.0)[..., 0].numpy()
    layer = (np.where(liquid > 0.68, liquid, 0) * 255).astype(np.uint8)
    wanted = cv2.Canny(layer, 50, 150) > 0
    assert wanted.any()
    assert (weather.edges(layer, 50, 150) == wanted).all()


def test_frost_textures_are_fixed_and_used_whole():
    assert (frost.texture(4) == frost.texture.__wrapped__(4)).all()
    layer = frost.frost_layer((900, 300), 1.1, 6, None, rng())
    assert layer.shape == (900, 300, 3)


def test_frost_images_from_a_folder(tmp_path):
    for index, name in enumerate(frost.PUBLISHED):
        Image.fromarray(np.full((100, 120, 3), 40 * index, dtype=np.uint8)).save(tmp_path / name, quality=100)
    black = np.zeros((80, 80, 3), dtype=np.uint8)
    levels = {int(corrupt(black, "frost", 1, seed=k, frost_folder=str(tmp_path))[0, 0, 0]) for k in range(40)}
    assert levels == {0, 16, 32, 48, 64}  # the published code never draws the sixth


def test_imagenet_frost_by_its_published_definition(tmp_path):
    """A part of one of the first five images, at its own size."""
    for index, name in enumerate(frost.PUBLISHED):
        pixels = rng(index).integers(0, 256, size=(100, 120, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / name)
    function, levels = IMAGENET["frost"]
    for seed in range(4):
        draw = rng(seed)
        texture = np.array(Image.open(tmp_path / frost.PUBLISHED[draw.integers(5)]))
        top, left = draw.integers(100 - 80), draw.integers(120 - 80)
        wanted = 0.7 * IMAGE + 0.7 * texture[top : top + 80, left : left + 80]
        made = function(IMAGE, *levels[2], str(tmp_path), rng(seed))
        assert np.abs(made.astype(int) - np.clip(wanted, 0, 255).astype(np.uint8)).max() <= 1


def test_frost_of_small_images_samples_the_texture_without_smoothing(tmp_path):
    """CIFAR-10-C: cv2.resize by 0.2, whose linear taps fall on every fifth pixel."""
    for index, name in enumerate(frost.PUBLISHED):
        pixels = rng(index).integers(0, 256, size=(203, 318, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / name)
    function, levels = CIFAR["frost"]
    for seed in range(4):
        draw = rng(seed)
        texture = np.array(Image.open(tmp_path / frost.PUBLISHED[draw.integers(5)]))[2::5, 2::5]
        assert texture.shape[:2] == (41, 64)  # 40.6 x 63.6, rounded
        top, left = draw.integers(41 - 32), draw.integers(64 - 32)
        wanted = 0.9 * SMALL + 0.4 * texture[top : top + 32, left : left + 32]
        made = function(SMALL, *levels[2], str(tmp_path), rng(seed))
        assert np.abs(made.astype(int) - np.clip(wanted, 0, 255).astype(np.uint8)).max() <= 1


@pytest.mark.parametrize("scale", [0.2, 0.3, 0.2 / 1.1, 0.3 / 1.1])
def test_linear_resize_is_opencv_s(scale):
    cv2 = pytest.importorskip("cv2")
    for size in ((400, 600), (315, 560), (123, 77)):
        image = rng(size[0]).integers(0, 256, size=(*size, 3), dtype=np.uint8)
        assert (frost._linear_resize(image, scale) == cv2.resize(image, (0, 0), fx=scale, fy=scale)).all()


@pytest.mark.parametrize("severity", [1, 3, 4])
def test_imagenet_snow_by_its_published_definition(severity):
    """Also of a size where the enlarged layer is several pixels too big: it is cut on all sides."""
    zoom = pytest.importorskip("scipy.ndimage").zoom
    size = 82
    image = sample_image(size, seed=3)
    mean, scale, factor, least, radius, sigma, keep = IMAGENET["snow"][1][severity - 1]
    draw = rng(6)
    noise = kernels.draw_normal(draw, (size, size)).astype(np.float64) * scale + mean
    part = int(np.ceil(size / factor))
    first = (size - part) // 2
    large = zoom(noise[first : first + part, first : first + part], factor, order=1)
    trim = (len(large) - size) // 2
    layer = large[trim : trim + size, trim : trim + size].copy()
    layer[layer < least] = 0
    flakes = (np.clip(layer, 0, 1) * 255).astype(np.uint8).astype(np.float32)[..., None]
    fallen = kernels.motion(torch.from_numpy(flakes), radius, sigma, draw.uniform(-135, -45)).numpy() // 1
    gray = (image @ np.array(weather.GRAY))[..., None] * 1.5 + 127.5
    wanted = keep * image + (1 - keep) * np.maximum(image, gray) + fallen + fallen[::-1, ::-1]
    function, levels = IMAGENET["snow"]
    made = function(image, *levels[severity - 1], rng(6))
    off = np.abs(made.astype(int) - np.clip(wanted, 0, 255).astype(np.uint8))
    assert off.max() <= 2
    assert off.mean() < 0.02


def test_pixelate_enlarges_by_a_box():
    """Four gray levels on 10 pixels: nearest and box differ where an edge is in the middle of a new pixel."""
    row = np.repeat(np.array([0, 50, 100, 150], np.uint8), (3, 2, 3, 2))
    image = np.ascontiguousarray(np.broadcast_to(row[None, :, None], (10, 10, 3)))
    made = corrupt(image, "pixelate", 3, seed=0, settings="imagenet")
    assert made[0, :, 0].tolist() == [0, 0, 50, 50, 50, 100, 100, 150, 150, 150]


def test_tiny_imagenet_by_its_script():
    filters = pytest.importorskip("skimage.filters")
    image = sample_image(64, seed=5)
    for severity, (sigma, share) in enumerate(
        ((0.5, 57), (0.75, 51), (1, 44), (1.25, 38), (1.5, 32)), start=1
    ):
        wanted = filters.gaussian(image / 255.0, sigma=sigma, channel_axis=-1) * 255
        made = corrupt(image, "gaussian_blur", severity, seed=0).astype(int)
        assert np.abs(made - wanted.astype(np.uint8)).max() <= 1
        small = Image.fromarray(image).resize((share, share), Image.Resampling.BOX)
        wanted = np.array(small.resize((64, 64), Image.Resampling.BOX))
        assert (corrupt(image, "pixelate", severity, seed=0) == wanted).all()


# -- the script for CIFAR-10-C, line by line -------------------------------------------------------


@pytest.mark.parametrize("severity", [1, 2, 3, 4, 5])
def test_cifar_blurs_by_their_definition(severity):
    cv2, ndimage, filters = (pytest.importorskip(m) for m in ("cv2", "scipy.ndimage", "skimage.filters"))
    x = SMALL / 255.0

    def close(name: str, wanted: np.ndarray) -> bool:
        made = corrupt(SMALL, name, severity, seed=0).astype(int)
        return np.abs(made - (np.clip(wanted, 0, 1) * 255).astype(np.uint8)).max() <= 1

    sigma = (0.4, 0.6, 0.7, 0.8, 1)[severity - 1]
    assert close("gaussian_blur", filters.gaussian(x, sigma=sigma, channel_axis=-1))

    radius, alias = ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1))[severity - 1]
    axis = np.arange(-8, 9)
    disk = (axis[:, None] ** 2 + axis**2 <= radius**2).astype(np.float32)
    kernel = cv2.GaussianBlur(disk / disk.sum(), ksize=(3, 3), sigmaX=alias)
    assert close("defocus_blur", cv2.filter2D(x, -1, kernel))

    factors = np.arange(1, (1.06, 1.11, 1.16, 1.21, 1.26)[severity - 1], 0.01)
    total = x.copy()
    for factor in factors:
        part = int(np.ceil(32 / factor))
        top = (32 - part) // 2
        large = ndimage.zoom(x[top : top + part, top : top + part], (factor, factor, 1), order=1)
        trim = (large.shape[0] - 32) // 2
        total += large[trim : trim + 32, trim : trim + 32]
    assert close("zoom_blur", total / (len(factors) + 1))


def test_cifar_elastic_by_its_definition():
    cv2 = pytest.importorskip("cv2")
    assert np.abs(blurs.elastic_affine(SMALL, 0, 0, 0, rng()).astype(int) - SMALL).max() <= 1
    old = np.float32([[26, 26], [26, 6], [6, 6]])
    new = old + rng(4).uniform(-0.06 * 32, 0.06 * 32, size=(3, 2)).astype(np.float32)
    map_ = cv2.getAffineTransform(old, new)
    wanted = cv2.warpAffine(SMALL.astype(np.float32), map_, (32, 32), borderMode=cv2.BORDER_REFLECT_101)
    off = np.abs(blurs.elastic_affine(SMALL, 0, 0, 0.06, rng(4)) - wanted)
    assert off.mean() < 1.5  # OpenCV rounds places to 1/32 pixel
    assert np.percentile(off, 98) < 6


# -- the reference package -------------------------------------------------------------------------

FULL = sample_image(224, seed=8)


def reference():
    return pytest.importorskip("imagecorruptions")


@pytest.mark.parametrize("severity", tiered([1, 2, 3, 4, 5], [1, 5]))
@pytest.mark.parametrize("name", FIXED)
def test_fixed_corruptions_agree_within_one_gray_level(name, severity):
    theirs = reference().corrupt(FULL, severity, name).astype(int)
    assert np.abs(corrupt(FULL, name, severity, seed=0) - theirs).max() <= 1
    gray = np.repeat(
        FULL[:96, :128, :1], 3, axis=2
    )  # gray pixels have no hue; and an image that is not square
    theirs = reference().corrupt(gray, severity, name).astype(int)
    assert np.abs(corrupt(gray, name, severity, seed=0) - theirs).max() <= 1


def statistics(image: np.ndarray) -> tuple[float, float, float]:
    from skimage.metrics import structural_similarity

    return (
        float(image.mean()),
        float(image.astype(float).var()),
        float(structural_similarity(FULL, image, channel_axis=2)),
    )


@pytest.mark.parametrize("severity", tiered([1, 2, 3, 4, 5], [5]))
@pytest.mark.parametrize(
    "name", [name for name in RANDOM if name not in ("elastic_transform", "frost")]
)  # those two are defined otherwise there
def test_random_corruptions_agree_within_the_reference_spread(name, severity):
    """Over several seeds our images lie in the reference's range, and the means differ only by chance."""
    count = 16
    np.random.seed(severity)  # noqa: NPY002 (the reference draws from the global state, but for two)
    seeded = name in ("impulse_noise", "glass_blur")
    theirs = np.array(
        [
            statistics(reference().corrupt(FULL, severity, name, **({"seed": k} if seeded else {})))
            for k in range(count)
        ]
    )
    ours = np.array([statistics(corrupt(FULL, name, severity, seed=k)) for k in range(count)])
    floor = np.array([0.02, 0.001 * theirs[:, 1].mean(), 0.001])  # below this no one sees a difference
    spread = np.maximum(np.sqrt((theirs.var(0, ddof=1) + ours.var(0, ddof=1)) / 2), floor)
    allowed = 5 * np.sqrt(
        2 / count
    )  # |t| < 5 at 30 degrees of freedom: one false alarm in 250 runs of all 165 comparisons
    assert (np.abs(ours.mean(0) - theirs.mean(0)) < allowed * spread).all()
    assert (np.abs(ours - theirs.mean(0)) < 6 * np.maximum(theirs.std(0, ddof=1), floor)).all()


@pytest.mark.parametrize("severity", tiered([1, 2, 3, 4, 5], [3]))
def test_imagenet_elastic_by_its_published_definition(severity):
    """The code of Hendrycks & Dietterich with the same random numbers: affine map, then displacement."""
    published = {
        1: (488, 170.8, 24.4),
        2: (488, 19.52, 48.8),
        3: (12.2, 2.44, 4.88),
        4: (17.08, 2.44, 4.88),
        5: (29.28, 2.44, 4.88),
    }
    alpha, sigma, corner = published[severity]
    image, size = sample_image(224, seed=9), 224
    draw = rng(5)
    center, reach = np.array([size // 2, size // 2], dtype=np.float64), size // 3
    old = np.array([center + reach, [center[0] + reach, center[1] - reach], center - reach])
    new = old + draw.uniform(-corner, corner, size=(3, 2))
    matrix = np.linalg.solve(np.column_stack((new, np.ones(3))), old)
    y, x = np.mgrid[:size, :size].astype(np.float64)
    back = np.stack((x, y, np.ones_like(x)), axis=-1) @ matrix
    field = draw.random((size, size, 2), dtype=np.float32).astype(np.float64) * 2 - 1
    dx, dy = (
        alpha * gaussian_filter(field[..., axis], sigma, mode="reflect", truncate=3.0) for axis in range(2)
    )
    wanted = np.empty_like(image)
    for channel in range(3):
        plane = image[..., channel] / 255
        moved = map_coordinates(plane, [back[..., 1], back[..., 0]], order=1, mode="mirror")
        moved = map_coordinates(moved, [y + dy, x + dx], order=1, mode="reflect")
        wanted[..., channel] = np.clip(255 * moved, 0, 255)
    made = blurs.elastic_affine(image, alpha / size, sigma / size, corner / size, rng(5))
    assert np.abs(made.astype(int) - wanted).mean() < 0.7
    function, levels = IMAGENET["elastic_transform"]
    assert function is blurs.elastic_affine
    assert np.allclose(np.array(levels[severity - 1]) * size, published[severity])
