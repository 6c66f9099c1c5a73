"""What a resume says of arithmetic that differs from that of the checkpoint."""

from lib.train.run_state import _differences


def test_a_checkpoint_that_lacks_a_choice_is_told_of_and_does_not_fail():
    saved = {"runtime.attention": "sdpa"}
    now = {"runtime.attention": "sdpa", "runtime.kernels": "fused"}
    assert _differences(saved, now) == ["runtime.kernels was not recorded, is fused"]
    assert _differences(now, now) == []
