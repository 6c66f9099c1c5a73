"""Generated text: greedy against argmax by hand, draws that depend on a text's number alone."""

from dataclasses import replace

import pytest
import torch

from lib.evaluate.generate import Sampling, continue_prompt, next_tokens, parses_as_python
from lib.model.loss import SampleRules
from tests.evaluate.test_perplexity import manifest, model  # noqa: F401

SAMPLING = Sampling(max_new_tokens=8, temperature=1.0, top_k=None, seed=3, max_context=16, eod_id=0)


def ignore(_finished):
    return None


def test_greedy_takes_the_likeliest_token_each_time(model):  # noqa: F811
    tokens = [5, 17, 250]
    for _ in range(8):
        with torch.no_grad():
            logits = model(torch.tensor(tokens)[:, None])[-1, 0, :300]
        tokens.append(int(logits.argmax()))
    greedy = replace(SAMPLING, temperature=0.0)
    one_best = replace(SAMPLING, top_k=1)
    for sampling in (greedy, one_best):
        (found,) = continue_prompt(model, [5, 17, 250], [0], sampling, ignore)
        assert (found.tokens, found.ended) == (tokens[3:], False)


def test_a_text_depends_on_its_number_alone(model):  # noqa: F811
    together = continue_prompt(model, [5, 17], range(4), SAMPLING, ignore)
    alone = [continue_prompt(model, [5, 17], [number], SAMPLING, ignore)[0] for number in range(4)]
    assert together == alone
    assert len({tuple(text.tokens) for text in together}) == 4
    other_seed = continue_prompt(model, [5, 17], range(4), replace(SAMPLING, seed=4), ignore)
    assert other_seed != together


def test_the_context_is_cut_to_the_latest_tokens(model):  # noqa: F811
    greedy = replace(SAMPLING, temperature=0.0, max_new_tokens=1)
    prompt = list(range(1, 41))
    assert continue_prompt(model, prompt, [0], greedy, ignore) == continue_prompt(
        model, prompt[-16:], [0], greedy, ignore
    )


def test_a_text_begins_anew_after_the_end_of_a_document(model):  # noqa: F811
    """With the rules of a model that never looked beyond its document."""
    rules = SampleRules(reset_positions=True, within_documents=True)
    alone = replace(SAMPLING, temperature=0.0, rules=rules)
    after = [continue_prompt(model, [7, *prompt], [0], alone, ignore) for prompt in ([0, 5], [5])]
    plain = replace(SAMPLING, temperature=0.0)
    without = continue_prompt(model, [5], [0], plain, ignore)
    assert after[0] == without != after[1]


class Countdown(torch.nn.Module):
    """Says token n - 1 after token n, and so comes to 0."""

    vocab_size = 10

    def __init__(self):
        super().__init__()
        self.unused = torch.nn.Parameter(torch.zeros(()))

    def forward(self, tokens_SB, layout=None):
        return torch.nn.functional.one_hot((tokens_SB - 1) % 10, 16).float() * 1e4


def test_a_text_ends_at_the_end_of_document_and_others_go_on():
    finished = []
    (text,) = continue_prompt(Countdown(), [9, 4], [0], SAMPLING, finished.append)
    assert (text.tokens, text.ended) == ([3, 2, 1], True)
    assert sum(finished) == 4
    three = replace(SAMPLING, max_new_tokens=3)
    (text,) = continue_prompt(Countdown(), [9, 4], [0], three, ignore)
    assert (text.tokens, text.ended) == ([3, 2, 1], False)


def test_padding_is_never_drawn():
    class Padded(Countdown):
        def forward(self, tokens_SB, layout=None):
            logits = super().forward(tokens_SB)
            logits[..., 10:] = 1e9
            return logits

    (text,) = continue_prompt(Padded(), [3], [0], SAMPLING, ignore)
    assert text.tokens == [2, 1]


def test_draws_follow_the_distribution():
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    generator = torch.Generator().manual_seed(0)
    sampling = replace(SAMPLING, temperature=0.5, top_k=3)
    count = 4000
    draws = torch.cat([next_tokens(logits, sampling, [generator]) for _ in range(count)])
    shares = torch.bincount(draws, minlength=4) / count
    expected = (logits[0, :3] / 0.5).softmax(0)
    assert shares[3] == 0
    assert torch.allclose(shares[:3], expected, atol=4 * 0.5 / count**0.5)


@pytest.mark.parametrize(
    ("text", "cut_off", "whole"),
    [
        ("def f(x):\n    return x\n\nx = f(", True, False),
        ("def f(x):\n    return (x\n\nx = 1\ny", False, False),
        ("import os\nimport", True, False),
        ("import os\nimport sys", True, True),
        ("import os", True, True),
        ("import", False, False),
        ("a b c\n", False, False),
        ("x = '\x00'\n", False, False),
        ("", True, True),
    ],
)
def test_only_a_text_that_was_cut_off_is_judged_without_its_last_line(text, cut_off, whole):
    assert parses_as_python(text, ended=False) == cut_off
    assert parses_as_python(text, ended=True) == whole


@pytest.mark.filterwarnings("error")
def test_warnings_of_generated_code_are_silent():
    assert parses_as_python("x = 1 is 1\ny = '\\d'\nassert (x, 'y')\n", ended=True)
