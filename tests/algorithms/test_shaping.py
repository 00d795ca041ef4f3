import pytest
import torch

from rlrefit.recipes.algorithms.shaping import overlong_penalty


def test_the_overlong_penalty_grows_linearly_over_the_buffer():
    # max_length 10, buffer 4: free up to 6, then (6 - length) / 4, and -1 from 10 on.
    lengths = torch.tensor([0, 5, 6, 7, 8, 9, 10, 11, 500])
    got = overlong_penalty(lengths, max_length=10, buffer=4)
    assert got.tolist() == [0.0, 0.0, 0.0, -0.25, -0.5, -0.75, -1.0, -1.0, -1.0]
    assert got.dtype == torch.float32


def test_a_buffer_of_the_whole_length_punishes_from_the_first_token():
    assert overlong_penalty(torch.tensor([0, 1, 4]), 4, 4).tolist() == [0.0, -0.25, -1.0]


@pytest.mark.parametrize("buffer", [0, -1, 11])
def test_a_buffer_that_does_not_fit_is_refused(buffer):
    with pytest.raises(ValueError, match="1 <= buffer <= max_length"):
        overlong_penalty(torch.tensor([1]), 10, buffer)
