import numpy as np

from ghostexport.serving.generation import Sampling, generate


class Counter:
    """A session whose most likely next token is the last one plus one; the cache is the number of tokens seen."""

    def new_cache(self, batch, length=0):
        return length

    def forward(self, input_ids, cache, attention_mask=None):
        logits = np.zeros((*input_ids.shape, 10), np.float32)
        np.put_along_axis(logits, ((input_ids + 1) % 10)[..., None], 3.0, axis=-1)
        return logits, cache + input_ids.shape[1]


def test_greedy_takes_the_most_likely_token_of_each_sequence():
    assert generate(Counter(), np.array([[1, 2], [4, 5]]), 3).tolist() == [[3, 4, 5], [6, 7, 8]]


def test_a_sequence_that_ended_repeats_its_end_and_all_ended_stops():
    assert generate(Counter(), np.array([[2], [5]]), 9, eos_token_id=7).tolist() == [[3, 4, 5, 6, 7], [6, 7, 7, 7, 7]]


def test_sampling_follows_the_softmax_and_the_seed():
    prompt = np.full((4000, 1), 2)
    drawn = generate(Counter(), prompt, 1, Sampling(temperature=1.0, seed=1))
    # softmax of one 3 and nine 0
    assert abs((drawn == 3).mean() - np.exp(3) / (np.exp(3) + 9)) < 0.03
    assert np.array_equal(drawn, generate(Counter(), prompt, 1, Sampling(temperature=1.0, seed=1)))
    assert not np.array_equal(drawn, generate(Counter(), prompt, 1, Sampling(temperature=1.0, seed=2)))


def test_no_new_token_is_an_empty_answer():
    assert generate(Counter(), np.array([[1, 2]]), 0).shape == (1, 0)
