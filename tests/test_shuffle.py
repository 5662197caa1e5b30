import numpy as np

from flowdflash.runtime.order_metrics import equal_neighbours
from flowdflash.stage import History
from flowdflash.stages.shuffle import Shuffle
from flowdflash.testing import assert_interleaver_contract, make_batches


def test_keeps_the_contract_of_an_interleaver():
    assert_interleaver_contract(Shuffle)


def test_neighbours_are_equal_as_often_as_chance_has_it():
    batches = make_batches(np.repeat([0, 1], [1000, 3000]))
    order = Shuffle(Shuffle.Config()).order(batches, History(), np.random.default_rng(0))
    assert abs(equal_neighbours(batches.bucket[order]) - (0.25**2 + 0.75**2)) < 0.03
