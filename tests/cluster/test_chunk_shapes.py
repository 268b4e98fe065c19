"""Fixed shapes (--chunk-shapes) on a running cluster. Tests that every step has one of the declared numbers of tokens,
and that tokens and logprobs equal those of a cluster without fixed shapes, with and without a cached prefix."""

import pytest
from padding import check_padded


@pytest.mark.parametrize("ranks", (1, 2))
@pytest.mark.parametrize("model", ("qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe"))
def test_padded_steps_change_no_digit(start, tmp_path, model, ranks):
    check_padded(start, tmp_path, model, ranks)
