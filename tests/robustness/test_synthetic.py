"""Synthetic images: where the object is, how large, how turned, by measuring what was made."""

import numpy as np
import pytest

from steadygaze.errors import InputError, UnknownNameError
from steadygaze.robustness.synthetic import (
    FACTORS,
    cut_out,
    place,
    remove_background,
    square,
    swap_background,
    vary,
)

GREEN = np.full((50, 70, 3), (0, 160, 0), dtype=np.uint8)
BLUE = np.full((64, 64, 3), (0, 0, 200), dtype=np.uint8)


def scene() -> tuple[np.ndarray, np.ndarray]:
    """A red bar, 30 wide and 10 high, on gray, with its mask."""
    image, mask = np.full((60, 80, 3), 90, dtype=np.uint8), np.zeros((60, 80), dtype=np.uint8)
    image[20:30, 15:45] = (255, 0, 0)
    mask[20:30, 15:45] = 255
    return image, mask


def reds(pixels: np.ndarray) -> np.ndarray:
    """Weights: how red each pixel is, 0..1."""
    return pixels[..., 0].astype(float) / 255


def center(pixels: np.ndarray) -> tuple[float, float]:
    weight = reds(pixels)
    rows, columns = np.indices(weight.shape) + 0.5
    height, width = weight.shape
    return (columns * weight).sum() / weight.sum() / width, (rows * weight).sum() / weight.sum() / height


def angle(pixels: np.ndarray) -> float:
    """Direction of the long axis, degrees counterclockwise, modulo 180."""
    weight = reds(pixels)
    rows, columns = np.indices(weight.shape)
    points = np.stack(
        [columns - np.average(columns, weights=weight), -(rows - np.average(rows, weights=weight))]
    )
    _, vectors = np.linalg.eigh((points.reshape(2, -1) * weight.ravel()) @ points.reshape(2, -1).T)
    return float(np.degrees(np.arctan2(vectors[1, 1], vectors[0, 1])) % 180)


def test_cut_out_is_the_box_of_the_object() -> None:
    image, mask = scene()
    cut = cut_out(image, mask)
    assert cut.shape == (10, 30, 4) and (cut == (255, 0, 0, 255)).all()
    mask[19, 15:45] = 128
    assert cut_out(image, mask).shape == (11, 30, 4) and (cut_out(image, mask)[0, :, 3] == 128).all()


def test_a_border_fades_from_the_object_to_the_background() -> None:
    mask = np.zeros((9, 20), dtype=np.uint8)
    mask[:, 6:15] = 128
    mask[:, 9:12] = 255
    mask[:, 19] = 128  # at the edge of the image, beside background only
    opacity = cut_out(np.zeros((9, 20, 3), dtype=np.uint8), mask)[4, :, 3]
    assert opacity.tolist() == [64, 128, 191, 255, 255, 255, 191, 128, 64]
    mask[:, :6] = 128  # no background is left on that side
    assert (cut_out(np.zeros((9, 20, 3), dtype=np.uint8), mask)[:, :9, 3] == 255).all()


def test_locations_are_where_they_were_asked_for_and_nothing_else_changes() -> None:
    made = vary(*scene(), [BLUE], "location", seed=0, area=0.01, side=200)
    assert [m.value for m in made] == list(FACTORS["location"]) and len(made) == 25
    for m in made:
        assert center(m.pixels) == pytest.approx((m.x, m.y), abs=0.01)
        assert reds(m.pixels).sum() == pytest.approx(0.01 * 200 * 200, rel=0.05)
        assert (
            m.inside == 1 and m.pixels.shape == (200, 200, 3) and angle(m.pixels) == pytest.approx(0, abs=0.5)
        )
        assert (m.pixels[reds(m.pixels) == 0] == (0, 0, 200)).all()


