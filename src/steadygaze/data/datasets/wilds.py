"""metadata.csv of Waterbirds and of image data sets of WILDS, as a table with the columns of an index.csv.

| data | image | label | split that is read |
| --- | --- | --- | --- |
| Waterbirds | `img_filename` | `y` | `split` is 2 |
| iWildCam | `train/` and `filename` | `y` | `split` is test |
| Camelyon17 | patches/, by `patient`, `node`, `x_coord`, `y_coord` | `tumor` | `center` is 2 |
| others | `image`, `file_name` (Hugging Face) | as in index.csv, or `y` | test, if there is a split |

Waterbirds: S. Sagawa et al., ICLR 2020, arXiv:1911.08731. WILDS: P. W. Koh et al., ICML 2021,
arXiv:2012.07421. Every other column stays and can define groups.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from steadygaze.data.folders import IMAGE, LABEL_COLUMNS, read_table
from steadygaze.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

METADATA = "metadata.csv"
IMAGES = (IMAGE, "img_filename", "filename", "file_name")  # columns of paths
TEST = ("2", "test")  # values of `split` that are the test images
TEST_CENTER = "2"  # of Camelyon17, whose column `split` divides the other hospitals
CAMELYON17 = ("patient", "node", "x_coord", "y_coord", "tumor", "center")


def lists_images(file: Path) -> bool:
    """Whether a metadata.csv names an image and a class in each row."""
    if not file.is_file():
        return False
    columns = set(read_table(file, rows=0).columns)
    labeled = columns & {*LABEL_COLUMNS, "y"} and columns & set(IMAGES)
    return bool(labeled) or set(CAMELYON17) <= columns


def read_metadata(file: Path) -> pd.DataFrame:
    """The test images that a metadata.csv lists; all of them if it has no column split."""
    table = read_table(file)
    if set(CAMELYON17) <= set(table.columns):
        return _camelyon17(table[table["center"] == TEST_CENTER])
    if "split" in table:
        test = table[table["split"].isin(TEST)]
        if test.empty:
            splits = ", ".join(sorted(set(table["split"]))[:8])
            raise InputError(
                f"{file}: expected test images, with split 2 or test, got the splits {splits}. "
                "Write the images of another split to an index.csv."
            )
        table = test
    column = next((name for name in IMAGES if name in table), None)
    if column is None:
        columns = ", ".join(table.columns) or "nothing"
        raise InputError(f"{file}: expected one of the columns {', '.join(IMAGES)}, got {columns}")
    images = table[column]
    if column == "filename" and (file.parent / "train").is_dir():  # iWildCam keeps all images there
        images = "train/" + images
    return _with(table, images, None if any(name in table for name in LABEL_COLUMNS) else "y")


def _camelyon17(table: pd.DataFrame) -> pd.DataFrame:
    node = table["patient"] + "_node_" + table["node"]
    place = "_x_" + table["x_coord"] + "_y_" + table["y_coord"] + ".png"
    return _with(table, "patches/patient_" + node + "/patch_patient_" + node + place, "tumor")


def _with(table: pd.DataFrame, images: pd.Series[str], label: str | None) -> pd.DataFrame:
    """The table with a column of images, and one of labels if another column has them."""
    labels = {"label": table[label]} if label in table else {}
    return table.assign(**{IMAGE: images}, **labels)
