from steadygaze.data.dataset_tree import abbreviated as some
from steadygaze.data.dataset_tree import check_complete as complete
from steadygaze.data.dataset_tree import check_count as complete_count
from steadygaze.data.dataset_tree import image_files as pictures
from steadygaze.data.dataset_tree import require_folder as folder
from steadygaze.data.dataset_tree import subfolders as folders_in
from steadygaze.data.image_sets import SETS, cifar100, inaturalist_mini, pneumonia, two_folders
from steadygaze.data.image_sets import ImagePart as Pictures
from steadygaze.data.image_sets import ImageSet as PictureSet
from steadygaze.data.image_sets import read_image_set as picture_set
from steadygaze.data.imagenet import imagenet_names, imagenet_synsets

__all__ = [
    "SETS",
    "PictureSet",
    "Pictures",
    "cifar100",
    "complete",
    "complete_count",
    "folder",
    "folders_in",
    "imagenet_names",
    "imagenet_synsets",
    "inaturalist_mini",
    "picture_set",
    "pictures",
    "pneumonia",
    "some",
    "two_folders",
]