def test_rotations_turn_the_object_counterclockwise_in_its_place() -> None:
    made = vary(*scene(), [BLUE], "rotation", seed=0)
    assert [m.value for m in made] == list(range(1, 342, 20))
    for m in made:
        off = (angle(m.pixels) - m.rotation) % 180
        assert min(off, 180 - off) < 1.0
        assert center(m.pixels) == pytest.approx((0.5, 0.5), abs=0.01)
        assert reds(m.pixels).sum() == pytest.approx(0.2 * 224 * 224, rel=0.03)


def test_sizes_are_shares_of_the_image() -> None:
    values = (0.05, 0.1, 0.3)
    for m in vary(*scene(), [GREEN, BLUE], "size", seed=1, values=values):
        assert (
            reds(m.pixels).sum() / 224**2 == pytest.approx(m.area, rel=0.05)
            and m.rotation == 0
            and m.value in values
        )


def test_what_leaves_the_image_is_cut_off_and_said() -> None:
    image, mask = scene()
    pixels, inside = place(cut_out(image, mask), square(BLUE, 100), x=0.0, y=0.5, area=0.2)
    assert inside == pytest.approx(0.5, abs=0.02) and reds(pixels).sum() == pytest.approx(
        0.1 * 100 * 100, rel=0.05
    )


def test_the_background_is_drawn_by_seed_and_index() -> None:
    image, mask = scene()
    shades = [np.full((8, 8, 3), (0, 0, shade), dtype=np.uint8) for shade in range(40)]
    drawn = [
        vary(image, mask, shades, "size", seed=s, index=i, values=(0.1,))[0]
        for s in range(3)
        for i in range(10)
    ]
    again = [
        vary(image, mask, shades, "size", seed=s, index=i, values=(0.1,))[0]
        for s in range(3)
        for i in range(10)
    ]
    assert all(np.array_equal(a.pixels, b.pixels) for a, b in zip(drawn, again, strict=True))
    assert len({m.background for m in drawn}) > 10 and all(m.pixels[0, 0, 2] == m.background for m in drawn)


def test_swap_and_removal_keep_the_object_where_it_is() -> None:
    image, mask = scene()
    mask[30, 15:45] = 128
    for made, color in (
        (swap_background(image, mask, BLUE), (0, 0, 200)),
        (remove_background(image, mask, color=(9, 8, 7)), (9, 8, 7)),
    ):
        assert np.array_equal(made[mask == 255], image[mask == 255]) and (made[mask == 0] == color).all()
        half = 128 / 255 * image[30, 20].astype(float) + 127 / 255 * np.array(color)
        assert np.abs(made[30, 20] - half).max() <= 0.5
    assert (remove_background(image, mask)[0, 0] == 128).all()


def test_a_background_keeps_its_proportions() -> None:
    stripes = np.zeros((40, 100, 3), dtype=np.uint8)
    stripes[:, 45:55] = 255
    made = square(stripes, 80)
    assert made.shape == (80, 80, 3) and made[40, :, 0].astype(float).sum() / 255 == pytest.approx(20, abs=1)


def test_bad_input() -> None:
    image, mask = scene()
    with pytest.raises(UnknownNameError, match="rotation"):
        vary(image, mask, [BLUE], "rotatoin", seed=0)
    with pytest.raises(InputError, match="got none"):
        vary(image, mask, [], "size", seed=0)
    with pytest.raises(InputError, match="no pixel is marked"):
        vary(image, np.zeros_like(mask), [BLUE], "size", seed=0)
    with pytest.raises(InputError, match="one value for each pixel"):
        cut_out(image, mask.T)
    with pytest.raises(InputError, match="255"):
        cut_out(image, mask // 2)
    with pytest.raises(InputError, match="uint8 array"):
        remove_background(image / 255, mask)
    with pytest.raises(InputError, match=r"0\.\.1"):
        place(cut_out(image, mask), BLUE, x=112, y=112)
    with pytest.raises(InputError, match="area"):
        place(cut_out(image, mask), BLUE, area=0)
    with pytest.raises(InputError, match="seed"):
        vary(image, mask, [BLUE], "size", seed=-1)
    with pytest.raises(InputError, match="three numbers"):
        remove_background(image, mask, color=(300, 0, 0))
