"""The simulator in tests: how one is made, and which of the tests of every backend run on it.

All of them do, but for those listed here, which take longer than about 5 s there. Two that take longer run all the
same, since they are what the simulator is for: the golden of training (24 s) and bfloat16 against Hugging Face (6 s).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.hostcuda.build import cache_folder

if TYPE_CHECKING:
    from cupyllm.backend.sim import SimBackend

KERNELS = cache_folder() / "simulator"
# Test function -> (part of the parameters' id, "" for all; why). Seconds are those of one core of a 2-core machine.
LEFT_OUT: dict[str, tuple[tuple[str, str], ...]] = {
    "test_logits_loss_hidden_states_and_every_gradient": (("h3", "80 s: 64 layers"),),
    "test_bfloat16_errs_no_more_than_hugging_face": (("bf16_deep", "60 s: 64 layers"),),
    "test_greedy_ids": (("", "9 s: a pass over the whole prompt for each token"),),
    "test_greedy_ids_of_the_goldens": (("h3", "100 s: 64 layers"), ("h4", "6 s")),
    "test_streamed_is_resident_and_repeats_bit_for_bit": (("", "7 s; tests/cli/test_sim.py compares the two modes"),),
    "test_head_in_row_chunks": (("", "7 s"),),
    "test_shapes_in_turn": (("", "17 s: a dozen shapes"),),
    "test_device_and_reference_take_the_same_steps": (("", "10 s; test_training_golden takes steps there"),),
    "test_bfloat16_streams_rounded_masters": (("", "10 s"),),
    "test_generation_over_the_cache_is_contiguous_attention": (("0", "5 s"), ("2", "6 s; 1 and 3 run")),
    "test_on_a_device": (("", "7 to 13 s; tests/cli/test_sim.py generates and chats there"),),
    "test_a_read_that_fails_once_changes_no_answer": (("", "11 s, and no kernel is new"),),
    "test_D1_prompts_of_different_lengths_equal_each_alone": (("", "6 s"),),
    "test_D6_neighbours_change_no_token": (("", "minutes: hundreds of steps"),),
    "test_alone_batched_chunked_reused_preempted_and_travelling_agree": (("", "60 s: hundreds of steps"),),
    "test_logits_do_not_depend_on_company": (("", "30 s: a hundred steps"),),
    "test_unused_pages_may_hold_anything": (("", "20 s: a hundred steps"),),
    "test_long_sums_have_two_levels": (("", "5 s: sums of 25600 terms"),),
    "test_a_frequent_id_is_summed_in_two_levels": (("", "6 s: a sum of 25600 terms"),),
}


def left_out(function: str, parameters: str) -> bool:
    """Whether a test with these parameters ("sim-h3") does not run on the simulator."""
    return any(not part or f"-{part}-" in f"-{parameters}-" for part, _ in LEFT_OUT.get(function, ()))


@contextmanager
def new_simulator(**options: Any) -> Iterator[SimBackend]:
    """A simulator whose compiled and translated kernels stay between test runs."""
    from cupyllm.backend.sim import SimBackend

    backend = SimBackend(cache=KERNELS, **options)
    yield backend
    backend.close()


def share_kernels(cache: Path) -> None:
    """Let a command's cache directory use the compiled and translated kernels of the tests."""
    cache.mkdir(parents=True, exist_ok=True)
    for name in ("kernels", "sim"):
        (KERNELS / name).mkdir(parents=True, exist_ok=True)
        if not (cache / name).exists():
            (cache / name).symlink_to(KERNELS / name)
