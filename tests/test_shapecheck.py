"""The checks of shapes under which the other tests run are at work."""

import pytest
import torch
from jaxtyping import TypeCheckError

from steadygaze.faithfulness import agreement


def test_an_array_of_another_shape_is_refused() -> None:
    assert agreement(torch.rand(2, 3, 4, 4)).shape == (2, 2)
    with pytest.raises(TypeCheckError, match="maps"):
        agreement(torch.rand(3, 4, 4))
