"""Which names are suggested for an unknown one."""

import pytest
import timm
from timm.data import ImageNetInfo

from steadygaze.errors import UnknownNameError, suggestions
from steadygaze.loading.build import build_model
from steadygaze.loading.load import list_models
from steadygaze.loading.loaded import ModelOptions


def imagenet_names() -> list[str]:
    info = ImageNetInfo()
    classes = [info.index_to_description(index) for index in range(1000)]
    return [part.strip() for text in classes for part in text.split(",")]


@pytest.mark.parametrize("word", ["dog", "cat", "fish"])
def test_class_names_that_contain_the_word(word):
    near = suggestions(word, imagenet_names())
    assert len(near) > 1 and all(word in name for name in near)
    assert word in near[0].replace("-", " ").split(), "as a word of its own first"


@pytest.mark.parametrize("written", ["deit-tiny", "deit_tiny", "DeiT-Tiny"])
def test_hyphens_underscores_and_case_do_not_count(written):
    near = suggestions(written, timm.list_models())
    assert near[0] == "deit_tiny_patch16_224" and "rdnet_tiny" not in near


def test_the_whole_name_in_another_spelling_is_the_only_suggestion():
    assert suggestions("Tabby-Cat", ["tabby_cat", "tabby cat house"]) == ["tabby_cat"]


@pytest.mark.parametrize(("written", "expected"), [("gazze", ["gaze"]), ("ga", ["gae"]), ("xyzxyz", [])])
def test_otherwise_the_nearest_spelling(written, expected):
    assert suggestions(written, ["gae", "gaze", "regard"]) == expected


def test_names_of_other_packages_lead_to_ours():
    assert suggestions("Saliency", ["vanilla_grad"], {"saliency": "vanilla_grad"}) == ["vanilla_grad"]


def test_an_error_lists_several():
    with pytest.raises(UnknownNameError, match=r"Did you mean 'pug dog' or 'dogsled'\?"):
        raise UnknownNameError("class", "dog", ["dough", "dogsled", "pug dog"])


def test_errors_about_models_use_the_same_suggestions():
    with pytest.raises(UnknownNameError, match="Did you mean 'deit_tiny_patch16_224' or"):
        build_model("deit-tiny", ModelOptions())
    with pytest.raises(ValueError, match="did you mean 'deit_tiny_patch16_224' or"):
        build_model("deit-tiny", ModelOptions(new_head=True))


def test_the_list_of_models_reads_hyphens_as_underscores():
    assert list_models("deit-tiny") == list_models("deit_tiny") != []
