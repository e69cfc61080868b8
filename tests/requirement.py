"""The requirement's verification design, cell by cell, and the tests that stand for each.

Section numbers are those of the requirement. `tests/test_requirement.py` checks that every test named here exists and
runs unconditionally; ``python tests/requirement.py`` prints the table.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cell:
    """One line of the requirement.

    Args:
        section: where it stands.
        what: the line, in short.
        torch, mindspore: ``file::test`` below ``tests/torch`` and ``tests/mindspore``.
    """

    section: str
    what: str
    torch: tuple[str, ...] = ()
    mindspore: tuple[str, ...] = ()


MATRIX = (
    Cell(
        "9.1 UT",
        "placements of FSDP, HSDP, TP + FSDP, TP + HSDP",
        (
            "test_buffers.py::test_fsdp_sizes_offsets_and_placements",
            "test_buffers.py::test_hsdp_sizes_offsets_and_placements",
            "test_buffers.py::test_tensor_parallel_placements_are_kept",
            "test_tensor_parallel.py::test_blocks_of_unlike_length_take_units_per_block",
            "test_tensor_parallel.py::test_hsdp_puts_replicate_in_front_of_both",
        ),
        (
            "test_ms_buffers.py::test_fsdp_placements_sizes_offsets_and_padding",
            "test_ms_buffers.py::test_hsdp_puts_replicate_in_front",
            "test_ms_buffers.py::test_tensor_parallel_placements_are_kept",
            "test_ms_buffers.py::test_tensor_parallel_placements_under_hsdp",
        ),
    ),
    Cell(
        "9.1 Level0",
        "FSDP with rows that do not divide: loss, gradients, updates",
        ("test_fully_shard.py::test_fsdp_trains_like_the_unsharded_model",),
        ("test_ms_fully_shard.py::test_fsdp_trains_like_the_unsharded_cell",),
    ),
    Cell(
        "9.1 Level0",
        "HSDP with rows that do not divide: loss, gradients, updates",
        ("test_fully_shard.py::test_hsdp_trains_like_the_unsharded_model",),
        ("test_ms_flow.py::test_hsdp_trains_like_the_unsharded_cell",),
    ),
    Cell(
        "9.2",
        "FSDP / HSDP: sharded_size, padded_sharded_param_size, end to end",
        (
            "test_buffers.py::test_fsdp_sizes_offsets_and_placements",
            "test_models.py::test_a_language_model_trains_like_the_unsharded_one",
            "test_random_models.py::test_random_models_train_like_the_unsharded_model",
        ),
        (
            "test_ms_buffers.py::test_fsdp_placements_sizes_offsets_and_padding",
            "test_ms_flow.py::test_trains_like_the_unsharded_cell",
        ),
    ),
    Cell(
        "9.2",
        "TP + FSDP, TP + HSDP: placements kept, gradients as the unsharded model's",
        ("test_tensor_parallel.py::test_trains_like_the_unsharded_model",),
        (
            "test_ms_tensor_parallel.py::test_trains_like_the_unsharded_cell",
            "test_ms_tensor_parallel.py::test_placements_state_both_cuts_and_gradients_have_them",
            "test_ms_tensor_parallel.py::test_hsdp_puts_replicate_in_front_of_both_cuts",
        ),
    ),
    Cell(
        "9.2",
        "SP + FSDP, SP + HSDP: layouts of inputs and outputs unchanged",
        ("test_sequence_parallel.py::test_sequence_and_loss_parallel_train_like_the_unsharded_model",),
        (
            "test_ms_tensor_parallel.py::test_sequence_parallel_trains_like_the_unsharded_cell",
            "test_ms_tensor_parallel.py::test_fully_shard_leaves_the_layouts_of_activations_alone",
        ),
    ),
    Cell(
        "9.2",
        "prefetch",
        (
            "test_composition.py::test_any_prefetch_order_trains_like_the_unsharded_model",
            "test_composition.py::test_prefetch_with_hsdp",
        ),
        ("test_ms_flow.py::test_trains_like_the_unsharded_cell",),
    ),
    Cell(
        "9.2",
        "recomputation",
        ("test_composition.py::test_recomputation_costs_no_collective_and_leaks_nothing",),
        ("test_ms_flow.py::test_trains_like_the_unsharded_cell",),
    ),
    Cell(
        "9.2",
        "deferred initialisation: reset_sharded_param() rebuilds view and storage",
        (
            "test_composition.py::test_deferred_init_gives_the_values_of_the_unsharded_model",
            "test_composition.py::test_deferred_init_with_hsdp",
            "test_buffers.py::test_padding_is_zero_after_reset_sharded_param",
        ),
        (
            "test_ms_flow.py::test_deferred_initialisation_gives_the_values_of_an_eager_one",
            "test_ms_buffers.py::test_reset_rebuilds_the_storage_after_a_cast",
        ),
    ),
    Cell(
        "9.2",
        "distributed checkpoint: placements say what each rank holds",
        (
            "test_checkpoint_layouts.py::test_every_value_is_exact_in_every_layout",
            "test_checkpoint_resume.py::test_the_next_steps_equal_those_of_the_run_that_never_stopped",
        ),
        (
            "test_ms_checkpoint.py::test_the_next_steps_equal_those_of_the_run_that_never_stopped",
            "test_ms_checkpoint.py::test_either_framework_loads_what_the_other_saved",
        ),
    ),
    Cell(
        "9.2",
        "PyTorch and MindSpore agree in placements, padding and gradients",
        mindspore=("test_ms_parity.py::test_torch_and_mindspore_agree",),
    ),
    Cell(
        "9.2 boundary",
        "fewer rows than ranks: the last ranks hold none",
        ("test_fully_shard.py::test_placements_state_each_ranks_rows",),
        ("test_ms_buffers.py::test_fsdp_placements_sizes_offsets_and_padding",),
    ),
    Cell(
        "9.2 boundary",
        "padding is zero at first and before each reuse of a buffer",
        ("test_buffers.py::test_padding_is_zero_before_each_use_and_after_every_optimizer",),
        ("test_ms_buffers.py::test_poisoned_padding_changes_nothing_and_is_zero_afterwards",),
    ),
    Cell(
        "9.2 boundary",
        "all-gather: padded alike on every rank, logical rows come out",
        ("test_buffers.py::test_all_gather_inputs_are_padded_alike_and_the_output_is_the_logical_parameter",),
        ("test_ms_buffers.py::test_collectives_carry_padded_sizes_and_hand_out_actual_ones",),
    ),
    Cell(
        "9.2 boundary",
        "reduce-scatter: zeros at the tail, offsets by padded sizes, actual rows only",
        (
            "test_buffers.py::test_reduce_scatter_copy_in_pads_with_zeros_and_advances_by_padded_sizes",
            "test_buffers.py::test_gradients_use_actual_rows_only",
        ),
        ("test_ms_buffers.py::test_collectives_carry_padded_sizes_and_hand_out_actual_ones",),
    ),
    Cell(
        "9.2 boundary",
        "even parameters: no allocation and no copy for padding",
        (
            "test_even_parameters.py::test_even_parameters_allocate_copy_and_zero_nothing_for_padding",
            "test_even_parameters.py::test_an_even_parameters_storage_is_the_shard_itself",
        ),
        ("test_ms_buffers.py::test_fsdp_placements_sizes_offsets_and_padding",),
    ),
    Cell(
        "10",
        "low precision, alone and with HSDP, TP, SP, prefetch, recomputation, deferred initialisation",
        (
            "test_precision.py::test_low_precision_equals_the_same_arithmetic_unsharded",
            "test_precision_combinations.py::test_bfloat16_equals_the_same_arithmetic_without_sharding",
        ),
        ("test_ms_flow.py::test_mixed_precision_computes_in_float16_and_keeps_float32",),
    ),
    Cell(
        "10",
        "memory as of torch's fully_shard (benchmarks/step.py reports the time)",
        ("test_step_memory.py::test_a_step_holds_no_more_than_one_of_torchs_fully_shard",),
    ),
    Cell(
        "10",
        "prefetch with meta initialisation, and TP, recomputation",
        (
            "test_tensor_parallel_models.py::"
            "test_llama_with_tp_fsdp_recompute_prefetch_and_meta_init_trains_like_the_unsharded_model",
        ),
        ("test_ms_tensor_parallel.py::test_prefetch_recomputation_and_deferred_initialisation",),
    ),
    Cell(
        "10",
        "parameters() are DTensors, gradients have their placements",
        (
            "test_tensor_parallel.py::test_trains_like_the_unsharded_model",
            "test_fully_shard.py::test_fsdp_trains_like_the_unsharded_model",
        ),
        (
            "test_ms_buffers.py::test_gradients_lie_as_their_parameters",
            "test_ms_tensor_parallel.py::test_placements_state_both_cuts_and_gradients_have_them",
        ),
    ),
)


def table() -> str:
    """One line a cell, with the number of tests per backend."""
    lines = [f"{'section':13} {'torch':>5} {'mindspore':>9}  what"]
    lines += [f"{cell.section:13} {len(cell.torch):5} {len(cell.mindspore):9}  {cell.what}" for cell in MATRIX]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
